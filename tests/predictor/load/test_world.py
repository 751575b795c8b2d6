"""The simulated loop: its order of things, its seconds, and the planners in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from predictor.load import BatchCosts, make_load_planner
from predictor.load.base import BatchOutcome, LoadView
from predictor.load.planners import FixedLoad
from predictor.load.world import Job, Turn, World
from tests.predictor.load.views import STEP, drafts, flat, running, steep, view

SURE = (1.0,) * 8


def job(time: float = 0.0, prompt: int = 10, new: int = 20, rate: float = 0.0, **changes: Any) -> Job:
    usual: dict[str, Any] = {"draft": "code", "rates": (rate,) * 8} | changes
    return Job(time, prompt, new, **usual)


def world(name: str = "none", costs: BatchCosts | None = None, **changes: Any) -> World:
    true = costs or steep()
    known = BatchCosts.from_json(true.to_json())
    return World(make_load_planner(name, known, drafts(read=0.0)), true, drafts(read=0.0), **changes)


def test_one_request_alone_to_the_second() -> None:
    costs = steep()
    result = world().run([job(3.0, prompt=10, new=4)])
    done, prefill, step = result.requests[0], costs.seconds(1, 10), costs.seconds(1, 1)
    assert done.first == pytest.approx(3.0 + prefill)
    assert done.finished == pytest.approx(done.first + 3 * step)
    assert [tokens for _, tokens in done.pieces] == [1, 1, 1, 1]
    assert result.busy == pytest.approx(prefill + 3 * step)
    assert result.seconds == pytest.approx(done.finished)
    assert result.throughput == pytest.approx(4 / result.busy)


def test_guesses_that_are_always_right_make_blocks_and_stop_at_the_end() -> None:
    result = world("fixed:3").run([job(new=10, rates=SURE)])
    assert [tokens for _, tokens in result.requests[0].pieces] == [1, 4, 4, 1]
    assert [batch.drafted for batch in result.batches[1:]] == [3, 3, 0]
    second = result.batches[1]
    assert second.seconds == pytest.approx(steep().seconds(1, 4) + 3 * STEP)
    assert (second.accepted, second.emitted, second.rows) == (3, 4, 4)


def test_prompts_come_in_pieces_beside_what_runs_and_in_larger_ones_alone() -> None:
    result = world().run([job(0.0, prompt=300, new=60), job(1.0, prompt=150, new=2)])
    assert [batch.rows for batch in result.batches[:3]] == [256, 44, 1]
    beside = [batch.rows for batch in result.batches if batch.sequences == 1 and batch.rows > 1]
    assert beside == [65, 65, 23]
    second = result.requests[1]
    assert second.first < result.requests[0].finished
    assert second.tokens == 2


def test_first_come_first_served_within_the_places_and_the_pool() -> None:
    jobs = [job(0.001 * at, new=30) for at in range(6)]
    places = world(max_sessions=2).run(jobs)
    assert max(batch.sequences for batch in places.batches) == 2
    firsts = [done.first for done in places.requests]
    assert firsts == sorted(firsts)
    assert max(batch.queued for batch in places.batches) == 4
    pool = world(kv_tokens=90).run(jobs)
    assert max(batch.sequences for batch in pool.batches) == 2
    assert min(batch.kv_free for batch in pool.batches) == pytest.approx(1 - 80 / 90)
    with pytest.raises(ValueError, match="never fit"):
        world(kv_tokens=30).run(jobs)


def test_every_token_is_made_once_whatever_the_planner() -> None:
    jobs = [job(0.2 * at, new=5 + at, rate=0.1 * at) for at in range(10)]
    for name in ("none", "fixed:2", "nightjar", "goodput", "banditspec", "tetris:12", "edgespec"):
        result = world(name).run(jobs)
        assert [done.tokens for done in result.requests] == [one.new for one in jobs]
        assert result.tokens == sum(one.new for one in jobs)
        for done in result.requests:
            assert sum(tokens for _, tokens in done.pieces) == done.tokens
            assert done.time < done.first <= done.finished


def test_the_fate_of_a_token_is_the_same_under_every_planner_and_as_likely_as_said() -> None:
    made = world(seed=7)
    assert made._fates(3, job(new=200, rate=0.6)) == world("fixed:4", seed=7)._fates(3, job(new=200, rate=0.6))
    assert made._fates(3, job(new=200, rate=0.6)) != made._fates(4, job(new=200, rate=0.6))
    hits = np.array(made._fates(0, job(new=20000, rates=(0.8, 0.5, 0.5))))
    assert np.mean(hits >= 1) == pytest.approx(0.8, abs=0.02)
    assert np.mean(hits[hits >= 1] >= 2) == pytest.approx(0.5, abs=0.02)


def test_a_text_turns_to_another_draft_and_back() -> None:
    turning = job(new=40, rate=0.0, turns=(Turn(10, "ngram", SURE), Turn(30, "code", (0.0,) * 8)))
    result = world("fixed:4").run([turning])
    made = np.cumsum([tokens for _, tokens in result.requests[0].pieces])
    assert list(made[:10]) == list(range(1, 11))
    assert 15 in made
    assert 11 not in made
    assert list(made[-3:]) == [38, 39, 40]


def test_a_run_can_be_repeated_and_noise_is_seeded() -> None:
    jobs = [job(0.1 * at, new=20, rate=0.5) for at in range(8)]
    first, again = (world("nightjar", noise=0.1, seed=3).run(jobs) for _ in range(2))
    assert first.batches == again.batches
    assert world("nightjar", noise=0.1, seed=4).run(jobs).busy != first.busy


def test_until_ends_a_run_with_what_came() -> None:
    result = world().run([job(new=1000), job(50.0)], until=2.0)
    assert 2.0 <= result.seconds < 2.2
    first, second = result.requests
    assert first.tokens > 50
    assert math.isnan(first.finished)
    assert (second.tokens, second.pieces) == (0, ())


def test_a_draft_that_drafted_nothing_falls_behind_and_pays_for_it() -> None:
    slow = World(make_load_planner("none", steep(), drafts(read=0.001)), steep(), drafts(read=0.001))
    behind: list[int] = []
    planner = slow._planner
    ask = planner.lengths

    def watched(seen: Any) -> Any:
        behind.append(seen.running[0].behind)
        return [2] if len(behind) == 30 else ask(seen)

    planner.lengths = watched  # type: ignore[method-assign]
    result = slow.run([job(prompt=20, new=60)])
    assert behind[28] > behind[0]
    assert behind[31] == 0
    seconds = result.batches[30].seconds  # the prompt's batch comes before them
    assert seconds == pytest.approx(steep().seconds(1, 3) + 2 * STEP + 0.001 * behind[29])


class Noting(FixedLoad):
    """Keeps what it was told."""

    def __init__(self, gamma: int) -> None:
        super().__init__(steep(), drafts(), gamma)
        self.told: list[BatchOutcome] = []

    def observe(self, outcome: BatchOutcome) -> None:
        self.told.append(outcome)
        super().observe(outcome)


def test_shadows_take_time_but_are_no_drafting() -> None:
    none, one = Noting(0), Noting(1)
    result = World(none, steep(), drafts()).run([job(new=60)])
    plain, shadowed = (steep().seconds(1, 1), steep().seconds(1, 1) + 2 * STEP)
    assert sum(batch.seconds == pytest.approx(shadowed, rel=0.03) for batch in result.batches) == 3
    assert none.told[0].seconds == pytest.approx(plain, rel=0.03)
    assert {(told.draft_seconds, told.draft_work) for told in none.told} == {(0.0, 0.0)}
    jobs = [job(new=60, rates=SURE), job(new=60, rates=SURE, fixed=0)]
    World(one, steep(), drafts(read=0.0)).run(jobs)
    assert any(told.seconds > told.draft_seconds + told.target_seconds + STEP for told in one.told)
    assert {round(told.draft_work / STEP, 6) for told in one.told} == {0.0, 1.0}
    assert all(told.draft_seconds == pytest.approx(told.draft_work) for told in one.told)
    assert one.costs.drafting == pytest.approx(1.0)
    assert one.costs.overhead > 0


def test_drafts_side_by_side_take_less_time_than_they_work() -> None:
    noting = Noting(2)
    World(noting, steep(), drafts(read=0.0)).run([job(new=30, rates=SURE), job(new=30, rates=SURE, draft="math")])
    both = [told for told in noting.told if list(told.lengths) == [2, 2]]
    assert both
    assert {(round(told.draft_seconds / STEP, 6), round(told.draft_work / STEP, 6)) for told in both} == {(2.0, 4.0)}
    assert noting.costs.drafting < 0.8


def jobs_of(rate: float, seed: int, count: int = 60) -> list[Job]:
    """Texts that are easy and hard to guess, with stretches that repeat what was there."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    jobs = []
    for time in times:
        first = float(rng.uniform(0.3, 0.75))
        new = int(rng.integers(20, 120))
        turns: list[Turn] = []
        at = int(rng.integers(5, 60))
        while at + 10 < new and rng.random() < 0.5:
            rest = [first * 0.97**place for place in range(8)]
            turns += [Turn(at, "ngram", (0.86,) * 8), Turn(at + 10, "code", rest)]
            at += int(rng.integers(20, 60))
        rates = [first * 0.97**place for place in range(8)]
        jobs.append(Job(float(time), int(rng.integers(20, 120)), new, "code", rates, turns=tuple(turns)))
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("costs", [steep, flat])
def test_ours_is_never_far_from_the_better_of_none_and_the_best_fixed_gamma(costs: Any) -> None:
    """At every rate, and ahead of each single one of them over all rates."""
    rates = (0.3, 1.0, 3.0)
    names = ("none", "fixed:1", "fixed:2", "fixed:3", "fixed:5", "edgespec")
    speeds = {
        name: [world(name, costs(), noise=0.05).run(jobs_of(rate, 1)).throughput for rate in rates] for name in names
    }
    ours = speeds.pop("edgespec")
    for at in range(len(rates)):
        assert ours[at] > 0.97 * max(others[at] for others in speeds.values())
    assert all(sum(ours) > sum(others) for others in speeds.values())


