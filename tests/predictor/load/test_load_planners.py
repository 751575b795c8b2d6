"""Load planners: what each promises, and what all must keep."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from predictor.costs import CostTable
from predictor.load import LOAD_PLANNERS, BatchCosts, LoadView, make_load_planner
from predictor.load.bandits import NightjarLoad, SwitchCosts
from predictor.load.base import clipped
from predictor.load.edgespec import EXPLORED, GUARD, EdgeLoad
from predictor.load.guard import GuardedLoad
from tests.predictor.load.views import STEP, drafts, expected, flat, outcome, running, steep, view

ALL = ("edgespec", "none", "fixed:3", "nightjar", "goodput", "banditspec", "tetris:20")


def played(planner: Any, seen: LoadView, costs: BatchCosts, batches: int) -> list[list[int]]:
    lengths = []
    for _ in range(batches):
        lengths.append(list(planner.lengths(seen)))
        planner.observe(outcome(seen, lengths[-1], costs))
    return lengths


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(5))
def test_never_above_a_limit_and_fixed_lengths_stay(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = flat()
    planner = make_load_planner(name, flat(), drafts(), seed=seed)
    for _ in range(40):
        sequences = [
            running(
                key,
                float(rng.uniform(0, 1)),
                positions=int(rng.integers(0, 9)),
                limit=int(rng.integers(0, 6)),
                behind=int(rng.integers(0, 300)),
                draft=[None, "code", "math"][rng.integers(3)],
                fixed=[None, None, 0, 3][rng.integers(4)],
            )
            for key in range(int(rng.integers(0, 9)))
        ]
        seen = view(sequences, prefill_rows=int(rng.integers(0, 65)))
        lengths = planner.lengths(seen)
        assert len(lengths) == len(sequences)
        for sequence, length in zip(sequences, lengths):
            assert type(length) is int
            if sequence.fixed is None:
                assert 0 <= length <= min(sequence.limit, len(sequence.rates) if sequence.draft else 0)
            else:
                assert length == (min(sequence.fixed, sequence.limit) if sequence.draft else 0)
        if sequences:
            planner.observe(outcome(seen, lengths, costs))
    assert planner.reason is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_garbage_costs_speed_at_most(name: str, bad: float) -> None:
    class Broken(BatchCosts):
        def curve(self, sequences: int, begin: int, length: int, context: int | None = None) -> list[float]:
            return [bad] * (length + 1)

        def seconds(self, sequences: int, rows: int, context: int | None = None) -> float:
            return bad

    planner = make_load_planner(name, Broken({(1, 0): 1.0}), drafts())
    odd = [running(0, math.nan), running(1, 2.0), running(2, -1.0, behind=10**9), running(3, 0.5, fixed=2)]
    for _ in range(20):
        lengths = planner.lengths(view(odd))
        assert lengths[3] == 2
        assert all(0 <= length <= 6 for length in lengths)
        planner.observe(outcome(view(odd), lengths, flat(), emitted=bad, draft=bad))


@pytest.mark.parametrize("said", [[1], [1, 2, 3], None, ["x", 1], [math.nan, 1], [10**6, -5]])
def test_what_a_planner_says_is_checked(said: Any) -> None:
    class Odd:
        name, floor = "odd", 7.0

        def lengths(self, view: LoadView) -> Any:
            return said

        def observe(self, outcome: Any) -> None:
            raise RuntimeError("no")

    planner = GuardedLoad(Odd())
    seen = view([running(0), running(1, limit=2)])
    lengths = planner.lengths(seen)
    assert lengths == ([6, 0] if said == [10**6, -5] else [0, 0])
    assert planner.floor == 0.0
    planner.observe(outcome(seen, lengths, flat()))
    assert planner.lengths(seen) == [0, 0]  # given up by now
    assert planner.reason


def test_names() -> None:
    for name in LOAD_PLANNERS:
        text = f"{name}:4" if name in ("fixed", "tetris") else name
        assert make_load_planner(text, flat(), drafts()).name.startswith(name)
    for wrong, told in {
        "nigthjar": "did you mean nightjar",
        "zzz": "there are edgespec",
        "fixed": "fixed:3",
        "fixed:x": "from 1 to 256",
        "fixed:0": "from 1 to 256",
        "none:3": "takes no number",
        "tetris:": "from 1 to 256",
    }.items():
        with pytest.raises(ValueError, match=told):
            make_load_planner(wrong, flat(), drafts())


def test_a_fixed_length_stays_whatever_a_planner_says() -> None:
    class Same:
        name, floor = "same", 0.0

        def lengths(self, view: LoadView) -> list[int]:
            return [1] * len(view.running)

        def observe(self, outcome: Any) -> None:
            pass

    sequences = [running(0), running(1, fixed=3), running(2, fixed=0), running(3, fixed=9, limit=4)]
    assert GuardedLoad(Same()).lengths(view(sequences)) == [1, 3, 0, 4]


# ours


def test_lengths_are_the_best_there_are() -> None:
    """Against all lengths, by seconds a token of each text, what all need shared equally."""
    costs = steep()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        sequences = [running(key, float(rng.uniform(0.2, 0.95)), positions=4) for key in range(3)]
        lengths = EdgeLoad(costs, drafts(), 8).lengths(view(sequences))

        def price(tried: Any, sequences: Any = sequences) -> float:
            base, row = costs.seconds(3, 3), 0.002
            return sum((base / 3 + length * (STEP + row)) / expected(s, length) for s, length in zip(sequences, tried))

        best = min(price(tried) for tried in itertools.product(range(5), repeat=3))
        assert price(lengths) <= best * 1.011 + 1e-12  # plain rows win where guessing promises less than 1% more


def test_gamma_falls_with_load_and_comes_back() -> None:
    costs, planner = steep(), EdgeLoad(steep(), drafts(), 8)
    means = []
    for n in (1, 2, 4, 8, 4, 2, 1):
        plans = played(planner, view([running(key, 0.6) for key in range(n)]), costs, 40)
        means.append(np.mean([np.mean(plan) for plan in plans[10:]]))
    falling, rising = means[:4], means[3:]
    assert falling[0] > falling[3] + 0.5
    assert falling == sorted(falling, reverse=True)
    assert rising[-1] == pytest.approx(falling[0], abs=0.3)


def test_each_sequence_gets_what_its_own_text_is_worth() -> None:
    rates = (0.9, 0.7, 0.5, 0.2)
    lengths = list(EdgeLoad(steep(), drafts(), 8).lengths(view([running(key, rate) for key, rate in enumerate(rates)])))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 3
    assert lengths[3] == 0


def test_reentry_is_charged_from_zero_to_positive_only() -> None:
    dear = drafts(read=0.001)  # 200 tokens take 0.2 s
    lagging, near = running(0, 0.5, behind=200), running(0, 0.5)
    assert EdgeLoad(steep(), dear, 8).lengths(view([near])) != [0]
    assert EdgeLoad(steep(), dear, 8).lengths(view([lagging])) == [0]
    planner = EdgeLoad(steep(), dear, 8)
    planner.observe(outcome(view([near]), [2], steep()))  # it drafted in its last round
    assert planner.lengths(view([lagging])) != [0]
    planner.observe(outcome(view([near]), [0], steep()))
    assert planner.lengths(view([lagging])) == [0]


def test_a_price_to_read_that_pays_within_the_horizon_is_paid() -> None:
    lagging = running(0, 0.8, behind=200)
    assert EdgeLoad(steep(), drafts(read=0.0005), 8).lengths(view([lagging])) != [0]
    ending = running(0, 0.8, behind=200, limit=3)
    assert EdgeLoad(steep(), drafts(read=0.0005), 8).lengths(view([ending])) == [0]


def test_exploration_is_bounded_and_never_foreseen_to_be_slow() -> None:
    costs, planner = steep(), EdgeLoad(steep(), drafts(), 8)
    sequences = [running(key, 0.45) for key in range(4)]
    usual = tuple(EdgeLoad(steep(), drafts(), 8).lengths(view(sequences)))
    plans = played(planner, view(sequences), costs, 640)
    assert planner.explored <= 640 * EXPLORED + 2
    row = costs.seconds(4, 5) - costs.seconds(4, 4)
    for plan in {tuple(plan) for plan in plans}:
        cost = sum((costs.seconds(4, 4) / 4 + g * (STEP + row)) / expected(s, g) for s, g in zip(sequences, plan))
        best = sum((costs.seconds(4, 4) / 4 + g * (STEP + row)) / expected(s, g) for s, g in zip(sequences, usual))
        assert cost <= best * (1 + GUARD) * 1.02


def test_no_more_than_one_batch_of_32_explores_however_little_is_known() -> None:
    planner = EdgeLoad(steep(), drafts(), 8)
    planner._calibration.weight = lambda at: 0.0  # type: ignore[method-assign]
    played(planner, view([running(key, 0.3 + 0.1 * key) for key in range(6)]), steep(), 640)
    assert 10 < planner.explored <= 640 * EXPLORED + 2


def test_speculation_that_disappoints_is_given_up_and_tried_again_in_the_end() -> None:
    planner = EdgeLoad(steep(), drafts(), 8)
    seen = view([running(key, 0.5) for key in range(4)])
    assert any(planner.lengths(seen))
    rounds = 0
    while any(lengths := list(planner.lengths(seen))) and rounds < 400:
        planner.observe(outcome(seen, lengths, steep(), emitted=1))  # nothing is ever right
        rounds += 1
    assert 3 < rounds < 200
    plans = played(planner, seen, steep(), 1500)
    assert any(any(plan) for plan in plans)


def test_a_prompts_rows_do_not_make_guesses_look_cheap() -> None:
    sequences = [running(key, 0.35) for key in range(8)]
    alone = EdgeLoad(steep(), drafts(), 8).lengths(view(sequences))
    beside = EdgeLoad(steep(), drafts(), 8).lengths(view(sequences, prefill_rows=64))
    assert alone == beside == [0] * 8


def test_the_floor_is_what_a_further_token_costs() -> None:
    planner = EdgeLoad(steep(), drafts(), 8)
    assert planner.floor == 0.0
    lengths = planner.lengths(view([running(0, 0.8)]))
    seconds = steep().seconds(1, 1 + lengths[0]) + STEP * lengths[0]
    assert planner.floor == pytest.approx((0.002 + STEP) * expected(running(0, 0.8), lengths[0]) / seconds, rel=0.02)
    planner.lengths(view([running(0, 0.0)]))
    assert planner.floor == 0.0


# the published ones


def test_nightjar_has_one_gamma_for_all_and_finds_the_best_of_each_number_of_sequences() -> None:
    costs = steep()
    planner = NightjarLoad(steep(), drafts(), 3, np.random.default_rng(1))
    few, many = view([running(0, 0.8)]), view([running(key, 0.15) for key in range(8)])
    chosen: list[list[int]] = [[], []]
    for _ in range(2000):
        for seen, gammas in zip((few, many), chosen):
            lengths = planner.lengths(seen)
            assert len(set(lengths)) == 1
            gammas.append(lengths[0])
            planner.observe(outcome(seen, lengths, costs))
    assert np.mean([gamma == 3 for gamma in chosen[0][1000:]]) > 0.6
    assert np.mean([gamma == 0 for gamma in chosen[1][1000:]]) > 0.6


def test_nightjar_counts_what_reading_takes_as_a_switch_not_as_a_loss() -> None:
    planner = NightjarLoad(steep(), drafts(), 3, np.random.default_rng(0))
    seen = view([running(0, 0.8, behind=100)])
    while not any(lengths := list(planner.lengths(seen))):
        planner.observe(outcome(seen, lengths, steep()))
    context, gamma = str(1), lengths[0]
    planner.observe(outcome(seen, lengths, steep(), draft=STEP * gamma + 0.5))
    mean = planner._bandit._timelines[context].means[gamma]
    assert mean < 0.1
    assert planner._switch.seconds(seen, 0.0) == pytest.approx(0.5)


def test_nightjar_leaves_out_batches_with_prompts() -> None:
    planner = NightjarLoad(steep(), drafts(), 3, np.random.default_rng(0))
    seen = view([running(0)], prefill_rows=64)
    planner.observe(outcome(seen, planner.lengths(seen), steep()))
    assert not any(planner._bandit._timelines["1"].counts)


def test_switch_costs_are_told_apart_by_lag_and_batch() -> None:
    costs = SwitchCosts()
    one, long = view([running(0, behind=20)]), view([running(0, behind=200)])
    costs.observe(one, 0.1)
    assert costs.seconds(one, 9.0) == 0.1
    assert costs.seconds(long, 9.0) == 9.0
    assert costs.seconds(view([running(0, behind=20), running(1)]), 9.0) == 9.0


def test_goodput_takes_the_k_of_most_tokens_a_second() -> None:
    planner: Any = make_load_planner("goodput:5", steep(), drafts())
    seen = view([running(key) for key in range(4)])
    for rate in (0.05, 0.4, 0.9):
        planner._planner._rates.extend([rate] * 10)
        costs = steep()

        def speed(k: int, rate: float = rate, costs: BatchCosts = costs) -> float:
            tokens = 4 * (1 - rate ** (k + 1)) / (1 - rate)
            return tokens / (costs.seconds(4, 4 * (k + 1)) + 4 * k * STEP)

        assert planner.lengths(seen) == clipped(seen, max(range(6), key=speed))


def test_goodput_learns_from_the_last_ten_batches() -> None:
    planner: Any = make_load_planner("goodput", steep(), drafts())
    seen = view([running(key) for key in range(2)])
    for _ in range(12):
        planner.observe(outcome(seen, [3, 3], steep(), emitted=1))
    assert planner.lengths(seen) == [0, 0]


def test_banditspec_tries_every_gamma_first_and_prefers_the_quickest() -> None:
    planner = make_load_planner("banditspec:4", flat(), drafts(step=0.0))
    seen = view([running(0, 0.9)])
    plans = [plan[0] for plan in played(planner, seen, flat(), 600)]
    assert sorted(plans[:5]) == [0, 1, 2, 3, 4]
    assert plans.count(4) == max(plans.count(gamma) for gamma in range(5))


@pytest.mark.parametrize("rows", [4, 5, 9, 40])
def test_tetris_takes_the_likeliest_tokens_under_its_rows(rows: int) -> None:
    rates = (0.9, 0.6, 0.5, 0.3)
    sequences = [running(key, rate, positions=4) for key, rate in enumerate(rates)]
    lengths = make_load_planner(f"tetris:{rows}", flat(), CostTable()).lengths(view(sequences))
    assert 4 + sum(lengths) <= max(rows, 4)
    chances = [expected(s, length) - 1 for s, length in zip(sequences, lengths)]
    everything = itertools.product(range(5), repeat=4)
    best = max(
        sum(expected(s, g) - 1 for s, g in zip(sequences, tried)) for tried in everything if 4 + sum(tried) <= rows
    )
    assert sum(chances) == pytest.approx(best)


def test_a_planner_that_never_drafts_teaches_the_others_nothing_of_what_a_batch_takes_besides() -> None:
    """Drafts are not looked at for it, so its batches take less besides; the table is one for all planners."""
    costs = flat()
    seen = view([running(0)])
    none, fixed = make_load_planner("none", costs, drafts()), make_load_planner("fixed:1", costs, drafts())

    def batch(planner: Any, besides: float) -> None:
        made = outcome(seen, planner.lengths(seen), costs)
        planner.observe(made._replace(seconds=made.seconds + besides))

    batch(none, 0.001)
    assert costs.overhead > 0, "better than nothing"
    for _ in range(200):
        batch(fixed, 0.004)
    known = costs.overhead
    for _ in range(200):
        batch(none, 0.0)
    assert costs.overhead == known


@pytest.mark.parametrize("name", ["edgespec", "goodput"])
def test_drafting_that_once_seemed_too_dear_is_tried_again(name: str) -> None:
    """Texts that are easy to guess fill every place; only the factor keeps them from being guessed."""
    costs = BatchCosts.from_json(flat().to_json() | {"drafting": 12.0})
    planner, seen = make_load_planner(name, costs, drafts()), view([running(key, 0.8) for key in range(8)])
    plans = []
    for _ in range(400):
        plans.append(list(planner.lengths(seen)))
        planner.observe(outcome(seen, plans[-1], flat()))
    assert not any(any(plan) for plan in plans[:10])
    assert all(all(plan) for plan in plans[-10:])
    assert costs.drafting == pytest.approx(1.0, abs=0.05)
