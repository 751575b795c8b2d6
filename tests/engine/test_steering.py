"""What an answer tells the ranker and the policy, and what either may do without harm."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from edgespec import SamplingParams
from edgespec.decoding.guard import Guarded
from edgespec.steering import RankerThread
from predictor.features import PROMPT_WINDOW, RECENT, Layout, TextFeatures
from predictor.planner import Candidate, Plan
from tests.support.held import NAMES, make_held_target
from tests.support.tiny_engine import QUESTION, load, plain

LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)
HALVES = dict.fromkeys(NAMES, 0.5)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steering")


@pytest.fixture
def target(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_held_target(home, monkeypatch)


class _Ranker:
    """Answers as `answer` does, and keeps what it was asked."""

    def __init__(self, answer=lambda: HALVES) -> None:  # type: ignore[no-untyped-def]
        self.answer = answer
        self.asked: list[np.ndarray] = []

    def rank(self, features: np.ndarray) -> dict[str, float]:
        self.asked.append(features.copy())
        return self.answer()


def _steer_by(engine, ranker: _Ranker) -> list[int]:  # type: ignore[no-untyped-def]
    """Let the ranker rank; returns the rounds in which the policy is asked what to hold, as they come."""
    scheduler = engine._held.scheduler
    scheduler.ranker = RankerThread(ranker)
    scheduler.features = lambda: TextFeatures(Layout(engine.spec.hidden_size, NAMES))
    hold, asked = engine._held.policy.hold, []
    engine._held.policy.hold = lambda view: (asked.append(view.round), hold(view))[1]
    return asked


def test_the_ranker_sees_what_it_was_trained_on(target: Path) -> None:
    """As `predictor.train.samples` makes it: all known tokens, states up to the last but one, the prompt's own mean."""
    with load(target, resident=2, gamma="auto") as engine:
        ranker, layout = _Ranker(), Layout(engine.spec.hidden_size, NAMES)
        _steer_by(engine, ranker)
        result = engine.generate(QUESTION, LONG)
        assert engine._held.scheduler.ranker is not None
        engine._held.scheduler.ranker.close()  # what was asked last is answered
        prompt = engine.encode(QUESTION)
        cache = engine._target.decoder.new_cache(engine.context)
        text = [*prompt, *result.token_ids]
        states = engine._target.decoder.forward(text, cache, hidden=True).hidden
    mean = states[max(len(prompt) - PROMPT_WINDOW, 0) : len(prompt)].mean(axis=0)
    at = layout.scalar("new_length")
    compared = 0
    for vector in ranker.asked:
        known = round(float(np.expm1(vector[at] * 8)))  # tokens of the answer
        if known == 0:
            continue  # asked before the prefill: the prompt's text alone
        made = TextFeatures(layout)
        made.begin(prompt)
        made.push(list(result.token_ids[:known]))
        end = len(prompt) + known - 1
        wanted = made.vector(states[max(end - RECENT, 0) : end], mean, {})
        for part in ("hidden_recent", "hidden_prompt", "text_recent", "text_prompt", "scalars"):
            place = layout.parts[part]
            np.testing.assert_allclose(vector[place], wanted[place], atol=2e-4, err_msg=f"{part} at {known}")
        compared += 1
    assert compared >= 2


def test_what_was_seen_of_a_draft_is_smoothed(target: Path) -> None:
    with load(target, resident=2, gamma="auto") as engine:
        steering = engine._held.scheduler.text(40)
        for right in (True, False, True):
            steering.saw("code", right)
        assert steering._recent == {"code": pytest.approx(0.8 * 0.8 + 0.2)}


def test_a_ranker_that_hangs_leaves_memory_to_observation(target: Path) -> None:
    release = threading.Event()
    with load(target, resident=1, policy="memspec,n=2", gamma="auto") as engine:
        holds = _steer_by(engine, _Ranker(lambda: release.wait(30) and HALVES))
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)
        assert len(holds) >= 3
        release.set()


def test_a_ranker_that_never_answers_is_given_up(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edgespec.steering._PATIENCE", 0.0)
    release = threading.Event()
    with caplog.at_level(logging.WARNING), load(target, resident=1, gamma="auto") as engine:
        _steer_by(engine, _Ranker(lambda: release.wait(30) and HALVES))
        for _ in range(2):
            engine.generate(QUESTION, LONG)
        assert "not answered" in (engine._held.scheduler.ranker.reason or "")
        release.set()
    assert sum("the ranker failed" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(("pattern", "given_up"), [("fff", True), ("ffaffaffaffa", True), ("faafaafaafaafaa", False)])
def test_a_ranker_that_fails_often_is_given_up(pattern: str, given_up: bool) -> None:
    script = iter(pattern)

    def answer() -> dict[str, float]:
        if next(script) == "f":
            raise RuntimeError("surprise")
        return HALVES

    ranker = _Ranker(answer)
    thread = RankerThread(ranker)
    for number in range(len(pattern)):
        thread.ask(number, np.zeros(1, np.float32))
        if thread.reason is not None:
            break
        while len(ranker.asked) <= number or thread._since is not None:
            pass
    thread.close()
    assert (thread.reason is not None) == given_up


class _Planner:
    off = False

    def __init__(self, shadows: object) -> None:
        self._shadows = shadows

    def shadows(self, plan: Plan, candidates: object) -> object:
        return self._shadows


@pytest.mark.parametrize(
    ("shadows", "kept"),
    [
        ([Candidate("nobody", 1)], []),
        ([Candidate("here", 1, shadow=10**9)], ["here"]),
        (["here"], []),
        ([None], []),
        (7, []),
    ],
    ids=["not a candidate", "endless", "a name", "nothing", "a number"],
)
def test_only_candidates_are_shadows(shadows: object, kept: list[str]) -> None:
    guarded = Guarded(_Planner(shadows))  # type: ignore[arg-type]
    found = guarded.shadows(Plan(None, 0), [Candidate("here", 1)])
    assert [each.name for each in found] == kept
    assert all(each.shadow <= 64 for each in found)


@pytest.mark.parametrize("policy", ["shadows", "preferred"])
def test_a_policy_that_talks_nonsense_costs_no_text(target: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    nonsense = {"shadows": [Candidate("code", 1), "x"], "preferred": []}[policy]
    with load(target, resident=1, gamma="auto") as engine:
        monkeypatch.setattr(engine._held.policy, policy, lambda *_: nonsense)
        assert engine.generate(QUESTION, LONG).token_ids == plain(engine, QUESTION, LONG)
        assert not any("failed" in status for status in engine.drafts.values())


@pytest.mark.parametrize("policy", ["hedge,n=1", "exp3spec", "nightjar", "edgespec"])
def test_threads_share_a_policy(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    with caplog.at_level(logging.WARNING), load(target, resident=3, policy=policy, gamma="auto") as engine:
        wanted = plain(engine, QUESTION, LONG)
        texts: Counter[bool] = Counter()

        def ask() -> None:
            for _ in range(6):
                texts[engine.generate(QUESTION, LONG).token_ids == wanted] += 1

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == {True: 24}
    assert not [record for record in caplog.records if "policy failed" in record.getMessage()]
