"""The decisions: which draft, how many tokens, what to keep in memory. Knows nothing of models, can be simulated."""

from __future__ import annotations

from predictor.costs import CostTable
from predictor.holding import Holding, View
from predictor.memory import PlannerState
from predictor.planner import PLAIN, AutoPlanner, Candidate, FixedPlanner, Observation, OnlyPlanner, Plan, Planner
from predictor.policies import Policy, make_policy

__all__ = [
    "PLAIN",
    "AutoPlanner",
    "Candidate",
    "CostTable",
    "FixedPlanner",
    "Holding",
    "Observation",
    "OnlyPlanner",
    "Plan",
    "Planner",
    "PlannerState",
    "Policy",
    "View",
    "make_policy",
]
