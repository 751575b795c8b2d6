"""Which draft proposes in the next round, and how many tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from predictor.costs import CostTable


@dataclass(frozen=True, slots=True)
class Plan:
    """`draft` proposes `gamma` tokens; draft None and gamma 0 are a plain step."""

    draft: str | None
    gamma: int


PLAIN = Plan(None, 0)
SEEDED_GAMMA = 3  # where a seed must pick the same text on every run


class Candidate(NamedTuple):
    """A draft that could run now. level: what it has to go on (0 = nothing). free: no weights, costs nothing to ask."""

    name: str
    level: int
    free: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What one round showed.

    drafted: tokens the draft produced. proposed: those that were judged; `accepted` < `proposed` means that the token
    after the accepted ones was judged wrong, equality that no token was (all right, or the answer ended on the way).
    width: tokens of the target's forward. caught_up: tokens of the conversation the draft had not seen before this
    round; a large number makes its seconds useless as the time of a step.
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


class Planner(Protocol):
    """`plan` is asked before every round and only knows what was committed, never the tokens that will be judged."""

    @property
    def off(self) -> bool:
        """True if every plan is a plain step: the round then does not even look at the drafts."""

    def seeded(self) -> Planner:
        """A planner for a request with a seed: its plans depend on the text alone, not on clocks or the past."""

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        """A plan over drafts that can run now, with gamma <= `limit`."""

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Free candidates whose guess should be compared with what the round emits although another plan was made."""

    def observe(self, observation: Observation) -> None:
        """Take in what a round showed."""

    def credit(self, candidate: Candidate, proposed: int, accepted: int) -> None:
        """Take in what a shadow would have scored; counts as in `Observation`."""


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
        gamma = min(self._gamma, limit)
        if gamma > 0:
            for name, level, _free in candidates:
                if level > 0 and self._draft in (None, name):
                    return Plan(name, gamma)
        return PLAIN

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return ()

    def observe(self, observation: Observation) -> None:
        pass

    def credit(self, candidate: Candidate, proposed: int, accepted: int) -> None:
        pass


# What is assumed about a level before anything was seen: 1 is "a model that can run", more the length of a match.
_PRIORS = (0.0, 0.5, 0.3, 0.45, 0.55, 0.65, 0.75)
_PRIOR_TRIES = 4.0
_FAST, _SLOW = 0.85, 0.99  # discounts of the recent past (about 7 tries) and of the long run (about 100)
_SLOW_TRIES = 2.0  # weight of the long run in today's estimate


class _Acceptance:
    """Acceptance of one (draft, level) by position: Beta counts, discounted, recent ones shrunk to the long run's.

    The rate at position i is conditional on all before it being accepted; one that was rarely reached leans on the rate
    before it, so that a geometric guess stands in where nothing was measured yet.
    """

    __slots__ = ("_fast", "_prior", "_rates", "_slow")

    def __init__(self, prior: float, positions: int) -> None:
        self._prior = prior
        self._fast = [[0.0, 0.0] for _ in range(positions)]  # [accepted, tried]
        self._slow = [[0.0, 0.0] for _ in range(positions)]
        self._rates: list[float] | None = None

    def update(self, proposed: int, accepted: int) -> None:
        self._rates = None
        for position in range(min(proposed, accepted + 1, len(self._fast))):
            hit = position < accepted
            for counts, keep in ((self._fast[position], _FAST), (self._slow[position], _SLOW)):
                counts[0] = counts[0] * keep + hit
                counts[1] = counts[1] * keep + 1

    def rates(self) -> list[float]:
        if self._rates is None:
            self._rates, before = [], self._prior
            for (fast, fast_tries), (slow, slow_tries) in zip(self._fast, self._slow, strict=True):
                long_run = (slow + _PRIOR_TRIES * before) / (slow_tries + _PRIOR_TRIES)
                before = (fast + _SLOW_TRIES * long_run) / (fast_tries + _SLOW_TRIES)
                self._rates.append(before)
        return self._rates


_PROBE_SHARE = 1 / 16  # of all rounds at most this many are probes; unused ones add up to a few
_SAVED_PROBES = 4.0
_FIRST_WAIT, _LONGEST_WAIT = 16, 1024


class _Rest:
    """How long a draft with weights has not been asked, and how long to wait before it is asked again."""

    __slots__ = ("idle", "wait")

    def __init__(self) -> None:
        self.idle, self.wait = 0, _FIRST_WAIT


