"""A planner that can only cost speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from predictor.planner import PLAIN, Candidate, FixedPlanner, Observation, Plan, Planner

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LONGEST = 64  # tokens of a shadow's guess


class Guarded:
    """Another planner, within one answer. If anything in it raises, the rest of the answer is plain steps."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    @property
    def off(self) -> bool:
        return self._try(lambda: bool(self._planner.off), True)

    def seeded(self) -> Planner:
        return self._try(lambda: Guarded(self._planner.seeded()), self)

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        return self._try(lambda: _checked(self._planner.plan(candidates, limit)), PLAIN)

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return self._try(lambda: _among(self._planner.shadows(plan, candidates), candidates), ())

    def observe(self, observation: Observation) -> None:
        self._try(lambda: self._planner.observe(observation), None)

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        self._try(lambda: self._planner.credit(candidate, proposed, accepted, **measured), None)

    def _try(self, call: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return call()
        except Exception as error:
            self._planner = FixedPlanner(None, 0)
            cause = f"{type(error).__name__}: {error}"
            _log.warning("the policy failed, the rest of this answer is written in plain steps: %s", cause)
            return otherwise


def _among(shadows: Sequence[Candidate], candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those shadows that can run now: what else a policy names would be taken for a fault of the draft."""
    able = {candidate.name: candidate for candidate in candidates}
    return tuple(able[s.name]._replace(shadow=min(int(s.shadow), _LONGEST)) for s in shadows if s.name in able)


def _checked(plan: Plan) -> Plan:
    """The same plan, with numbers that a round can compare."""
    return Plan(plan.draft, int(plan.gamma), float(plan.floor))
