"""How many tokens each of several sequences drafts: gamma by load. Ours and the published planners."""

from predictor.load.base import BatchOutcome, LoadPlanner, LoadView, Running
from predictor.load.costs import BatchCosts
from predictor.load.making import LOAD_PLANNERS, make_load_planner
from predictor.load.wishes import Wish, combine

__all__ = [
    "LOAD_PLANNERS",
    "BatchCosts",
    "BatchOutcome",
    "LoadPlanner",
    "LoadView",
    "Running",
    "Wish",
    "combine",
    "make_load_planner",
]
