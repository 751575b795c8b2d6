"""The planners, alone: stub costs and scripted acceptance (B187, B199, B200)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from predictor import PLAIN, AutoPlanner, Candidate, CostTable, FixedPlanner, Observation, OnlyPlanner, Plan

MODEL, NGRAM = Candidate("model", 1), Candidate("ngram", 3, free=True)
FLAT = dict.fromkeys(range(1, 20), 1.0)
SLOPE = {width: 1.0 + 0.3 * (width - 1) for width in range(1, 20)}
LINEAR = {width: float(width) for width in range(1, 20)}


def costs(verify: dict[int, float] = FLAT, **drafts: float) -> CostTable:
    return CostTable(verify, drafts or {"model": 0.01, "ngram": 0.0})


def play(
    planner: AutoPlanner, candidates: Sequence[Candidate], right: Sequence[bool] | bool, rounds: int
) -> list[Plan]:
    """Rounds in which every guess, also a shadow's, is right or wrong as told; seconds as in the table."""
    plans = []
    for number in range(rounds):
        good = right if isinstance(right, bool) else right[number]
        plan = planner.plan(candidates, 100)
        plans.append(plan)
        shadows = planner.shadows(plan, candidates)
        level = next((c.level for c in candidates if c.name == plan.draft), 0)
        seconds = planner.costs.verify(plan.gamma + 1)
        step = 0.0 if plan.draft is None else planner.costs.draft(plan.draft) * plan.gamma
        accepted = plan.gamma if good else 0
        planner.observe(Observation(plan.draft, level, plan.gamma, plan.gamma, accepted, plan.gamma + 1, step, seconds))
        for shadow in shadows:
            planner.credit(shadow, 1, int(good))
    return plans


def test_fixed_planner_asks_the_named_draft_or_the_first_that_has_something() -> None:
    both = [Candidate("a", 0), Candidate("b", 1)]
    assert FixedPlanner("b", 4).plan(both, 100) == Plan("b", 4)
    assert FixedPlanner("a", 4).plan(both, 100) == PLAIN
    assert FixedPlanner(None, 4).plan(both, 2) == Plan("b", 2)
    assert FixedPlanner("gone", 4).plan(both, 100) == PLAIN
    assert FixedPlanner(None, 4).plan(both, 0) == PLAIN
    assert FixedPlanner(None, 0).off
    assert not FixedPlanner(None, 1).off
    with pytest.raises(ValueError):
        FixedPlanner(None, -1)
    with pytest.raises(ValueError):
        AutoPlanner(gamma_max=0)


@pytest.mark.parametrize("candidate", [MODEL, NGRAM])
def test_b187_right_guesses_climb_to_the_longest_gamma_and_wrong_ones_fall_to_none_and_it_recovers(
    candidate: Candidate,
) -> None:
    slope = {width: 1.0 + 0.1 * (width - 1) for width in range(1, 20)}
    planner = AutoPlanner(costs(slope), gamma_max=6)
    assert play(planner, [candidate], True, 40)[-1].gamma == 6
    fallen = play(planner, [candidate], False, 60)
    assert [p.gamma for p in fallen[40:]].count(0) >= 18
    assert play(planner, [candidate], True, 1200)[-1].gamma == 6


def test_gamma_never_exceeds_the_limit_or_gamma_max() -> None:
    planner = AutoPlanner(costs(), gamma_max=5)
    play(planner, [MODEL], True, 100)
    assert [planner.plan([MODEL], limit).gamma for limit in (0, 1, 3, 5, 9)] == [0, 1, 3, 5, 5]


# B199
def test_a_cost_linear_in_the_width_means_no_drafting_however_good_the_draft() -> None:
    planner = AutoPlanner(costs(LINEAR))
    assert set(play(planner, [NGRAM], True, 300)) == {PLAIN}
    planner = AutoPlanner(costs(LINEAR))
    probes = [plan for plan in play(planner, [MODEL], True, 300) if plan.gamma]
    assert all(plan.gamma == 1 for plan in probes)
    assert len(probes) <= 300 / 16


def test_equal_values_go_to_the_smaller_gamma() -> None:
    # With cost linear in the width and no draft cost, a draft that is always right gains nothing at any gamma.
    planner = AutoPlanner(CostTable(LINEAR, {"model": 0.0}))
    arm = planner._arm("model", 1)
    arm._rates = [1.0] * planner.gamma_max
    assert planner._best([MODEL], 8) == PLAIN


def test_a_step_in_the_cost_is_where_gamma_stops() -> None:
    step = {width: 1.0 if width <= 4 else 3.0 for width in range(1, 20)}
    planner = AutoPlanner(costs(step))
    assert {plan.gamma for plan in play(planner, [MODEL], True, 100)[50:]} == {3}


# B200
@pytest.mark.parametrize("candidate", [MODEL, NGRAM])
def test_good_bad_good(candidate: Candidate) -> None:
    planner = AutoPlanner(costs(SLOPE))
    good, bad = play(planner, [candidate], True, 100), play(planner, [candidate], False, 100)
    again = play(planner, [candidate], True, 200)
    assert good[-1].gamma >= 4
    asked = [number for number, plan in enumerate(bad) if plan.gamma]
    # Wrong guesses at a long gamma end within 20 rounds; then there are only probes, ever more rarely.
    assert sum(number < 25 for number in asked) >= len(asked) - 3
    assert all(bad[number].gamma == 1 for number in asked if number >= 25)
    assert again[-1].gamma >= 4


