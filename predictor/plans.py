"""The words of planners: plans, what they are made from, and the planners that decide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Plan:
    """`draft` proposes `gamma` tokens; draft None and gamma 0 are a plain step.

    floor: a draft that knows its confidence ends the block before the first token whose chance to be reached and right
    is less than this: it would cost more than it gains. 0 = never.
    """

    draft: str | None
    gamma: int
    floor: float = field(default=0.0, compare=False)


PLAIN = Plan(None, 0)
_UNKNOWN = 0.5  # acceptance, where nobody counts it
SEEDED_GAMMA = 3  # where a seed must pick the same text on every run


class Candidate(NamedTuple):
    """A draft that could run now. level: what it has to go on (0 = nothing). free: no weights, costs nothing to ask.

    shadow: how many tokens it guesses where its guess is only compared. behind: tokens of the conversation that it has
    to read first, beyond the few of an ordinary round. Drafts that are not resident are no candidates.
    """

    name: str
    level: int
    free: bool = False
    shadow: int = 4
    behind: int = 0


class Forecast(NamedTuple):
    """What a text would do in its next round, were it to speculate: for whoever chooses how many tokens.

    draft: that would propose; None = nothing can. rates[i]: the chance that its token i is right, given that all before
    it are; offered[i]: the share of blocks that reach token i, of those that may. Both as long as a block may be at
    most. behind: tokens that the draft has to read first, see `Candidate`. fixed: the gamma is not to be chosen, it is
    this one.
    """

    draft: str | None
    rates: Sequence[float]
    offered: Sequence[float]
    behind: int = 0
    fixed: int | None = None


NOTHING_TO_DRAFT = Forecast(None, (), ())


class Observation(NamedTuple):
    """What one round showed.

    drafted: tokens the draft produced. proposed: those that were judged; `accepted` < `proposed` means that the token
    after the accepted ones was judged wrong, equality that no token was (all right, or the answer ended on the way).
    width: tokens of the target's forward. caught_up: tokens of the conversation the draft had not seen before this
    round; a large number makes its seconds useless as the time of a step. asked: tokens that the plan wanted; fewer
    `drafted` means that the draft ended the block itself (0 = as many as were drafted). emitted: tokens committed.
    batch: sequences that shared the target's forward; with more than one its seconds are those of all of them, and no
    time of a forward of `width` tokens.
    """

    draft: str | None
    level: int
    drafted: int
    proposed: int
    accepted: int
    width: int
    draft_seconds: float
    target_seconds: float
    caught_up: int = 1
    asked: int = 0
    emitted: int = 0
    batch: int = 1


class Planner(Protocol):
    """`plan` is asked before every round and only knows what was committed, never the tokens that will be judged."""

    @property
    def off(self) -> bool:
        """True if every plan is a plain step: the round then does not even look at the drafts."""

    def seeded(self) -> Planner:
        """A planner for a request with a seed: its plans depend on the text alone, not on clocks or the past."""

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        """A plan over drafts that can run now, with gamma <= `limit`."""

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        """In the place of `plan`, where somebody else chooses gamma: the draft that would run, up to `limit` tokens,
        and what is expected of it."""

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Candidates that should guess `shadow` tokens, to be compared with what the round emits, although another
        plan was made: free ones always, ones with weights now and then."""

    def observe(self, observation: Observation) -> None:
        """Take in what a round showed."""

    def credit(
        self,
        candidate: Candidate,
        proposed: int,
        accepted: int,
        *,
        drafted: int = 0,
        seconds: float = 0.0,
        caught_up: int = 1,
    ) -> None:
        """Take in what a shadow would have scored; counts as in `Observation`. seconds: 0 = not measured."""


class FixedPlanner:
    """Always the same gamma, by one draft, or by the first of them that has something to go on (`draft=None`)."""

    def __init__(self, draft: str | None, gamma: int) -> None:
        if gamma < 0:
            raise ValueError(f"gamma must be 0 or more, not {gamma}")
        self._draft = draft
        self._gamma = gamma

    @property
    def off(self) -> bool:
        return self._gamma == 0

    def seeded(self) -> Planner:
        return self

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        gamma, candidate = min(self._gamma, limit), self._first(candidates)
        return Plan(candidate.name, gamma) if gamma > 0 and candidate is not None else PLAIN

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        gamma, candidate = min(self._gamma, limit), self._first(candidates)
        if gamma <= 0 or candidate is None:
            return NOTHING_TO_DRAFT._replace(fixed=0)
        return Forecast(candidate.name, (_UNKNOWN,) * gamma, (1.0,) * gamma, candidate.behind, gamma)

    def _first(self, candidates: Sequence[Candidate]) -> Candidate | None:
        return next((c for c in candidates if c.level > 0 and self._draft in (None, c.name)), None)

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return ()

    def observe(self, observation: Observation) -> None:
        pass

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        pass


class OnlyPlanner:
    """Another planner that may use only the draft of one name."""

    off = False

    def __init__(self, planner: Planner, draft: str) -> None:
        self._planner = planner
        self._draft = draft

    def seeded(self) -> Planner:
        return FixedPlanner(self._draft, SEEDED_GAMMA)

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        return self._planner.plan(self._only(candidates), limit)

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        return self._planner.forecast(self._only(candidates), limit)

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return self._planner.shadows(plan, self._only(candidates))

    def observe(self, observation: Observation) -> None:
        self._planner.observe(observation)

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        self._planner.credit(candidate, proposed, accepted, **measured)

    def _only(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [candidate for candidate in candidates if candidate.name == self._draft]
