"""What a planner keeps from run to run: weighs little, locks nothing, and a damaged file is an error."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest

from predictor import AutoPlanner, Candidate, CostTable, Observation
from predictor.memory import MOST_TRIES, PlannerState
from predictor.policies.edgespec import EdgePolicy

COSTS = {width: 1.0 + 0.2 * (width - 1) for width in range(1, 12)}
CODE, NGRAM = Candidate("code", 1), Candidate("ngram", 3, free=True)


def learned(accepted: int, rounds: int = 100) -> AutoPlanner:
    planner = AutoPlanner(CostTable(COSTS, {"code": 0.05}))
    for _ in range(rounds):
        planner.observe(Observation("code", 1, 4, 4, accepted, 5, 0.2, 1.8, asked=4))
    planner.credit(NGRAM, 1, 1)
    return planner


def through_json(state: PlannerState) -> PlannerState:
    return PlannerState.from_json(json.loads(json.dumps(state.to_json())))


def test_the_next_run_starts_from_what_this_one_learned() -> None:
    state = through_json(learned(0).state())
    assert set(state.arms) == {("code", 1)}  # lookup was seen once: not worth keeping
    cold, warm = EdgePolicy(CostTable(COSTS), ["code"]), EdgePolicy(CostTable(COSTS), ["code"])
    for policy in (cold, warm):
        policy.expect("code", 0.8)
    warm.restore(state)
    assert cold.plan([CODE], 50).gamma > 0
    assert warm.plan([CODE], 50).gamma == 0


def test_what_is_restored_weighs_a_few_tries_and_locks_nothing() -> None:
    planner = AutoPlanner(CostTable(COSTS, {"code": 0.05}))
    planner.restore(through_json(learned(0, 5000).state()))
    assert planner._arm("code", 1).history()[0][0][1] == pytest.approx(MOST_TRIES)
    for _ in range(25):
        planner.credit(CODE, 2, 2, drafted=2)
    assert planner.plan([CODE], 50).gamma > 0


def test_what_was_learned_in_this_run_is_not_overwritten() -> None:
    planner = learned(4)
    planner.restore(learned(0).state())
    assert planner._arm("code", 1).rates()[0] > 0.9


def test_state_of_another_gamma_max_fits() -> None:
    short = AutoPlanner(CostTable(COSTS), gamma_max=2)
    short.restore(learned(4).state())
    assert len(short._arm("code", 1).rates()) == 2
    long = AutoPlanner(CostTable(COSTS), gamma_max=8)
    long.restore(short.state())
    assert long.plan([CODE], 50).gamma >= 1


GOOD: dict[str, Any] = learned(2).state().to_json()


def damaged(**changes: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    data["arms"][0].update(changes)
    return data


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"format": 2, "arms": []},
        {"format": 1},
        {"format": 1, "arms": {}},
        {"format": 1, "arms": [None]},
        {"format": 1, "arms": [{"draft": "code"}]},
        {"format": 1, "arms": [GOOD["arms"][0], GOOD["arms"][0]]},
        {"format": 1, "arms": [GOOD["arms"][0]] * 5000},
        damaged(draft=""),
        damaged(draft=3),
        damaged(draft="x" * 1000),
        damaged(level="1"),
        damaged(level=True),
        damaged(level=-1),
        damaged(level=10**9),
        damaged(tried=[]),
        damaged(tried=[[1.0, 2.0]]),
        damaged(tried=[[math.nan, 2.0]] * 8),
        damaged(tried=[[1.0, math.nan]] * 8),
        damaged(tried=[[3.0, 2.0]] * 8),
        damaged(tried=[[-1.0, 2.0]] * 8),
        damaged(tried=[[1.0, 1e300]] * 8),
        damaged(tried=[[1.0, math.inf]] * 8),
        damaged(tried=[["1", 2.0]] * 8),
        damaged(tried=[[True, 2.0]] * 8),
        damaged(tried=[[1.0]] * 8),
        damaged(tried=[[0.0, 0.0]] * 1000, offered=[1.0] * 1000),
        damaged(offered=[1.5] * 8),
        damaged(offered=[math.nan] * 8),
        damaged(extra=1),
    ],
)
def test_a_damaged_state_is_refused(data: Any) -> None:
    with pytest.raises(ValueError):
        PlannerState.from_json(data)
    assert PlannerState.from_json(GOOD).to_json() == GOOD
