"""Engines that hold fewer drafts than there are: whatever comes and goes, the text is the target's own."""

from __future__ import annotations

import json
import logging
import random
import threading
from pathlib import Path

import pytest

from drafts.head import FILE_NAME
from edgespec import SamplingParams, residency
from edgespec.errors import ConfigError, DraftError
from edgespec.memory.states import State
from edgespec.telemetry.trace import LOADS, Tracer
from predictor.planner import Candidate
from tests.support.held import NAMES, make_held_target
from tests.support.tiny_engine import GREEDY, QUESTION, load, plain

LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("held")


@pytest.fixture
def target(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_held_target(home, monkeypatch)


@pytest.mark.parametrize(
    "policy", ["edgespec", "memspec@3", "mab-async,n=1", "mab-sync,n=2", "ucbspec", "exp3spec", "hedge", "nightjar"]
)
def test_every_policy_writes_the_plain_text(target: Path, policy: str) -> None:
    with load(target, resident=2, policy=policy, gamma="auto") as engine:
        for number in range(4):
            prompt = f"{QUESTION} {number}"
            result = engine.generate(prompt, LONG)
            assert result.token_ids == plain(engine, prompt, LONG)
            states = engine.working_set.states().values()
            assert sum(state.state is State.RESIDENT for state in states) <= 2
        counters = engine.working_set.counters
        assert counters.waits_in_round == 0
        assert counters.failures == 0
        assert (result.stats.load_seconds_exposed == 0) or policy.startswith("mab-sync")


def test_loads_are_counted_where_they_happened(target: Path) -> None:
    tracer = Tracer()
    with load(target, resident=1, policy="mab-async,n=1", gamma="auto", tracer=tracer) as engine:
        before = engine.working_set.counters.loads
        results = []
        while not any(result.stats.loads for result in results):
            results.append(engine.generate(QUESTION, LONG))  # a load takes as long as many of these texts
            assert len(results) < 1000
        within = sum(result.stats.loads for result in results)
        assert 1 <= within <= engine.working_set.counters.loads - before
        for stats in (result.stats for result in results):
            assert (stats.load_seconds_hidden > 0) == (stats.loads > 0)
            assert 0 <= stats.fallback_share <= 1
    assert any(event.lane == LOADS and event.name.startswith("load ") for event in tracer.events())


def test_a_draft_whose_file_goes_while_it_is_away_costs_one_warning(
    target: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = home / "home" / "drafts" / "set" / "math" / FILE_NAME
    content = file.read_bytes()
    try:
        with caplog.at_level(logging.WARNING), load(target, resident=1, gamma="auto") as engine:
            (away,) = [name for name in ("math",) if engine.drafts[name] != "active"]
            file.unlink()
            for _ in range(3):
                engine.working_set.retarget([away], reason="test")
                assert engine.working_set.idle(10)
                assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)
            assert engine.drafts[away].startswith("failed: ")
            assert FILE_NAME in engine.drafts[away]
        told = [record for record in caplog.records if "math" in record.getMessage()]
        assert len(told) == 1
    finally:
        file.write_bytes(content)


def test_use_draft_brings_it_in_and_keeps_it(target: Path) -> None:
    with load(target, resident=1, gamma=3) as engine:
        for name in ("math", "code", "math"):
            engine.use_draft(name)
            assert engine.drafts[name] == "active"
            result = engine.generate(QUESTION, GREEDY)
            assert result.stats.draft_share[name] > 0
            assert result.token_ids == plain(engine, QUESTION)


def test_use_draft_says_why_a_draft_cannot_come_in(target: Path) -> None:
    with load(target, resident=1, gamma=3) as engine:
        engine.working_set.lend("a test")
        with pytest.raises(DraftError, match=r"draft math cannot be used: it is \w+, as .* holds keys and values"):
            engine.use_draft("math")
        engine.working_set.take_back("a test")
        engine.working_set.set_capacity(0, "a test")
        with pytest.raises(DraftError, match=r"draft math cannot be used: it is \w+, as memory is too short"):
            engine.use_draft("math")
        engine.working_set.set_capacity(1, "a test")
        engine.use_draft("math")
        assert engine.drafts["math"] == "active"


def test_a_seed_writes_the_same_text_whatever_is_resident(target: Path) -> None:
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=7, ignore_eos=True)
    with load(target, resident=1, gamma="auto") as engine:
        texts = set()
        for name in NAMES:
            engine.working_set.retarget([name], reason="test")
            assert engine.working_set.wait_for(name, 10)
            texts.add(engine.generate(QUESTION, params).token_ids)
        assert len(texts) == 1


def test_what_was_learned_is_kept_and_a_damaged_file_set_aside(
    target: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(target, resident=2, gamma="auto") as engine:
        for _ in range(9):
            engine._held.policy.credit(Candidate("ngram", 3, True), 3, 2)
        file = engine._held._memory.file
    assert json.loads(file.read_text())["arms"]
    with load(target, resident=2, gamma="auto") as engine:
        assert ("ngram", 3) in engine._held.policy.state().arms
    file.write_text("{")
    with caplog.at_level(logging.WARNING), load(target, resident=2, gamma="auto") as engine:
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)
    assert file.with_suffix(".damaged").exists()
    assert sum("set aside" in record.getMessage() for record in caplog.records) == 1


