"""What a batch's record says of time: of planned drafting, apart from what drafts guess only to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.decoding import drafting, halves, round
from edgespec.serving import batch
from edgespec.serving.records import BatchRecord
from predictor import FixedPlanner
from predictor.catch_up import PIECE
from predictor.plans import NOTHING_TO_DRAFT, Candidate, Forecast, Plan
from tests.serving.stage import Stage
from tests.support.scripted import ScriptedDraft

GUESS, SHADOW, READ, FORECAST = 3.0, 10.0, 5.0, 1.0  # seconds of one call each
PROMPTS = [[7, 8, 9], [9, 8, 7]]


class Clock:
    """Time goes on only when something says that it took time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (batch, drafting, halves, round):
            monkeypatch.setattr(module, "perf_counter_ns", lambda: int(self.now * 1e9))
        monkeypatch.setattr(batch, "perf_counter", lambda: self.now)


class Slow(ScriptedDraft):
    """Takes its seconds for every guess, and for every piece that it reads if it has to read at all."""

    kind = "head"

    def __init__(self, clock: Clock, name: str, seconds: float, *, reads: bool = False) -> None:
        super().__init__(lambda tokens, gamma: [2] * gamma, name)
        self.clock, self.seconds, self.reads, self.read = clock, seconds, reads, 0

    def open(self) -> Slow:
        return Slow(self.clock, self.name, self.seconds, reads=self.reads)

    def behind(self, tokens: Sequence[int]) -> int:
        return max(len(tokens) - 1 - self.read, 0) if self.reads else 0

    def catch_up(self, tokens: Sequence[int], limit: int) -> int:
        self.clock.now += READ
        self.read += min(limit, self.behind(tokens))
        return self.behind(tokens)

    def propose(self, tokens: Sequence[int], gamma: int, choose: Any, *, floor: float = 0.0) -> Any:
        self.clock.now += self.seconds
        self.read = len(tokens)
        return super().propose(tokens, gamma, choose, floor=floor)

    def crop(self, length: int) -> None:
        self.read = min(self.read, length)


class Comparing(FixedPlanner):
    """Asks one draft in every round, if at all, and lets the other guess along."""

    def __init__(self, clock: Clock, *, asks: bool) -> None:
        super().__init__("planned", 2)
        self.clock, self.asks = clock, asks

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        self.clock.now += FORECAST
        return super().forecast(candidates, limit) if self.asks else NOTHING_TO_DRAFT

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [candidate._replace(shadow=2) for candidate in candidates if candidate.name == "beside"]


def records(
    monkeypatch: pytest.MonkeyPatch, prompts: Sequence[list[int]], *, asks: bool, **more: Any
) -> list[BatchRecord]:
    """Of the batches in which both texts have a round and may still guess."""
    clock = Clock(monkeypatch)
    drafts = [Slow(clock, "planned", GUESS, **more), Slow(clock, "beside", SHADOW)]
    stage = Stage(None, drafts, load="fixed:2", threads=1, planner=lambda: Comparing(clock, asks=asks))
    stage.ran(*(stage.submit(prompt, max_new_tokens=12, ignore_eos=True) for prompt in prompts))
    return [record for record in stage.records if len(record.requests) == 2][:3]


def told(record: BatchRecord) -> tuple[float, float, float]:
    return record.draft_seconds, record.draft_work, record.seconds


def test_what_is_guessed_only_to_be_compared_and_planning_are_no_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    for record in records(monkeypatch, PROMPTS, asks=True):
        assert record.drafted == (2, 2)
        assert told(record) == pytest.approx((2 * GUESS, 2 * GUESS, 2 * (FORECAST + SHADOW + GUESS)))


def test_where_nothing_is_planned_nothing_is_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    for record in records(monkeypatch, PROMPTS, asks=False):
        assert (record.draft_seconds, record.draft_work) == (0.0, 0.0)
        assert record.seconds == pytest.approx(2 * (FORECAST + SHADOW))


def test_reading_up_for_a_plan_is_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before it has come far enough to guess."""
    prompts = [[7 + at % 20 for at in range(PIECE + 40)]] * 2
    first, second, *_ = records(monkeypatch, prompts, asks=True, reads=True)
    assert (first.drafted, second.drafted) == ((0, 0), (2, 2))
    assert told(first) == pytest.approx((2 * READ, 2 * READ, 2 * (FORECAST + READ + SHADOW)))
    assert told(second)[:2] == pytest.approx((2 * (READ + GUESS), 2 * (READ + GUESS)))


def test_drafts_that_work_side_by_side_share_the_time_in_which_all_were_prepared() -> None:
    turns = [batch._Turn(None, own=own, spent=spent) for own, spent in ((3_000_000, 5_000_000), (5_000_000, 5_000_000))]  # type: ignore[arg-type]
    assert batch._drafting(turns, 0.006, 0.0) == pytest.approx((0.006 * 8 / 10, 0.008))
    assert batch._drafting([], 0.001, 0.0) == (0.0, 0.0)


def test_a_device_says_how_long_its_drafts_worked() -> None:
    turn = batch._Turn(None, own=1_000_000, spent=2_000_000)  # type: ignore[arg-type]
    turn.prepared = SimpleNamespace(planned=0, drafted=1_000_000)  # type: ignore[assignment]
    turn.seen = SimpleNamespace(observation=SimpleNamespace(draft_seconds=0.009))  # type: ignore[assignment]
    assert batch._drafting([turn], 0.002, 0.008) == pytest.approx((0.001 + 0.008, 0.009))
