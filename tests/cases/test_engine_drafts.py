"""An engine's drafts when something comes in between: Ctrl-C, threads or memory that cannot be had, no `close`."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, SamplingParams, residency
from edgespec.errors import DraftError, MemoryBudgetError
from edgespec.memory.slots import MemorySlot
from edgespec.memory.states import State
from edgespec.residency import HeldDrafts
from edgespec.steering import RankerThread
from predictor.policies import Holding
from tests.support.draft_sets import write_draft
from tests.support.held import make_held_target
from tests.support.tiny_engine import QUESTION, load, plain

LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)
WAIT = 10.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture
def target(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_held_target(home, monkeypatch)
    if not (home / "extra").exists():
        write_draft(home / "extra", folder, seed=9)
    return folder


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert threads() == []


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("edgespec")]


def wait_for_no_threads() -> None:
    deadline = time.monotonic() + WAIT
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == []


def resident(engine: Engine) -> list[str]:
    assert engine.working_set is not None
    return [name for name, state in engine.working_set.states().items() if state.state is State.RESIDENT]


def drafted(engine: Engine) -> int:
    """Rounds of one answer that a draft ran in."""
    result = engine.generate(QUESTION, LONG)
    assert result.token_ids == plain(engine, QUESTION, LONG)
    return result.stats.rounds - result.stats.draft_share["plain"]


def once(method: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """The method, but its first call raises."""
    left = [error]

    def raising(*given: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return method(*given, **named)

    return raising


def refuse_thread(name: str, monkeypatch: pytest.MonkeyPatch, times: int = 99) -> None:
    start, left = threading.Thread.start, [name] * times

    def refusing(thread: threading.Thread) -> None:
        if thread.name in left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)


# One more draft


def test_ctrl_c_while_a_draft_is_added_leaves_all_as_it_was(
    target: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(target, resident=2, gamma=3) as engine:
        before = list(engine.drafts)
        monkeypatch.setattr(HeldDrafts, "begin", once(HeldDrafts.begin, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.add_draft(str(home / "extra"))
        assert list(engine.drafts) == before
        assert engine.working_set.idle(WAIT)
        assert drafted(engine) > 30
        assert engine.add_draft(str(home / "extra")).name == "extra"
        engine.use_draft("extra")


@pytest.mark.parametrize("problem", ["an error", "no thread"])
def test_a_draft_that_cannot_be_held_leaves_the_others(
    target: Path, home: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    with load(target, resident=2, gamma=3) as engine:
        if problem == "an error":
            monkeypatch.setattr(HeldDrafts, "begin", once(HeldDrafts.begin, RuntimeError("surprise")))
        else:
            refuse_thread("edgespec-loader", monkeypatch, times=1)
        info = engine.add_draft(str(home / "extra"))
        assert info.status.startswith("failed: ")
        assert ("surprise" if problem == "an error" else "can't start new thread") in info.status
        assert drafted(engine) > 30
        assert engine.drafts["extra"] != "active"
        assert len(resident(engine)) == 2


def test_where_not_even_the_others_can_be_held_again_the_cause_is_said(
    target: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(target, resident=2, gamma=3) as engine:

        def refused(config: Any, *_: Any) -> Any:
            if config.resident:
                raise MemoryBudgetError("others took it")
            return residency.Room()

        monkeypatch.setattr(residency, "slots_that_fit", refused)
        engine.add_draft(str(home / "extra"))
        assert engine.drafts["general"] == "failed: others took it"
        assert drafted(engine) == 0


def test_adding_a_draft_waits_for_the_round_that_runs(target: Path, home: Path) -> None:
    """Else a draft in use would be in memory beside those of the new working set."""
    with load(target, resident=1, gamma=3) as engine:
        engine.working_set._close_seconds = 0.0
        engine.working_set.retarget(["math"], reason="test")  # not what the new one begins with
        assert engine.working_set.idle(WAIT)
        lease = engine.working_set.acquire()
        assert lease.names == {"math"}
        threading.Timer(0.2, lease.release).start()
        engine.add_draft(str(home / "extra"))
        loaded = [s.name for s in engine._statuses.values() if s.loadable and s.draft.loaded]  # type: ignore[attr-defined]
        assert loaded == resident(engine)
        assert len(loaded) == 1


def test_a_draft_that_is_added_while_memory_is_lent_takes_none(target: Path, home: Path) -> None:
    """Keys and values are in the memory of the slots: nothing is loaded into it before it is given back."""
    with load(target, resident=2, gamma=3) as engine:
        before = engine.working_set
        before.lend("test")
        assert before.idle(WAIT)
        assert before.empty
        assert engine.add_draft(str(home / "extra")).status in ("cold", "warm")
        assert engine.working_set.idle(WAIT)
        assert engine.working_set.lent
        assert engine.working_set is not before
        assert not before.empty  # a closed one has nothing to lend
        assert resident(engine) == []
        assert [s.name for s in engine._statuses.values() if s.loadable and s.draft.loaded] == []  # type: ignore[attr-defined]
        engine.working_set.take_back("test")
        assert engine.working_set.idle(WAIT)
        assert len(resident(engine)) == 2
        assert drafted(engine) > 30


def test_memory_that_comes_back_while_a_draft_is_added_is_used(
    target: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(target, resident=2, gamma=3) as engine:
        before, begin = engine.working_set, HeldDrafts.begin

        def returning(held: HeldDrafts, *, wait: bool = True) -> None:
            before.take_back("test")  # who lends knows no other one yet
            begin(held, wait=wait)

        before.lend("test")
        monkeypatch.setattr(HeldDrafts, "begin", returning)
        engine.add_draft(str(home / "extra"))
        assert engine.working_set.idle(WAIT)
        assert len(resident(engine)) == 2


def test_what_drafts_keep_of_further_conversations_is_planned(target: Path, home: Path) -> None:
    part = "keys and values of drafts"
    with load(target, resident=2, gamma=3) as engine:
        planned, one = engine._target.planned, engine._target.planned[part]
        assert engine._held.further_bytes == one  # of four heads
        engine._held.plan_for(8)
        assert planned[part] == 8 * one
        engine.add_draft(str(home / "extra"))
        assert planned[part] == 8 * engine._held.further_bytes > 8 * one
        engine._held.plan_for(1)
        assert planned[part] == engine._held.further_bytes


# One draft alone


@pytest.mark.parametrize("earlier", ["auto", "chat"])
def test_ctrl_c_while_a_draft_is_waited_for_keeps_the_earlier_choice(
    target: Path, monkeypatch: pytest.MonkeyPatch, earlier: str
) -> None:
    with load(target, resident=1, gamma=3) as engine:
        engine.use_draft(earlier)
        before = resident(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine.working_set, "wait_for", once(lambda *_: True, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                engine.use_draft("math")
        assert engine._held.scheduler.pinned == (None if earlier == "auto" else earlier)
        assert engine.working_set.idle(WAIT)
        assert resident(engine) == before
        assert drafted(engine) > 30


def test_a_draft_that_cannot_be_used_leaves_the_one_that_was_asked_for_before(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("broken")

    with load(target, resident=1, gamma=3) as engine:
        engine.use_draft("chat")
        monkeypatch.setattr(engine._statuses["math"].draft, "load", broken)
        with pytest.raises(DraftError, match="broken"):
            engine.use_draft("math")
        assert engine.working_set.idle(WAIT)
        assert resident(engine) == ["chat"]
        assert drafted(engine) > 30


def test_a_wish_that_was_thought_of_before_a_draft_was_asked_for_does_not_count(target: Path) -> None:
    with load(target, resident=1, gamma="auto") as engine:
        policy, calls = engine._held.policy, []
        hold = policy.hold

        def late(view: Any) -> Any:
            calls.append(view)
            if len(calls) > 1:
                return hold(view)
            engine.use_draft("math")  # as another thread may, at this moment
            return Holding(("code",), "too late")

        policy.hold = late
        engine.generate(QUESTION, LONG)
        assert calls
        assert engine.working_set.idle(WAIT)
        assert resident(engine) == ["math"]


def test_a_draft_is_not_chosen_while_the_drafts_change(target: Path) -> None:
    with load(target, resident=1, gamma=3) as engine:
        with engine._changing:
            thread = threading.Thread(target=engine.use_draft, args=("ngram",))
            thread.start()
            thread.join(0.05)
            assert engine._chosen == "auto"
        thread.join(WAIT)
        assert engine._chosen == "ngram"


def test_a_draft_that_was_given_up_makes_way(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def level(self, tokens: object) -> int:
            return 1

        def propose(self, *_: object, **__: object) -> None:
            raise OSError(5, "I/O error")

        def crop(self, length: int) -> None: ...

        def close(self) -> None: ...

    with load(target, resident=1, gamma=3) as engine:
        (name,) = resident(engine)
        monkeypatch.setattr(engine._statuses[name].draft, "open", lambda *_: Broken())
        assert drafted(engine) == 0
        engine.generate(QUESTION, LONG)
        assert engine.working_set.idle(WAIT)
        assert resident(engine) != [name]
        assert drafted(engine) > 30
        with pytest.raises(DraftError, match="I/O error"):
            engine.use_draft(name)
        assert engine._held.scheduler.pinned is None


# What cannot be had, and the end


@pytest.mark.parametrize("missing", ["edgespec-loader", "edgespec-watch", "slots"])
def test_drafts_that_cannot_be_held_cost_speed_and_one_warning(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        if missing == "slots":
            patch.setattr(MemorySlot, "__init__", no_memory)
        else:
            refuse_thread(missing, patch)
        engine = load(target, resident=2, gamma="auto")
    with engine:
        assert threads() == []
        assert engine.drafts["math"].startswith("failed: drafts cannot be held: ")
        assert not [part for part in engine._target.planned if "slots" in part]
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_ranker_without_a_thread_costs_its_ranking(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranker:
        features = None

    monkeypatch.setattr(residency, "_ranker", lambda *_: Ranker())
    refuse_thread("edgespec-ranker", monkeypatch)
    with load(target, resident=2, gamma="auto") as engine:
        assert engine._held.scheduler.ranker is None
        assert drafted(engine) >= 0
    assert threads() == []


def test_an_engine_that_cannot_be_made_leaves_no_thread(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "Scheduler", once(residency.Scheduler, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        load(target, resident=2, gamma="auto")
    assert threads() == []


def test_an_engine_that_is_dropped_ends_its_threads_and_is_freed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(target, resident=2, gamma="auto")
    engine._held.scheduler.ranker = RankerThread(None)  # type: ignore[arg-type]
    engine.generate(QUESTION, LONG)
    decoder = weakref.ref(engine._target.decoder)
    del engine
    wait_for_no_threads()
    gc.collect()
    assert decoder() is None


def test_an_engine_lives_as_long_as_an_answer_of_it(target: Path) -> None:
    stream = load(target, resident=1, gamma=3).stream(QUESTION, LONG)
    next(stream)
    gc.collect()
    time.sleep(0.6)  # two looks
    assert threads()
    for _ in stream:
        pass
    assert stream.result.stats.draft_share["plain"] < 5
    del stream
    wait_for_no_threads()


def test_ctrl_c_while_an_engine_closes_leaves_no_thread(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(target, resident=2, gamma="auto")
    held = engine._held
    monkeypatch.setattr(held.working_set, "close", once(held.working_set.close, KeyboardInterrupt()))
    monkeypatch.setattr(held.scheduler, "close", once(held.scheduler.close, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert held in residency._open
    engine.close()
    assert threads() == []
    assert held not in residency._open


def test_at_the_end_all_engines_are_closed_though_one_cannot_be(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [load(target, resident=1, gamma=3) for _ in range(2)]
    monkeypatch.setattr(HeldDrafts, "remember", once(HeldDrafts.remember, ValueError("surprise")))
    with pytest.raises(ValueError, match="surprise"):
        residency._close_all()
    assert threads() == []
    for engine in engines:
        engine.close()
