"""The decisions: which draft and how many tokens. Knows nothing of models or drafts, so that it can be simulated."""

from __future__ import annotations

from predictor.costs import CostTable
from predictor.planner import PLAIN, AutoPlanner, Candidate, FixedPlanner, Observation, OnlyPlanner, Plan, Planner

__all__ = [
    "PLAIN",
    "AutoPlanner",
    "Candidate",
    "CostTable",
    "FixedPlanner",
    "Observation",
    "OnlyPlanner",
    "Plan",
    "Planner",
]