def test_an_unknown_policy_is_refused_by_name(target: Path) -> None:
    with pytest.raises(ConfigError, match="edgespec"):
        load(target, policy="edgespecc", gamma="auto")


class _Ranker:
    """Says what it was told to, or fails."""

    def __init__(self, answers: list[object]) -> None:
        self.answers = answers
        self.asked = 0

    def rank(self, features: object) -> dict[str, float]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            answer = answer()
        return answer  # type: ignore[return-value]


def _with_ranker(engine, ranker: _Ranker):  # type: ignore[no-untyped-def]
    from edgespec.steering import RankerThread
    from predictor.features import Layout, TextFeatures

    scheduler = engine._held.scheduler
    scheduler.ranker = RankerThread(ranker)
    scheduler.features = lambda: TextFeatures(Layout(engine.spec.hidden_size, NAMES))
    return scheduler


@pytest.mark.parametrize("best", NAMES)
def test_the_ranking_decides_what_is_resident(target: Path, best: str) -> None:
    with load(target, resident=1, policy="memspec@3", gamma="auto") as engine:
        _with_ranker(engine, _Ranker([{name: 0.9 if name == best else 0.1 for name in NAMES}]))
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)
        assert engine.working_set.wait_for(best, 10)
        assert engine.generate(QUESTION, LONG).stats.draft_share[best] > 0


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("surprise"),
        {},
        {"chat": float("nan"), "code": 2.0, "math": -1.0, "nobody": 0.5},
        {"chat": "high"},
        None,
    ],
    ids=["raises", "empty", "no chances", "no numbers", "nothing"],
)
def test_a_broken_ranker_changes_nothing(target: Path, answer: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), load(target, resident=2, gamma="auto") as engine:
        _with_ranker(engine, _Ranker([answer]))
        for _ in range(3):
            assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)
    assert len([record for record in caplog.records if "ranker" in record.getMessage()]) <= 1


def test_a_ranker_that_hangs_keeps_nobody_waiting(target: Path) -> None:
    release = threading.Event()
    with load(target, resident=2, gamma="auto") as engine:
        _with_ranker(engine, _Ranker([lambda: release.wait(20) and {}]))
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)
        release.set()


def test_interruption_in_the_middle_of_steering_is_safe(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(target, resident=2, gamma="auto") as engine:
        expected = plain(engine, QUESTION, LONG)
        hold, calls = engine._held.policy.hold, []

        def interrupted(view):  # type: ignore[no-untyped-def]
            calls.append(view)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return hold(view)

        monkeypatch.setattr(engine._held.policy, "hold", interrupted)
        chat = engine.conversation()
        with pytest.raises(KeyboardInterrupt):
            for _ in chat.stream(QUESTION, LONG):
                pass
        assert engine.generate(QUESTION, LONG).token_ids == expected


def test_soak_of_retargets_against_generations(target: Path) -> None:
    """2,000 random retargets against random requests of four threads: always the plain text, no deadlock."""
    with load(target, resident=2, gamma="auto") as engine:
        prompts = [f"{QUESTION} {number}" for number in range(4)]
        wanted = {prompt: plain(engine, prompt, LONG) for prompt in prompts}
        done, problems = threading.Event(), []
        counts = [0] * 4

        def ask(seed: int) -> None:
            chance = random.Random(seed)
            while not done.is_set():
                prompt = chance.choice(prompts)
                length = chance.randint(1, 40)
                params = SamplingParams(max_new_tokens=length, ignore_eos=True)
                try:
                    result = engine.generate(prompt, params)
                    if result.token_ids != wanted[prompt][:length]:
                        problems.append(prompt)
                except Exception as error:
                    problems.append(repr(error))
                counts[seed] += 1

        threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(4)]
        for thread in threads:
            thread.start()
        chance = random.Random(9)
        for _ in range(2000):
            names = chance.sample(NAMES, chance.randint(0, 3))
            engine.working_set.retarget(names, reason="soak")
            done.wait(0.02 if chance.random() < 0.1 else 0)  # now and then long enough for a load
        done.set()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert not problems
        assert min(counts) > 0
        counters = engine.working_set.counters
        assert counters.loads >= 3
        assert counters.failures == counters.waits_in_round == 0
        assert all(status == "active" or not status.startswith("failed") for status in engine.drafts.values())


def test_more_than_there_are_is_said_once(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    residency._warn_of_resident.cache_clear()
    with caplog.at_level(logging.WARNING):
        for resident in (4, 9, 9):
            with load(target, resident=resident, gamma=3) as engine:
                assert engine.working_set.slots == 4
    assert [record.getMessage() for record in caplog.records] == [
        "resident = 9 is more than there is to hold (drafts with weights: 4)"
    ]
