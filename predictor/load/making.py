"""From the text of a load planner, as in `load_policy = "fixed:3"`, to the planner."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

import numpy as np

from predictor.costs import CostTable
from predictor.load.bandits import BanditSpecLoad, NightjarLoad
from predictor.load.base import LoadPlanner
from predictor.load.costs import BatchCosts
from predictor.load.edgespec import EdgeLoad
from predictor.load.guard import GuardedLoad
from predictor.load.planners import FixedLoad, GoodputLoad, TetrisLoad

_Make = Callable[[BatchCosts, CostTable, int, np.random.Generator], LoadPlanner]

# By name: how it is made, the number that may follow the name, and what that is; None = it must be given.
_MAKERS: Mapping[str, tuple[_Make, int | None, str]] = {
    "edgespec": (lambda c, d, g, r: EdgeLoad(c, d, g), 0, "the longest gamma"),
    "none": (lambda c, d, g, r: FixedLoad(c, d, 0), 0, ""),
    "fixed": (lambda c, d, g, r: FixedLoad(c, d, g), None, "the gamma"),
    "nightjar": (lambda c, d, g, r: NightjarLoad(c, d, g, r), 3, "the longest gamma"),
    "goodput": (lambda c, d, g, r: GoodputLoad(c, d, g), 5, "the longest gamma"),
    "banditspec": (lambda c, d, g, r: BanditSpecLoad(c, d, g), 4, "the longest gamma"),
    "tetris": (lambda c, d, g, r: TetrisLoad(c, d, g), None, "the rows of a forward"),
}
LOAD_PLANNERS = tuple(_MAKERS)
_MOST = 256


def make_load_planner(
    text: str, costs: BatchCosts, drafts: CostTable, *, gamma_max: int = 8, seed: int = 0
) -> LoadPlanner:
    """The planner that `text` names: `name` or `name:number`, as in `edgespec`, `fixed:3`, `nightjar:4`, `tetris:24`.

    Its calls never raise: a planner that fails is given up, and everything is plain rows from there on. gamma_max: the
    longest gamma of `edgespec`. Raises ValueError with what to write instead.
    """
    name, colon, number = (part.strip() for part in text.partition(":"))
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, LOAD_PLANNERS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(LOAD_PLANNERS)}"
        raise ValueError(f"load planner {name!r} is not known; {hint}")
    make, usual, meaning = _MAKERS[name]
    if colon and not meaning:
        raise ValueError(f"load planner {name} takes no number; leave out ':{number}'")
    if not colon and usual is None:
        raise ValueError(f"load planner {name} needs {meaning}, as in {name}:{24 if name == 'tetris' else 3}")
    if colon and (not number.isdecimal() or not 1 <= int(number) <= _MOST):
        raise ValueError(f"load planner {name}: {meaning} is a number from 1 to {_MOST}, not {number!r}")
    value = int(number) if colon else (usual or gamma_max)
    return GuardedLoad(make(costs, drafts, value, np.random.default_rng(seed)))
