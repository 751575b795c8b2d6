"""Fault cases of drafts that come and go, where the working set meets engine, streams, policies and commands."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from edgespec.cli.main import main
from edgespec.errors import DraftError, EdgespecError, MemoryBudgetError
from edgespec.memory.states import State
from edgespec.steering import RankerThread
from predictor.features import Layout, TextFeatures
from tests.support.draft_sets import write_draft, write_standalone
from tests.support.held import NAMES, make_held_target
from tests.support.loadables import ScriptedDraft
from tests.support.scripted import session as toy_session
from tests.support.tiny_engine import QUESTION, SHAPE, load, plain

LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)
WAIT = 10.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture
def target(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_held_target(home, monkeypatch)
    if not (home / "extra").exists():
        write_draft(home / "extra", folder, seed=9)
        write_standalone(home / "alone", folder, **SHAPE)
    return folder


def boom(*_arguments: Any, **_named: Any) -> Any:
    raise KeyError("boom")


def rank_evenly(engine: Engine) -> None:
    """A ranker that finds all drafts equally good."""

    class Even:
        def rank(self, features: np.ndarray) -> dict[str, float]:
            return dict.fromkeys(NAMES, 0.5)

    scheduler = engine._held.scheduler
    scheduler.ranker = RankerThread(Even())
    scheduler.features = lambda: TextFeatures(Layout(engine.spec.hidden_size, NAMES))


# What steers


@pytest.mark.parametrize(
    "method", ["begin", "hold", "interval", "preferred", "rank", "plan", "shadows", "observe", "credit"]
)
def test_a_broken_policy_costs_speed_and_one_warning(
    target: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with load(target, resident=2, gamma="auto") as engine:
        rank_evenly(engine)
        everybody = lambda plan, candidates: [c._replace(shadow=1) for c in candidates if c.name != plan.draft]  # noqa: E731
        monkeypatch.setattr(engine._held.policy, "shadows", everybody)  # so that there is credit to give
        monkeypatch.setattr(engine._held.policy, method, boom)
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)
    assert sum("boom" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("answer", [None, "plan", 3])
def test_a_plan_that_is_none_is_a_plain_step(target: Path, answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(target, resident=2, gamma="auto") as engine:
        monkeypatch.setattr(engine._held.policy, "plan", lambda *_: answer)
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)


def test_ctrl_c_inside_a_policy_ends_the_answer(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: Any) -> Any:
        raise KeyboardInterrupt

    with load(target, resident=2, gamma="auto") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._held.policy, "plan", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(QUESTION, LONG)
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)


def test_features_that_cannot_be_made_cost_speed_only(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(target, resident=2, gamma="auto") as engine:
        monkeypatch.setattr(engine._held.scheduler, "features", boom)
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)


def test_an_answer_of_the_ranker_that_nobody_took_does_not_end_the_next_wait() -> None:
    class Slow:
        def rank(self, features: np.ndarray) -> dict[str, float]:
            time.sleep(0.05)
            return {"lane": float(features[0])}

    ranker = RankerThread(Slow())
    try:
        ranker.ask(1, np.ones(1, np.float32))
        assert ranker.take(1, WAIT) == {"lane": 1.0}
        ranker.ask(1, np.ones(1, np.float32))  # left lying when its text ends
        deadline = time.monotonic() + WAIT
        while ranker.answers < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        ranker.ask(2, np.full(1, 2, np.float32))
        assert ranker.take(2, WAIT) == {"lane": 2.0}
    finally:
        ranker.close()


def test_a_ranking_of_no_numbers_gives_the_ranker_up_and_not_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        def rank(self, features: np.ndarray) -> Any:
            return {"chat": "much"}

    ranker = RankerThread(Odd())
    try:
        deadline = time.monotonic() + WAIT
        while ranker.reason is None and time.monotonic() < deadline:
            ranker.ask(1, np.ones(1, np.float32))
            time.sleep(0.005)
        assert ranker.reason
    finally:
        ranker.close()


def test_a_draft_that_fails_while_it_reads_up_does_not_run_in_that_round() -> None:
    class Failing:
        def behind(self, tokens: object) -> int:
            return 99

        def catch_up(self, tokens: object, limit: int) -> int:
            raise OSError("gone")

        def close(self) -> None:
            pass

    session = toy_session()
    session.statuses["x"] = _status("x")
    session._open["x"] = session._lagging["x"] = Failing()  # type: ignore[assignment]
    assert session.catch_up("x", 64) is None
    assert not session.statuses["x"].active


def _status(name: str) -> Any:
    from edgespec.decoding.session import DraftStatus

    return DraftStatus(ScriptedDraft(name))  # type: ignore[arg-type]


# Threads


def test_a_stream_may_be_collected_in_a_thread_that_holds_the_lock_of_the_books(target: Path) -> None:
    with load(target, resident=2, gamma="auto") as engine:
        stream = engine.stream(QUESTION, LONG)
        next(stream)
        books = engine.working_set._books

        def collect() -> None:
            with books.lock:
                stream.__del__()

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(WAIT)
        assert not thread.is_alive()
        assert stream.result.finish_reason == "cancelled"


def test_closing_while_another_thread_generates_blames_no_draft(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = load(target, resident=1, gamma="auto", policy="mab-async,n=1")
    stream, ended = engine.stream(QUESTION, SamplingParams(max_new_tokens=150, ignore_eos=True)), []

    def run() -> None:
        try:
            for _ in stream:
                pass
        except EdgespecError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    engine.working_set.retarget(["math"], reason="test")
    engine.close()
    thread.join(WAIT)
    assert not thread.is_alive()
    assert not caplog.records


def test_a_process_that_ends_without_closing_its_engine_ends_well(target: Path, home: Path) -> None:
    code = f"""
