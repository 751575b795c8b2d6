"""The protocol of policies, and what the published ones share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from predictor.costs import CostTable
from predictor.holding import Holding, View
from predictor.planner import PLAIN, SEEDED_GAMMA, Candidate, FixedPlanner, Observation, Plan, Planner

LOOKUP = "ngram"
LOOKUP_LEVEL = 2  # a suffix of that many tokens matches


class Policy(Planner, Protocol):
    """A planner that also says which drafts to hold. Calls come in this order, `plan` and what follows every round:

    begin  [rank]  hold  { plan  shadows  observe  credit...  [rank]  every interval() rounds: hold }
    """

    name: str
    costs: CostTable  # whoever loads tells it how long that took (`observe_load`)

    def begin(self) -> None:
        """Another text begins."""

    def rank(self, ranking: Mapping[str, float]) -> None:
        """The ranker's newest expectation for this text: the chance that a draft's first token is accepted."""

    def hold(self, view: View) -> Holding | None:
        """The drafts to hold from now on; None = leave it as it is. Never waits, takes microseconds."""

    def interval(self) -> int:
        """Rounds from one scheduling point to the next, 1 or more."""

    def preferred(self) -> str | None:
        """The draft with weights that the policy wants most now, resident or not; None = none."""

    def informed(self) -> bool:
        """Whether it knows enough of drafts that do not run: then only the preferred one reads the text."""


class Baseline:
    """What the published policies share: lookup first, one gamma, a draft chosen at scheduling points only.

    Where the lookup candidate has a match of two or more tokens it runs, with the policy's gamma (`lookup=False`:
    never); else the chosen draft if it can run, else what `_stand_in` says. Subclasses set `_active` in `hold`.
    """

    name = "baseline"
    off = False

    def __init__(self, costs: CostTable, drafts: Sequence[str], gamma: int, *, lookup: bool = True, interval: int = 4):
        self.costs = costs
        self.drafts = tuple(drafts)
        self.gamma = gamma
        self._lookup = lookup
        self._interval = interval
        self._active: str | None = None
        self._ranking: Mapping[str, float] = {}

    def begin(self) -> None:
        self._ranking = {}

    def rank(self, ranking: Mapping[str, float]) -> None:
        self._ranking = ranking

    def hold(self, view: View) -> Holding | None:
        return None

    def interval(self) -> int:
        return self._interval

    def preferred(self) -> str | None:
        return self._active

    def informed(self) -> bool:
        return bool(self._ranking)

    def seeded(self) -> Planner:
        return FixedPlanner(None, SEEDED_GAMMA)

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        gamma = min(self.gamma, limit)
        if gamma <= 0:
            return PLAIN
        able = {candidate.name: candidate for candidate in candidates if candidate.level > 0}
        lookup = able.get(LOOKUP)
        if self._lookup and lookup is not None and lookup.level >= LOOKUP_LEVEL:
            return Plan(LOOKUP, gamma)
        chosen = self._active if self._active in able else self._stand_in(able)
        return PLAIN if chosen is None else Plan(chosen, gamma)

    def _stand_in(self, able: Mapping[str, Candidate]) -> str | None:
        """The draft that runs while the chosen one is not there; None = a plain step."""
        return None

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return ()

    def observe(self, observation: Observation) -> None:
        _observe_costs(self.costs, observation)

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        pass


def _observe_costs(costs: CostTable, o: Observation) -> None:
    """Every policy keeps the table of measured seconds current; a block that was read up for is no time of a step."""
    costs.observe_verify(o.width, o.target_seconds)
    if o.draft is not None and o.drafted and o.caught_up <= _USUAL:
        costs.observe_draft(o.draft, o.draft_seconds / o.drafted)


_USUAL = 16  # tokens that a draft may have to read in an ordinary round
