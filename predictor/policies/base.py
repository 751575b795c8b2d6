"""The protocol of policies, and what the published ones share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from predictor.acceptance import Acceptance
from predictor.costs import CostTable
from predictor.holding import Holding, View
from predictor.planner import (
    NOTHING_TO_DRAFT,
    PLAIN,
    SEEDED_GAMMA,
    Candidate,
    FixedPlanner,
    Forecast,
    Observation,
    Plan,
    Planner,
)

_Own = TypeVar("_Own", bound="Baseline")
LOOKUP = "ngram"
LOOKUP_LEVEL = 2  # a suffix of that many tokens matches
FORESEEN = 8  # tokens of a block that a forecast of a published policy looks ahead
_PRIOR = 0.5  # acceptance of a draft that was never seen


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

    def reads(self) -> str | None:
        """The draft that reads up on the text before others do; None = none."""

    def pays_to_read(self, lagging: Candidate, candidates: Sequence[Candidate]) -> bool:
        """Whether the draft that reads before others should read what it missed. candidates: those in memory."""

    def informed(self) -> bool:
        """Whether it knows enough of drafts that do not run: then only the preferred one reads the text."""

    def for_text(self) -> Policy:
        """A view for one of several texts that are made at the same time, on which `begin` is called next.

        What was learned of drafts, measured seconds and the generator are shared with this policy and its other views;
        ranking, preference, lock-in and what a policy forgets from text to text anyway are the view's own.
        """


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
        self._acceptance: dict[tuple[str, int], Acceptance] = {}  # only for `forecast`

    def for_text(self: _Own) -> _Own:
        return copy.copy(self)

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

    def reads(self) -> str | None:
        return self.preferred()

    def pays_to_read(self, lagging: Candidate, candidates: Sequence[Candidate]) -> bool:
        return True

    def informed(self) -> bool:
        return bool(self._ranking)

    def seeded(self) -> Planner:
        return FixedPlanner(None, SEEDED_GAMMA)

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        gamma = min(self.gamma, limit)
        chosen = self._chosen(candidates) if gamma > 0 else None
        return PLAIN if chosen is None else Plan(chosen.name, gamma)

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        longest = min(limit, FORESEEN)
        chosen = self._chosen(candidates) if longest > 0 else None
        if chosen is None:
            return NOTHING_TO_DRAFT
        arm = self._arm(chosen.name, chosen.level)
        return Forecast(chosen.name, arm.rates()[:longest], arm.offered()[:longest], chosen.behind)

    def _arm(self, name: str, level: int) -> Acceptance:
        arm = self._acceptance.get((name, level))
        if arm is None:
            arm = self._acceptance[name, level] = Acceptance(_PRIOR, FORESEEN)
        return arm

    def _chosen(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The draft that proposes in this round, whatever gamma is."""
        mine = None
        for candidate in candidates:
            if candidate.name == LOOKUP and candidate.level >= LOOKUP_LEVEL and self._lookup:
                return candidate
            if candidate.name == self._active and candidate.level > 0:
                mine = candidate
        if mine is not None:
            return mine
        able = {candidate.name: candidate for candidate in candidates if candidate.level > 0}
        chosen = self._stand_in(able)
        return None if chosen is None else able[chosen]

    def _stand_in(self, able: Mapping[str, Candidate]) -> str | None:
        """The draft that runs while the chosen one is not there; None = a plain step."""
        return None

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return ()

    def observe(self, observation: Observation) -> None:
        _observe_costs(self.costs, observation)
        o = observation
        if o.draft is not None:
            self._arm(o.draft, o.level).update(o.proposed, o.accepted)

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        pass


def _observe_costs(costs: CostTable, o: Observation) -> None:
    """Every policy keeps the table of measured seconds current; a block that was read up for is no time of a step."""
    if o.batch == 1:
        costs.observe_verify(o.width, o.target_seconds)
    if o.draft is not None and o.drafted and o.caught_up <= _USUAL:
        costs.observe_draft(o.draft, o.draft_seconds / o.drafted)


_USUAL = 16  # tokens that a draft may have to read in an ordinary round
