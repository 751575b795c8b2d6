"""A policy that several threads may use: the published ones keep their books for one text at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from predictor.holding import Holding, View
from predictor.planner import Candidate, Forecast, Observation, Plan, Planner
from predictor.policies.base import Policy


class LockedPolicy:
    """Another policy, one call at a time. (`EdgePolicy` locks itself, and for shorter.)"""

    def __init__(self, policy: Policy, lock: threading.RLock | None = None) -> None:
        self._policy = policy
        self._lock = lock or threading.RLock()
        self.name = policy.name
        self.costs = policy.costs

    @property
    def off(self) -> bool:
        return self._policy.off

    def seeded(self) -> Planner:
        return self._policy.seeded()

    def for_text(self) -> LockedPolicy:
        with self._lock:  # one for all: they share what they learn
            return LockedPolicy(self._policy.for_text(), self._lock)

    def begin(self) -> None:
        with self._lock:
            self._policy.begin()

    def rank(self, ranking: Mapping[str, float]) -> None:
        with self._lock:
            self._policy.rank(ranking)

    def hold(self, view: View) -> Holding | None:
        with self._lock:
            return self._policy.hold(view)

    def interval(self) -> int:
        with self._lock:
            return self._policy.interval()

    def preferred(self) -> str | None:
        return self._policy.preferred()

    def reads(self) -> str | None:
        return self._policy.reads()

    def pays_to_read(self, lagging: Candidate, candidates: Sequence[Candidate]) -> bool:
        with self._lock:
            return self._policy.pays_to_read(lagging, candidates)

    def informed(self) -> bool:
        return self._policy.informed()

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        with self._lock:
            return self._policy.plan(candidates, limit)

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        with self._lock:
            return self._policy.forecast(candidates, limit)

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        with self._lock:
            return self._policy.shadows(plan, candidates)

    def observe(self, observation: Observation) -> None:
        with self._lock:
            self._policy.observe(observation)

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        with self._lock:
            self._policy.credit(candidate, proposed, accepted, **measured)
