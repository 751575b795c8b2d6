"""The bandits, alone: known laws, seeded."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from predictor.bandits import AdaBinGreedy, Exp3, NormalHedge, Ucb1, UcbSpec

RATES = (0.3, 0.7, 0.4, 0.2)


def test_ucb_tries_each_arm_once_in_order_and_then_follows_mean_and_radius() -> None:
    bandit = Ucb1(3, 2.0)
    for arm, reward in enumerate((0.1, 0.9, 0.5)):
        assert bandit.choose() == arm
        bandit.update(arm, reward)
    assert bandit.index(1) == pytest.approx(0.9 + 2.0 * math.sqrt(math.log(3)))
    assert bandit.choose() == 1
    assert bandit.choose([0, 2]) == 2
    for _ in range(50):
        bandit.update(1, 0.9)
    assert bandit.choose() != 1  # the others were not tried for long


@pytest.mark.parametrize("bandit", [Ucb1(4, 0.5), UcbSpec(4)], ids=["ucb1", "ucbspec"])
def test_ucb_converges(bandit: Ucb1) -> None:
    rng = np.random.default_rng(0)
    pulls: Counter[int] = Counter()
    for _ in range(4000):
        arm = bandit.choose()
        pulls[arm] += 1
        bandit.update(arm, float(rng.random() < RATES[arm]))
    assert pulls[1] > 2500
    assert min(pulls.values()) >= 5


def test_the_radius_of_ucbspec_is_the_published_one() -> None:
    bandit = UcbSpec(4, delta=0.1)
    for arm in range(4):
        bandit.update(arm, 0.5)
    n, t = 1, 4
    log = math.log(4 * t * t * math.sqrt(1 + n) / 0.1)
    assert bandit.index(0) == pytest.approx(0.5 + 0.5 * math.sqrt((1 + n) / n**2 * (1 + 2 * log)))


def test_exp3_converges_and_weighs_losses_by_the_chance_of_the_draw() -> None:
    rng = np.random.default_rng(1)
    bandit = Exp3(4, np.random.default_rng(2))
    pulls: Counter[int] = Counter()
    for _ in range(4000):
        arm, p = bandit.choose()
        pulls[arm] += 1
        bandit.update(arm, float(rng.random() > RATES[arm]), p)
    assert pulls[1] > 2000
    assert bandit.probabilities().sum() == pytest.approx(1)
    fresh = Exp3(2, np.random.default_rng(0))
    fresh.update(0, 0.5, 0.1)
    assert fresh._losses.tolist() == [5.0, 0.0]


def test_hedge_needs_far_fewer_steps_than_ucb() -> None:
    """Full information: log N instead of N, and no exploration."""
    rng = np.random.default_rng(3)
    hedge, ucb = NormalHedge(4), Ucb1(4, 2.0)
    lost = Counter[str]()
    for _ in range(300):
        rewards = rng.random(4) < RATES
        weights = hedge.weights(range(4))
        lost["hedge"] += sum(w * (RATES[1] - rate) for w, rate in zip(weights, RATES))  # type: ignore[arg-type]
        hedge.update({arm: 1.0 - rewards[arm] for arm in range(4)}, dict(enumerate(weights)))
        arm = ucb.choose()
        lost["ucb"] += RATES[1] - RATES[arm]  # type: ignore[assignment]
        ucb.update(arm, float(rewards[arm]))
    assert lost["hedge"] < 0.5 * lost["ucb"]


def test_hedge_weights_solve_the_equation_of_normalhedge_and_sleepers_rest() -> None:
    hedge = NormalHedge(3)
    assert hedge.weights([0, 2]) == [0.5, 0.5]
    hedge.regrets = [3.0, 1.0, -2.0]
    positive = [3.0, 1.0, 0.0]
    scale = NormalHedge._scale(positive)
    assert sum(math.exp(r * r / (2 * scale)) for r in positive) / 3 == pytest.approx(math.e, rel=1e-4)
    weights = hedge.weights([0, 1, 2])
    assert weights[0] > weights[1] > weights[2] == 0
    hedge.update({0: 0.0, 1: 1.0}, {0: 0.5, 1: 0.5})
    assert hedge.regrets == [3.5, 0.5, -2.0]  # arm 2 slept


def steps(rounds: int, seed: int, loss=lambda gamma: 1.0 - 0.1 * gamma) -> tuple[list[int], list[bool]]:  # type: ignore[no-untyped-def]
    planner = AdaBinGreedy(5, np.random.default_rng(seed))
    arms, exploring = [], []
    for _ in range(rounds):
        arms.append(planner.choose())
        exploring.append(planner.exploring())
        planner.update(arms[-1], loss(arms[-1]))
    return arms, exploring


@pytest.mark.parametrize(("rounds", "share"), [(63, 0.49), (255, 0.34), (1023, 0.22)])
def test_nightjar_explores_as_much_as_published(rounds: int, share: float) -> None:
    shares = [np.mean(steps(rounds, seed)[1]) for seed in range(60)]
    assert np.mean(shares) == pytest.approx(share, abs=0.04)


def test_nightjar_locks_an_arm_for_a_bin_of_the_root_of_its_block() -> None:
    """Blocks of 1, 2, 4, ... steps; bins of isqrt(block)."""
    planner = AdaBinGreedy(5, np.random.default_rng(0))
    begins = []
    for step in range(255):
        line = planner._timelines.get("")
        if line is None or line.left_in_bin == 0:
            begins.append(step)
        planner.update(planner.choose(), 1.0)
    expected, at = [], 0
    for block in range(1, 9):
        length, end = math.isqrt(2 ** (block - 1)), at + 2 ** (block - 1)
        while at < end:
            expected.append(at)
            at = min(at + length, end)
    assert begins == expected
    arms, _ = steps(255, 0)
    assert all(arms[step] == arms[step - 1] for step in range(1, 255) if step not in begins)


def test_nightjar_finds_the_best_gamma_and_comes_back_to_zero_and_from_it() -> None:
    arms, exploring = steps(1023, 4)
    exploiting = [arm for arm, explores in zip(arms[200:], exploring[200:]) if not explores]
    assert Counter(exploiting).most_common(1)[0][0] == 5
    assert 0 in arms[300:]
    arms, exploring = steps(1023, 4, loss=lambda gamma: 1.0 + gamma)
    assert {arm for arm, explores in zip(arms[100:], exploring[100:]) if not explores} == {0}
    assert any(arms[300:])  # exploration leaves zero again


def test_nightjar_charges_the_switch_only_from_zero_and_per_token() -> None:
    planner = AdaBinGreedy(3, np.random.default_rng(0))
    planner.choose()
    line = planner._timelines[""]
    line.counts, line.means = [5, 5, 5, 5], [1.1, 0.9, 0.95, 1.2]

    def exploited(last: int, switch: float) -> int:
        planner._last = last
        line.left_in_block, line.bin = 1000, 10**9
        planner._next_bin(line, switch)
        assert not line.exploring
        return line.arm

    assert exploited(2, 10.0) == 1
    assert exploited(0, 0.0) == 1
    assert exploited(0, 0.08) == 1  # 0.9 + 0.08 against 0.95 + 0.04
    assert exploited(0, 0.15) == 2  # 0.9 + 0.15 against 0.95 + 0.075
    assert exploited(0, 10.0) == 0


def test_nightjar_keeps_a_timeline_for_every_context() -> None:
    planner = AdaBinGreedy(5, np.random.default_rng(0))
    for _ in range(100):
        planner.update(planner.choose("a"), 1.0, "a")
    planner.update(planner.choose("b"), 1.0, "b")
    assert planner._timelines["a"].block == 7
    assert planner._timelines["b"].block == 1
