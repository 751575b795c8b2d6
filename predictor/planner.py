"""Which draft proposes in the next round, and how many tokens."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import TypeVar

from predictor.acceptance import Acceptance
from predictor.costs import CostTable
from predictor.memory import MOST_TRIES, WORTH_KEEPING, ArmHistory, PlannerState
from predictor.plans import (
    NOTHING_TO_DRAFT,
    PLAIN,
    SEEDED_GAMMA,
    Candidate,
    FixedPlanner,
    Forecast,
    Observation,
    OnlyPlanner,
    Plan,
    Planner,
)
from predictor.shadows import Shadows

__all__ = [
    "GAMMA_MAX",
    "NOTHING_TO_DRAFT",
    "PLAIN",
    "SEEDED_GAMMA",
    "AutoPlanner",
    "Candidate",
    "FixedPlanner",
    "Forecast",
    "Observation",
    "OnlyPlanner",
    "Plan",
    "Planner",
]

# What is assumed about a level before anything was seen: 1 is "a model that can run", more the length of a match.
GAMMA_MAX = 8  # the longest block that is planned
_PRIORS = (0.0, 0.5, 0.3, 0.45, 0.55, 0.65, 0.75)
_GUARD = 0.035  # a draft must promise that much more than plain steps: an estimate from a few tries is off by more
_HORIZON = 16  # rounds that share the price of what a draft has to read up on
_CAUTION = 0.9  # of the acceptance that was measured when a draft was made: this text is another one

_PROBE_SHARE = 1 / 16  # of all rounds at most this many are probes; unused ones add up to a few
_SAVED_PROBES = 4.0
_FIRST_WAIT, _LONGEST_WAIT = 16, 1024


_IN_BATCH = 0.35  # of the time of a plain step, that a text's part of a batch takes


_Auto = TypeVar("_Auto", bound="AutoPlanner")


class _Rest:
    """How long a draft with weights has not been asked, and how long to wait before it is asked again."""

    __slots__ = ("idle", "wait")

    def __init__(self) -> None:
        self.idle, self.wait = 0, _FIRST_WAIT


class _Probes:
    """The drafts that rest, and how many probes may be made now; one for all texts."""

    __slots__ = ("allowance", "rest")

    def __init__(self) -> None:
        self.rest: dict[str, _Rest] = {}
        self.allowance = 0.0


class AutoPlanner:
    """The (draft, gamma) with the most expected tokens a second, gamma 0 included; equals go to the smaller gamma.

    Expected tokens come from discounted acceptance statistics per (draft, level) and position, seconds from `costs`.
    Drafts that did not run are scored by shadows: free ones in every round, ones with weights in one round of 8 or so
    (see `Shadows`). A draft whose steps are too dear for that is probed instead: with gamma 1 after 16 rounds, then
    ever more rarely while probes fail, and never in more than one round of 16 overall.

    The state belongs to the planner: sessions that share one (an engine's) share what was learned, also from request to
    request. Texts that run at the same time each have a view of it (`for_text`). The law of the text does not depend on
    it, but which text a sampling seed picks does (see `seeded`). Safe from several threads.
    """

    off = False

    def __init__(self, costs: CostTable | None = None, gamma_max: int = GAMMA_MAX) -> None:
        if gamma_max < 1:
            raise ValueError(f"gamma_max must be 1 or more, not {gamma_max}")
        self.costs = costs or CostTable()
        self.gamma_max = gamma_max
        self._expected: dict[str, float] = {}
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget what was learned about drafts; measured costs and what is expected of them stay."""
        self._acceptance: dict[tuple[str, int], Acceptance] = {}
        self._probes = _Probes()
        self._shadows: Shadows | None = None
        self._common: AutoPlanner | None = None

    def for_text(self: _Auto) -> _Auto:
        """The planner of one of several texts that run at a time: call `begin` on it.

        All share costs, the long run of every draft, the purses of shadows and probes; each has its own recent past,
        its own expectations and its own turns of who guesses along. What it learns counts here at once.
        """
        own = copy.copy(self)
        with self._lock:
            own._common = common = self._common or self
            own._acceptance = {}
            own._shadows = Shadows(self.costs, beside=common._guessing_along())
        return own

    def state(self) -> PlannerState:
        """What is worth keeping for the next run."""
        with self._lock:
            arms = {key: ArmHistory(*arm.history()) for key, arm in self._acceptance.items()}
        return PlannerState({key: arm for key, arm in arms.items() if arm.tries >= WORTH_KEEPING})

    def restore(self, state: PlannerState) -> None:
        """Start from an earlier run's state, which a few tries outweigh. What was learned in this run stays."""
        with self._lock:
            for (name, level), history in state.arms.items():
                if (name, level) not in self._acceptance and level < len(_PRIORS):
                    self._arm(name, level).recall(history.tried, history.offered, MOST_TRIES)

    def expect(self, name: str, rate: float) -> None:
        """What is assumed of a draft before it is seen at work: the acceptance of its first token, as measured."""
        if not 0 <= rate <= 1:
            raise ValueError(f"draft {name}: an acceptance of {rate} is none")
        self._expected[name] = _CAUTION * rate

    def begin(self) -> None:
        """Another request begins: what was seen lately counts for less, and every draft is asked again soon."""
        with self._lock:
            self._guessing_along().hurry()
            common = self._common
            for arm in (self if common is None else common)._acceptance.values():
                arm.age()
            if common is not None:
                self._acceptance = {}

    def seeded(self) -> Planner:
        return FixedPlanner(None, SEEDED_GAMMA)

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        with self._lock:
            self._probes.allowance = min(self._probes.allowance + _PROBE_SHARE, _SAVED_PROBES)
            self._guessing_along().earn()
            best = self._best(candidates, min(limit, self.gamma_max))
            return self._probe(candidates, best) if limit > 0 else best

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        longest = min(limit, self.gamma_max)
        with self._lock:
            self._guessing_along().earn(_IN_BATCH)
            able = [c for c in candidates if c.level > 0] if longest > 0 else []
            if not able:
                return NOTHING_TO_DRAFT
            best = max(able, key=lambda c: self._value(c, longest)[1])
            arm = self._arm(best.name, best.level)
            return Forecast(best.name, arm.rates()[:longest], arm.offered()[:longest], best.behind)

    def _guessing_along(self) -> Shadows:
        if self._shadows is None:  # made late: its purse is in plain steps, which are measured by now
            self._shadows = Shadows(self.costs)
        return self._shadows

    def _best(self, candidates: Sequence[Candidate], longest: int) -> Plan:
        best, best_gamma, best_value = None, 0, (1.0 + _GUARD) / self.costs.verify(1)
        if longest > 0:
            for candidate in candidates:
                if candidate.level > 0:
                    gamma, value = self._value(candidate, longest)
                    if value > best_value * (1 + 1e-9):
                        best, best_gamma, best_value = candidate.name, gamma, value
        return PLAIN if best is None else Plan(best, best_gamma, self._floor(best, best_gamma, best_value))

    def _value(self, candidate: Candidate, longest: int) -> tuple[int, float]:
        """The gamma up to `longest` with which a draft makes most tokens a second, and how many; at least 1."""
        arm, costs = self._arm(candidate.name, candidate.level), self.costs
        step, curve = costs.draft(candidate.name), costs.curve(longest + 1)
        width = curve[0]
        seconds = width
        if candidate.behind:
            seconds += costs.catch_up(candidate.name, candidate.behind) / _HORIZON
        best, best_value = 1, 0.0
        before = 1.0
        for place, (expected, offered) in enumerate(zip(arm.tokens()[:longest], arm.offered()), start=1):
            wider = curve[place]
            # A token is made before its draft thinks better of it, and only offered ones widen the target's forward.
            seconds += before * step + offered * (wider - width)
            before, width = offered, wider
            if expected > best_value * seconds * (1 + 1e-9):
                best, best_value = place, expected / seconds
        return best, best_value

    def _may_pay(self, candidate: Candidate) -> bool:
        """Whether a single token of this draft comes near to paying for itself."""
        plain, wider = self.costs.curve(2)[:2]
        rate = self._arm(candidate.name, candidate.level).rates()[0]
        return (1 + rate) * plain > wider + self.costs.draft(candidate.name)

    def _floor(self, draft: str, gamma: int, value: float) -> float:
        """The tokens that the seconds of one more token would bring at `value` tokens a second: `Plan.floor`."""
        curve = self.costs.curve(gamma + 1)
        further = self.costs.draft(draft) + (curve[gamma] - curve[0]) / gamma
        return min(further * value, 1.0)

    def _arm(self, name: str, level: int) -> Acceptance:
        arm = self._acceptance.get((name, level))
        if arm is not None:
            return arm
        if level >= len(_PRIORS):
            return self._arm(name, len(_PRIORS) - 1)
        if self._common is not None:
            arm = self._common._arm(name, level).for_text()
        else:
            arm = Acceptance(self._expected.get(name, _PRIORS[level]), self.gamma_max)
        self._acceptance[name, level] = arm
        return arm

    def _probe(self, candidates: Sequence[Candidate], best: Plan) -> Plan:
        """`best`, or gamma 1 on the draft whose turn to be tried again is longest overdue."""
        due, overdue = None, -1
        for candidate in candidates:
            name = candidate.name
            if candidate.free or candidate.level <= 0:
                continue
            rest = self._probes.rest.get(name)
            if rest is None:
                rest = self._probes.rest[name] = _Rest()
            if name == best.draft:
                rest.idle, rest.wait = 0, _FIRST_WAIT
                continue
            rest.idle += 1
            if rest.idle - rest.wait > overdue and not self._guessing_along().affordable(name):
                due, overdue = name, rest.idle - rest.wait
        if due is None or overdue < 0 or self._probes.allowance < 1:
            return best
        self._probes.allowance -= 1
        rest = self._probes.rest[due]
        rest.idle, rest.wait = 0, min(2 * rest.wait, _LONGEST_WAIT)
        return Plan(due, 1)

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        able = [c for c in candidates if c.level > 0 and c.name != plan.draft]
        with self._lock:
            guessing = self._guessing_along().pick([c for c in able if not c.free])
        return [c for c in able if c.free] + ([] if guessing is None else [guessing])

    def observe(self, observation: Observation) -> None:
        o = observation
        with self._lock:
            if o.batch == 1:
                self.costs.observe_verify(o.width, o.target_seconds)
            if o.draft is None:
                return
            arm, stopped = self._arm(o.draft, o.level), o.drafted < o.asked
            self._time(o.draft, o.drafted + stopped, o.draft_seconds, o.caught_up)
            # A block that the draft ended itself, all right so far, brought nothing at the next position.
            cut_short = stopped and 0 < o.drafted == o.accepted
            fell_before = arm.fallen
            arm.update(o.proposed + cut_short, o.accepted)
            arm.offer(max(o.asked, o.drafted), o.drafted)
            if arm.fallen and not fell_before:
                self._guessing_along().hurry()
            rest = self._probes.rest.get(o.draft)
            if rest is not None and o.accepted:
                rest.wait = 2  # it may pay again: look again soon, within the overall share of probes

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
        with self._lock:
            self._arm(candidate.name, candidate.level).update(proposed, accepted)
            if not candidate.free:
                self._time(candidate.name, drafted if seconds > 0 else 0, seconds, caught_up)
                self._guessing_along().charge(candidate.name, seconds)
                self._guessing_along().promised(self._may_pay(candidate))

    def _time(self, name: str, steps: int, seconds: float, caught_up: int) -> None:
        # A draft that comes back after an absence reads what it missed first; that is no time of a step.
        if steps and caught_up <= self.gamma_max + 1:
            self.costs.observe_draft(name, seconds / steps)
