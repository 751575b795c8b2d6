"""What a batch asks of drafts and policies: nothing that its load planner has no use for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafts.ngram import NgramDraft
from edgespec import SamplingParams
from edgespec.decoding.params import SamplingParams as Params
from edgespec.decoding.round import Generation
from edgespec.serving import host
from predictor.planner import AutoPlanner, Candidate, Forecast, Plan
from tests.serving.engines import PROMPTS, WAIT, load
from tests.serving.stage import Stage, lengths
from tests.support.held import make_held_target
from tests.support.scripted import PROMPT, ToyDecoder, plain_greedy, self_draft, session

MANY = 4


class Counting(AutoPlanner):
    """Counts what it is asked, in `asked`, which all of one test share."""

    def __init__(self, asked: Counter[str]) -> None:
        super().__init__()
        self.asked = asked

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        self.asked["forecast"] += 1
        return super().forecast(candidates, limit)

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        self.asked["shadows"] += 1
        return super().shadows(plan, candidates)


class CountingDraft(NgramDraft):
    def __init__(self, asked: Counter[str]) -> None:
        super().__init__()
        self._asked = asked

    def open(self) -> Any:
        self._asked["open"] += 1
        return super().open()


def asked_under(load: str, **params: Any) -> tuple[Counter[str], list[Any]]:
    """What four texts at once ask of planner and draft, and their results."""
    asked: Counter[str] = Counter()
    stage = Stage(None, [CountingDraft(asked), self_draft(ToyDecoder())], planner=lambda: Counting(asked), load=load)
    return asked, stage.ran(*(stage.submit(PROMPT, max_new_tokens=20, **params) for _ in range(MANY)))


def test_nothing_is_asked_where_nothing_is_drafted() -> None:
    asked, results = asked_under("none")
    assert not asked
    assert [list(result.token_ids) for result in results] == [plain_greedy(ToyDecoder(), PROMPT, 20)] * MANY
    assert all(result.stats.proposed_tokens == 0 for result in results)


@pytest.mark.parametrize("load", ["fixed:2", "edgespec", "goodput"])
def test_a_forecast_is_asked_once_a_round_where_something_may_be(load: str) -> None:
    asked, results = asked_under(load)
    # The last round of a text may have no room for a guess: then nothing is asked.
    rounds = sum(result.stats.rounds for result in results)
    assert rounds - MANY <= asked["forecast"] <= rounds
    assert asked["open"] == MANY


def test_a_text_with_a_seed_guesses_whatever_the_load() -> None:
    params = {"temperature": 0.8, "seed": 5}
    _asked, results = asked_under("none", **params)
    generation = Generation(
        session(None, [NgramDraft(), self_draft(ToyDecoder())], planner=AutoPlanner()),
        PROMPT,
        Params(max_new_tokens=20, **params),
    )
    list(generation.deltas())
    assert {result.token_ids for result in results} == {generation.result.token_ids}
    assert all(result.stats.proposed_tokens for result in results)


def test_another_load_planner_may_take_over() -> None:
    asked: Counter[str] = Counter()
    stage = Stage(None, [self_draft(ToyDecoder())], planner=lambda: Counting(asked), load="none")
    stage.before_batch[5] = lambda: setattr(stage.runner, "lengths", lengths("fixed:3"))
    results = stage.ran(*(stage.submit(PROMPT, max_new_tokens=30) for _ in range(MANY)))
    assert [list(result.token_ids) for result in results] == [plain_greedy(ToyDecoder(), PROMPT, 30)] * MANY
    assert all(result.stats.accepted_tokens > 0 for result in results)
    assert asked["forecast"]
    drafted = [sum(record.drafted) for record in stage.records]
    assert not any(drafted[:5])
    assert any(drafted[5:])


@pytest.mark.parametrize("policy", ["none", "edgespec"])
def test_texts_have_wishes_only_where_drafts_may_run(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    steering = host.Texts.steering
    monkeypatch.setattr(host.Texts, "steering", lambda *args: made.append(1) or steering(*args))
    with load(make_held_target(tmp_path, monkeypatch), drafts=("auto",), resident=2, load_policy=policy) as engine:
        requests = [engine.submit(prompt, SamplingParams(max_new_tokens=6)) for prompt in PROMPTS[:3]]
        for request in requests:
            request.result(WAIT)
    assert len(made) == (0 if policy == "none" else 3)
