"""Many drafts with weights: what is expected of them, shadows within their share, turning texts, and floors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from predictor import PLAIN, AutoPlanner, Candidate, CostTable, Observation, OnlyPlanner, Plan
from predictor.shadows import EVERY, SHARE

FLAT = {width: 1.0 + 0.05 * (width - 1) for width in range(1, 20)}  # memory-bound: blocks are nearly free
STEEP = {width: 1.0 + 0.33 * (width - 1) for width in range(1, 20)}  # compute-bound
NAMES = ("general", "code", "math", "translation", "summarization", "qa", "chat")
MODELS = [Candidate(name, 1) for name in NAMES]
NGRAM = Candidate("ngram", 2, free=True)


def planner_of(verify: Mapping[int, float] = FLAT, step: float = 0.05, prior: float = 0.4) -> AutoPlanner:
    planner = AutoPlanner(CostTable(verify, dict.fromkeys(NAMES, step) | {"ngram": 0.0}))
    for name in NAMES:
        planner.expect(name, prior)
    return planner


class Game:
    """Rounds in which draft `name` is right with a chance of `rate(name)` at each position. Counts what was spent."""

    def __init__(self, planner: AutoPlanner, rate: Callable[[str], float], step: float = 0.05, seed: int = 0) -> None:
        self.planner, self.rate, self.step = planner, rate, step
        self.rng = np.random.default_rng(seed)
        self.plans: list[Plan] = []
        self.shadowed: Counter[str] = Counter()
        self.tokens: Counter[int] = Counter()
        self.seconds = 0.0
        self.read_up = 0.0  # seconds that a shadow takes besides its steps

    def play(self, rounds: int, candidates: list[Candidate] | None = None) -> list[Plan]:
        for _ in range(rounds):
            self._round([*MODELS, NGRAM] if candidates is None else candidates)
        return self.plans[-rounds:]

    def _round(self, candidates: list[Candidate]) -> None:
        planner = self.planner
        plan = planner.plan(candidates, 1000)
        shadows = planner.shadows(plan, candidates)
        right = self._right(plan.draft, plan.gamma)
        verify, step = planner.costs.verify(plan.gamma + 1), self.step * plan.gamma
        level = next((c.level for c in candidates if c.name == plan.draft), 0)
        planner.observe(Observation(plan.draft, level, plan.gamma, plan.gamma, right, plan.gamma + 1, step, verify))
        for shadow in shadows:
            seen = self._right(shadow.name, shadow.shadow)
            taken = 0.0 if shadow.free else self.step * shadow.shadow + self.read_up
            judged = min(seen + 1, shadow.shadow)
            planner.credit(shadow, judged, seen, drafted=shadow.shadow, seconds=taken, caught_up=50)
            self.seconds += taken
            if not shadow.free:
                self.shadowed[shadow.name] += 1
                self.tokens[shadow.shadow] += 1
        self.plans.append(plan)

    def _right(self, name: str | None, gamma: int) -> int:
        if name is None:
            return 0
        hits = self.rng.random(gamma) < self.rate(name)
        return int(np.argmin(hits)) if not hits.all() else gamma


def only(best: str, rate: float = 0.7, others: float = 0.1) -> Callable[[str], float]:
    return lambda name: rate if name == best else others


def used(plans: list[Plan]) -> Counter[str | None]:
    return Counter(plan.draft for plan in plans)


@pytest.mark.parametrize("verify", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("best", ["general", "chat"])
def test_the_right_one_of_many_is_found_within_some_rounds(verify: dict[int, float], best: str) -> None:
    shares = []
    for seed in range(10):
        game = Game(planner_of(verify), only(best, 0.75, 0.05), seed=seed)
        game.play(25)
        shares.append(used(game.play(40))[best] / 40)
    assert np.mean(shares) > 0.8


def test_a_text_that_turns_is_noticed() -> None:
    shares = []
    for seed in range(10):
        game = Game(planner_of(), only("code"), seed=seed)
        game.play(150)
        game.rate = only("qa")
        game.play(60)
        shares.append(used(game.play(60))["qa"] / 60)
    assert np.mean(shares) > 0.7


def test_another_request_asks_everybody_again() -> None:
    game = Game(planner_of(), only("code"))
    game.play(300)
    before = Counter(game.shadowed)
    game.planner.begin()
    game.play(20)
    asked = game.shadowed - before
    assert sum(asked.values()) >= len(NAMES) - 1
    before = Counter(game.shadowed)
    game.play(80)  # and then it is quiet again
    assert sum((game.shadowed - before).values()) <= 80 / EVERY + 4


@pytest.mark.parametrize("read_up", [0.0, 0.4])
@pytest.mark.parametrize("step", [0.01, 0.05, 0.1])
def test_shadows_stay_within_their_share_of_the_time(step: float, read_up: float) -> None:
    game = Game(planner_of(step=step), only("code"), step=step)
    game.read_up = read_up
    for _ in range(40):  # many short requests, each of which would like to ask everybody
        game.planner.begin()
        game.play(100)
    rounds = len(game.plans)
    assert game.seconds <= SHARE * rounds + SHARE * 128 + 1
    assert sum(game.shadowed.values()) > 0
    assert set(game.tokens) <= {1, 2, 3}


def test_drafts_whose_steps_are_dear_are_probed_and_cast_no_shadow() -> None:
    game = Game(planner_of(STEEP, step=0.3), lambda name: 0.05, step=0.3)
    plans = game.play(600)
    assert not game.shadowed
    probes = [plan for plan in plans[50:] if plan.gamma]
    assert 0 < len(probes) <= 600 / 16
    assert {plan.gamma for plan in probes} == {1}


def test_cheap_drafts_are_not_probed() -> None:
    game = Game(planner_of(STEEP), lambda name: 0.02)
    game.play(100)
    assert set(game.play(300)) == {PLAIN}
    # Where no draft comes near to paying they are asked four times more rarely, but never not at all.
    assert 300 / EVERY / 4 - 5 <= sum(game.shadowed.values()) <= 300 / EVERY / 2 + 15
    assert set(game.shadowed) == set(NAMES)


def test_what_was_measured_when_it_was_made_is_expected_of_a_draft() -> None:
    planner = planner_of(prior=0.2)
    planner.expect("qa", 0.6)
    assert planner._arm("qa", 1).rates()[0] == pytest.approx(0.54)
    assert planner.plan(MODELS, 50).draft == "qa"
    planner.reset()
    assert planner.plan(MODELS, 50).draft == "qa"  # it is no knowledge of this text
    with pytest.raises(ValueError, match="qa"):
        planner.expect("qa", float("nan"))


def test_without_a_measured_step_a_shadow_tells_it() -> None:
    planner = AutoPlanner(CostTable(FLAT))
    candidate = Candidate("code", 1)
    planner.credit(candidate, 1, 1, drafted=2, seconds=0.08, caught_up=3)
    assert planner.costs.draft("code") == pytest.approx(0.04)
    planner.credit(candidate, 1, 1, drafted=2, seconds=50.0, caught_up=400)  # it read up on the text first
    planner.credit(candidate, 1, 1)  # not timed
    assert planner.costs.draft("code") == pytest.approx(0.04)


def test_only_one_of_many_is_shadowed_where_only_that_may_run() -> None:
    planner = planner_of(STEEP)
    shadows = OnlyPlanner(planner, "code").shadows(PLAIN, [*MODELS, NGRAM])
    assert [c.name for c in shadows] == ["code"]


# Floors and blocks that end early


def test_the_floor_is_what_the_seconds_of_a_further_token_would_bring() -> None:
    planner = planner_of(STEEP)
    for _ in range(60):
        planner.observe(Observation("code", 1, 3, 3, 3, 4, 0.15, STEEP[4], asked=3))
    plan = planner.plan([Candidate("code", 1)], 3)
    verify, step = planner.costs.verify, planner.costs.draft("code")
    rates = planner._arm("code", 1).rates()
    expected = 1 + sum(float(np.prod(rates[: i + 1])) for i in range(plan.gamma))
    speed = expected / (verify(plan.gamma + 1) + plan.gamma * step)
    further = step + (verify(plan.gamma + 1) - verify(1)) / plan.gamma
    assert plan.gamma == 3
    assert plan.floor == pytest.approx(further * speed)
    assert 0 < planner_of(FLAT).plan([Candidate("code", 1)], 3).floor < plan.floor < 1
    assert PLAIN.floor == 0
    assert Plan("code", 3, 0.5) == Plan("code", 3)  # the same decision


def test_a_block_that_the_draft_ends_is_no_success_at_the_next_place_and_costs_no_width() -> None:
    stopping, whole = planner_of(STEEP), planner_of(STEEP)
    for _ in range(200):
        stopping.observe(Observation("code", 1, 1, 1, 1, 2, 0.1, STEEP[2], asked=3))
        whole.observe(Observation("code", 1, 1, 1, 1, 2, 0.05, STEEP[2]))
    arm = stopping._arm("code", 1)
    assert arm.rates()[0] > 0.95
    assert arm.rates()[1] < 0.05
    assert arm.offered()[0] == 1.0
    assert arm.offered()[1] < 0.1
    assert whole._arm("code", 1).offered()[:3] == [1.0, 1.0, 1.0]
    assert whole._arm("code", 1).rates()[1] > 0.8  # nothing was seen there: as the one before
    assert stopping.costs.draft("code") == pytest.approx(0.05, rel=0.1)  # two steps were made


def test_a_draft_that_offers_nothing_is_as_good_as_wrong_and_costs_a_step() -> None:
    planner = planner_of(STEEP)
    for _ in range(60):
        planner.observe(Observation("code", 1, 0, 1, 0, 1, 0.05, STEEP[1], asked=2))
    assert planner._arm("code", 1).rates()[0] < 0.05
    assert planner.costs.draft("code") == pytest.approx(0.05)
    assert planner.plan([Candidate("code", 1)], 5) == PLAIN