def test_the_view_that_planners_see() -> None:
    seen: list[Any] = []

    class Watching:
        name, floor = "watching", 0.0

        def lengths(self, view: Any) -> list[int]:
            seen.append(view)
            return [0] * len(view.running)

        def observe(self, outcome: Any) -> None:
            assert len(outcome.emitted) == len(outcome.view.running)

    World(Watching(), steep(), drafts(), max_sessions=1, kv_tokens=100).run([job(prompt=30, new=5), job(new=5)])
    first = seen[0]
    assert (first.queued, first.prefill_rows, first.kv_free) == (1, 0, pytest.approx(0.65))
    assert first.running[0].context == 31
    assert first.running[0].limit == 3
    assert view([running(0)]).running[0].draft == first.running[0].draft


def test_a_planner_is_told_how_much_of_a_text_is_left_as_the_loop_tells_it() -> None:
    """By that it knows over how many rounds a draft's reading is spread; blocks are as long as rates reach."""
    told: list[tuple[int, int]] = []

    class Asking(FixedLoad):
        def lengths(self, view: LoadView) -> Sequence[int]:
            told.extend((one.limit, len(one.rates)) for one in view.running)
            return super().lengths(view)

    true = steep()
    World(Asking(BatchCosts.from_json(true.to_json()), drafts(), 0), true, drafts(), gamma_max=4).run([job(new=12)])
    assert told == [(left, 4) for left in range(10, -1, -1)]
    result = world("fixed:9", gamma_max=4).run([job(new=30, rates=SURE), job(new=30, rates=SURE, fixed=9)])
    assert max(length for batch in result.batches for length in batch.lengths) == 4