class AutoPlanner:
    """The (draft, gamma) with the most expected tokens a second, gamma 0 included; equals go to the smaller gamma.

    Expected tokens come from discounted acceptance statistics per (draft, level) and position, seconds from `costs`.
    Free drafts that did not run are scored by their shadow; a draft with weights that does not pay is probed with
    gamma 1 after 16 rounds, then ever more rarely while probes fail, and never in more than one round of 16 overall.

    The state belongs to the planner: sessions that share one (an engine's) share what was learned, also from request to
    request. The law of the text does not depend on it, but which text a sampling seed picks does (see `seeded`
    False). Safe from several threads.
    """

    off = False

    def __init__(self, costs: CostTable | None = None, gamma_max: int = 8) -> None:
        if gamma_max < 1:
            raise ValueError(f"gamma_max must be 1 or more, not {gamma_max}")
        self.costs = costs or CostTable()
        self.gamma_max = gamma_max
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget what was learned about drafts; measured costs stay."""
        self._acceptance: dict[tuple[str, int], _Acceptance] = {}
        self._rest: dict[str, _Rest] = {}
        self._allowance = 0.0  # probes that may be made now

    def seeded(self) -> Planner:
        return FixedPlanner(None, SEEDED_GAMMA)

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        with self._lock:
            self._allowance = min(self._allowance + _PROBE_SHARE, _SAVED_PROBES)
            best = self._best(candidates, min(limit, self.gamma_max))
            return self._probe(candidates, best) if limit > 0 else best

    def _best(self, candidates: Sequence[Candidate], longest: int) -> Plan:
        able = [candidate for candidate in candidates if candidate.level > 0]
        if not able or longest <= 0:
            return PLAIN
        verify = self.costs.verify
        best, best_value = PLAIN, 1.0 / verify(1)
        for name, level, _free in able:
            step, rates = self.costs.draft(name), self._arm(name, level).rates()
            expected = reached = 1.0
            for gamma in range(1, longest + 1):
                reached *= rates[gamma - 1]
                expected += reached
                value = expected / (gamma * step + verify(gamma + 1))
                if value > best_value * (1 + 1e-9):
                    best, best_value = Plan(name, gamma), value
        return best

    def _arm(self, name: str, level: int) -> _Acceptance:
        level = min(level, len(_PRIORS) - 1)
        arm = self._acceptance.get((name, level))
        if arm is None:
            arm = self._acceptance[name, level] = _Acceptance(_PRIORS[level], self.gamma_max)
        return arm

    def _probe(self, candidates: Sequence[Candidate], best: Plan) -> Plan:
        """`best`, or gamma 1 on the draft whose turn to be tried again is longest overdue."""
        due, overdue = None, -1
        for name, level, free in candidates:
            if free or level <= 0:
                continue
            rest = self._rest.get(name)
            if rest is None:
                rest = self._rest[name] = _Rest()
            if name == best.draft:
                rest.idle, rest.wait = 0, _FIRST_WAIT
                continue
            rest.idle += 1
            if rest.idle - rest.wait > overdue:
                due, overdue = name, rest.idle - rest.wait
        if due is None or overdue < 0 or self._allowance < 1:
            return best
        self._allowance -= 1
        rest = self._rest[due]
        rest.idle, rest.wait = 0, min(2 * rest.wait, _LONGEST_WAIT)
        return Plan(due, 1)

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for c in candidates if c.free and c.level > 0 and c.name != plan.draft]

    def observe(self, observation: Observation) -> None:
        o = observation
        with self._lock:
            self.costs.observe_verify(o.width, o.target_seconds)
            if o.draft is None:
                return
            # A draft that comes back after an absence reads what it missed first; that is no time of a step.
            if o.drafted and o.caught_up <= self.gamma_max + 1:
                self.costs.observe_draft(o.draft, o.draft_seconds / o.drafted)
            self._arm(o.draft, o.level).update(o.proposed, o.accepted)
            rest = self._rest.get(o.draft)
            if rest is not None and o.accepted:
                rest.wait = 2  # it may pay again: look again soon, within the overall share of probes

    def credit(self, candidate: Candidate, proposed: int, accepted: int) -> None:
        with self._lock:
            self._arm(candidate.name, candidate.level).update(proposed, accepted)


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

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return self._planner.shadows(plan, self._only(candidates))

    def observe(self, observation: Observation) -> None:
        self._planner.observe(observation)

    def credit(self, candidate: Candidate, proposed: int, accepted: int) -> None:
        self._planner.credit(candidate, proposed, accepted)

    def _only(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [candidate for candidate in candidates if candidate.name == self._draft]