def test_a_free_draft_that_does_not_pay_is_watched_at_no_cost_and_returns_without_a_probe() -> None:
    planner = AutoPlanner(costs(SLOPE))
    play(planner, [NGRAM], False, 50)
    assert set(play(planner, [NGRAM], False, 200)) == {PLAIN}
    assert play(planner, [NGRAM], True, 12)[-1].draft == "ngram"


def test_probes_of_many_drafts_stay_within_their_share_and_reach_every_one() -> None:
    drafts = [Candidate(f"d{i}", 1) for i in range(6)]
    planner = AutoPlanner(CostTable(LINEAR, {c.name: 0.2 for c in drafts}))  # too dear for shadows
    plans = play(planner, drafts, False, 2000)
    probes = [plan for plan in plans if plan.gamma]
    assert {plan.draft for plan in probes} == {c.name for c in drafts}
    for end in range(1, 2001):
        assert sum(plan.gamma > 0 for plan in plans[:end]) <= max(1, end / 16)
    # Exponentially rarer: the second thousand rounds hold fewer probes than the first.
    assert sum(p.gamma > 0 for p in plans[1000:]) < sum(p.gamma > 0 for p in plans[:1000])


def test_the_better_draft_is_taken_and_a_level_of_nothing_never() -> None:
    planner = AutoPlanner(CostTable(FLAT, {"good": 0.1, "bad": 0.1, "silent": 0.0}))
    candidates = [Candidate("silent", 0), Candidate("bad", 1), Candidate("good", 1)]
    plans = []
    for _ in range(200):
        plan = planner.plan(candidates, 10)
        plans.append(plan)
        right = plan.gamma if plan.draft == "good" else 0
        planner.observe(
            Observation(plan.draft, 1, plan.gamma, plan.gamma, right, plan.gamma + 1, 0.1 * plan.gamma, 1.0)
        )
    assert plans.count(Plan("good", 8)) > 150
    assert all(plan.draft != "silent" for plan in plans)


def test_levels_are_learned_apart() -> None:
    planner = AutoPlanner(costs(SLOPE))
    weak, strong = Candidate("ngram", 2, True), Candidate("ngram", 5, True)
    for _ in range(40):
        planner.credit(weak, 1, 0)
        planner.credit(strong, 3, 3)
    assert planner.plan([weak], 10) == PLAIN
    assert planner.plan([strong], 10).gamma > 0


def test_a_guess_cut_off_by_the_end_of_the_answer_counts_as_right_not_as_wrong() -> None:
    cut, missed = AutoPlanner(costs()), AutoPlanner(costs())
    for _ in range(30):
        cut.observe(Observation("model", 1, 8, 2, 2, 9, 0.1, 1.0))
        missed.observe(Observation("model", 1, 8, 8, 2, 9, 0.1, 1.0))
    assert cut._arm("model", 1).rates()[2] > 0.9
    assert missed._arm("model", 1).rates()[2] < 0.1


def test_reading_a_long_absence_up_is_no_time_of_a_step() -> None:
    planner = AutoPlanner(CostTable(FLAT, {"model": 0.1}))
    planner.observe(Observation("model", 1, 1, 1, 1, 2, 50.0, 1.0, caught_up=400))
    assert planner.costs.draft("model") == 0.1
    planner.observe(Observation("model", 1, 1, 1, 1, 2, 0.2, 1.0, caught_up=3))
    assert planner.costs.draft("model") > 0.1


# B190
def test_two_planners_are_independent_and_reset_forgets() -> None:
    first, second = AutoPlanner(costs(SLOPE)), AutoPlanner(costs(SLOPE))
    play(first, [MODEL], False, 52)
    assert first.plan([MODEL], 8) == PLAIN
    assert second.plan([MODEL], 8).gamma > 0
    first.reset()
    assert first.plan([MODEL], 8).gamma > 0


def test_only_one_of_them() -> None:
    auto = AutoPlanner(costs())
    only = OnlyPlanner(auto, "model")
    assert not only.off
    assert only.seeded().plan([Candidate("other", 3), Candidate("model", 1)], 9) == Plan("model", 3)
    assert only.plan([NGRAM, MODEL], 8).draft == "model"
    assert only.plan([NGRAM], 8) == PLAIN
    assert [(c.name, c.free) for c in only.shadows(PLAIN, [NGRAM, MODEL])] == [("model", False)]
    assert list(only.shadows(Plan("model", 1), [NGRAM, MODEL])) == []
    assert list(OnlyPlanner(auto, "ngram").shadows(PLAIN, [NGRAM, MODEL])) == [NGRAM]
    for _ in range(50):  # what it sees, the other learns
        only.observe(Observation("model", 1, 1, 1, 0, 2, 0.01, 1.0))
        only.credit(NGRAM, 1, 0, drafted=1, seconds=0.0, caught_up=1)
    assert auto._arm("model", 1).rates()[0] < 0.1
    assert auto._arm("ngram", 3).rates()[0] < 0.1
    fixed = FixedPlanner(None, 2)
    assert fixed.seeded() is fixed


def test_several_threads_may_use_one_planner() -> None:
    planner, failures = AutoPlanner(costs()), []

    def work() -> None:
        try:
            play(planner, [MODEL, NGRAM], True, 300)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
