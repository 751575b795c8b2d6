"""A planner that can only cost speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from predictor.planner import (
    NOTHING_TO_DRAFT,
    PLAIN,
    Candidate,
    FixedPlanner,
    Forecast,
    Observation,
    Plan,
    Planner,
)

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

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        return self._try(
            lambda: _weighed(self._planner.forecast(candidates, limit), candidates, limit), NOTHING_TO_DRAFT
        )

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


def _weighed(forecast: Forecast, candidates: Sequence[Candidate], limit: int) -> Forecast:
    """The same forecast, of a draft that can run, with chances that add up; raises for what is none."""
    if forecast.draft is None or all(candidate.name != forecast.draft for candidate in candidates):
        return NOTHING_TO_DRAFT._replace(fixed=None if forecast.fixed is None else 0)
    rates, offered = (
        [float(share) for share in shares][: max(limit, 0)] for shares in (forecast.rates, forecast.offered)
    )
    if len(rates) != len(offered) or not all(0 <= share <= 1 for share in (*rates, *offered)):
        raise ValueError(f"the forecast for {forecast.draft} has rates {rates}, offered {offered}")
    fixed = None if forecast.fixed is None else min(int(forecast.fixed), limit)
    return Forecast(forecast.draft, rates, offered, max(int(forecast.behind), 0), fixed)