import time
from drafts import zoo
from pathlib import Path
zoo.BUILT_IN = Path({str(home / "shipped")!r})
from tests.support.tiny_engine import load
engine = load({str(target)!r}, resident=1, gamma="auto")
for k in range(40):
    engine.working_set.retarget([{NAMES!r}[k % 4]], reason="test")
    time.sleep(0.003)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_lease_at_the_end_keeps_the_memory_of_the_slots(target: Path) -> None:
    engine = load(target, resident=1, gamma=3)
    working_set = engine.working_set
    working_set._close_seconds = 0.05
    with working_set.acquire():
        working_set.close()
        assert not any(slot._memory.closed for slot in working_set._books.schedule.pool.slots)
    engine.close()


# One more draft


def test_a_draft_that_is_added_leaves_conversations_their_drafts_and_is_planned_once(target: Path, home: Path) -> None:
    with load(target, resident=2, gamma=3) as engine:
        session, before = engine.session(), dict(engine._target.planned)
        engine.add_draft(str(home / "extra"))
        assert engine.working_set.slots == 2
        stream = engine.start(session, engine.encode(QUESTION), LONG)
        assert list(stream)
        assert stream.result.stats.draft_share["plain"] < 5
        assert stream.result.token_ids == plain(engine, QUESTION, LONG)
        after = engine._target.planned
        assert after.keys() == before.keys()
        assert after["2 draft slots"] == before["2 draft slots"]


def test_a_draft_that_has_no_room_leaves_the_others_as_they_were(target: Path, home: Path) -> None:
    with load(target, resident=2, gamma=3) as engine:
        needed = sum(engine._target.planned.values())
    with load(target, resident=2, memory_budget=needed + 1000, gamma=3) as engine:
        assert "are needed" in engine.add_draft(str(home / "extra")).status
        assert engine.working_set.slots == 2
        assert engine.generate(QUESTION, LONG).stats.draft_share["plain"] < 5


def test_a_closed_engine_takes_no_draft(target: Path, home: Path) -> None:
    engine = load(target, resident=2, gamma=3)
    engine.close()
    with pytest.raises(EdgespecError, match="closed"):
        engine.add_draft(str(home / "extra"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec")]


# One draft alone


def test_an_answer_that_runs_does_not_take_away_the_draft_that_was_asked_for(target: Path) -> None:
    with load(target, resident=1, gamma="auto", policy="mab-async,n=1") as engine:
        stream = engine.stream(QUESTION, SamplingParams(max_new_tokens=120, ignore_eos=True))
        next(stream)
        engine.use_draft("math")
        for _ in stream:
            pass
        assert engine.working_set.idle(WAIT)
        assert engine.drafts["math"] == "active"
        engine.use_draft("auto")
        engine.working_set.idle(WAIT)
        assert _resident(engine) == ["general"]  # the policy says again what is held, also under a fixed gamma


def test_a_draft_that_cannot_be_used_leaves_what_is_held(target: Path) -> None:
    with load(target, resident=1, gamma=3) as engine:
        before = _resident(engine)
        away = next(name for name in NAMES if name not in before)
        engine.working_set._books.schedule.records[away].draft.load = boom
        with pytest.raises(DraftError, match=away):
            engine.use_draft(away)
        assert engine.working_set.idle(WAIT)
        assert _resident(engine) == before


@pytest.mark.parametrize("name", ["math", "alone"])
def test_an_idle_conversation_keeps_no_session_of_a_draft_that_went(target: Path, home: Path, name: str) -> None:
    with load(target, resident=1, gamma=3, drafts=["chat", "math", str(home / "alone")]) as engine:
        engine.use_draft(name)
        session = engine.session()
        for _ in engine.start(session, engine.encode(QUESTION), LONG):
            pass
        draft = engine._statuses[name].draft
        weights = weakref.ref(draft.decoder if name == "alone" else draft.session)
        engine.use_draft("chat")
        assert engine.working_set.idle(WAIT)
        gc.collect()
        assert weights() is None
        assert session._open[name].level(session.tokens) == 0


def _resident(engine: Engine) -> list[str]:
    return [name for name, state in engine.working_set.states().items() if state.state is State.RESIDENT]


# Memory


def test_memory_that_gets_shorter_while_drafts_are_planned_costs_slots_only(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec import draft_room

    def check(config: object, need: dict[str, int], before: object = None, **_more: object) -> None:
        if "1 draft slots" not in need:
            raise MemoryBudgetError("less than a moment ago")

    monkeypatch.setattr(draft_room, "check_memory", check)
    with load(target, gamma=3) as engine:
        assert engine.working_set.slots == 1
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)


# Commands


def test_commands_about_drafts_look_at_all_of_them_however_few_are_held(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_RESIDENT", "1")
    model = ["-m", str(target), "--weight-format", "float32"]
    assert main(["drafts", "verify", *model]) == 0
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(f'{{"prompt": "{QUESTION}"}}\n')
    words = ["-n", "8", "--gammas", "2", "--cache", "off", "--json", "-q"]
    assert main(["drafts", "evaluate", str(prompts), *words, *model]) == 0
    assert "failed" not in capsys.readouterr().out.lower().replace('"failed": []', "")
