"""`oracle-static` and `oracle-dynamic`: what knowing the future would bring. Only in replay, which hands it over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from predictor.costs import CostTable
from predictor.holding import Holding, View
from predictor.planner import PLAIN, Candidate, Plan
from predictor.policies.base import LOOKUP, LOOKUP_LEVEL, Baseline


class Way(NamedTuple):
    """How the rounds from one scheduling point to the next go. draft: None = none; lookup: it proposes where it has a
    match, whatever the draft."""

    draft: str | None
    gamma: int
    lookup: bool


PLAIN_WAY = Way(None, 0, False)
Ways = tuple[Way, ...]


class Leg(NamedTuple):
    """A part of the best course, until another draft runs. meanwhile: how rounds go until the draft of `way` can run;
    begins: in how many rounds."""

    way: Way
    meanwhile: Way
    begins: int


class Foresight(Protocol):
    """The text that is being made, known ahead."""

    def foresee(self, own: Mapping[str, Ways], common: Ways, rounds: int | None, capacity: int) -> Sequence[Leg]:
        """The course of fewest seconds from now to the end of the text, one leg for each change of the draft.

        own: the ways of each draft with weights, common: those that need none. rounds: from one scheduling point to the
        next, None = one way all through. capacity: slots; loads and reading up are reckoned with.
        """

    def behind(self, draft: str) -> int:
        """Tokens that it has to read before it can run; 0 = it can, or it is not here."""


class _Unknown:
    """A foresight for policies that are made to see that they can be, and never asked."""

    def foresee(self, own: Mapping[str, Ways], common: Ways, rounds: int | None, capacity: int) -> Sequence[Leg]:
        raise AssertionError("nothing is being replayed")

    def behind(self, draft: str) -> int:
        raise AssertionError("nothing is being replayed")


CHECK_ONLY: Foresight = _Unknown()


class _Oracle(Baseline):
    """gamma None: any from 1 to gamma_max, plain steps, and lookup first or not at all; else that gamma, and lookup
    first. free: drafts without weights, which it may run as well."""

    def __init__(
        self,
        costs: CostTable,
        drafts: Sequence[str],
        gamma: int | None,
        gamma_max: int,
        ahead: Foresight,
        *,
        free: Collection[str] = (),
        lookup: bool = True,
        interval: int = 4,
    ) -> None:
        super().__init__(costs, drafts, gamma or 0, lookup=lookup, interval=interval)
        self._ahead = ahead
        gammas = range(1, gamma_max + 1) if gamma is None else (gamma,)
        looks = (True, False) if lookup and gamma is None else (lookup,)
        self._own = {name: tuple(Way(name, g, look) for g in gammas for look in looks) for name in self.drafts}
        common = [Way(name, g, look) for name in sorted({*free} - {LOOKUP}) for g in gammas for look in looks]
        common += [Way(None, g, True) for g in gammas if lookup]
        self._common = (*common, PLAIN_WAY) if gamma is None or not lookup else tuple(common)
        self._way = self._meanwhile = self._common[-1]
        self._coming: list[Leg] = []

    def _foresee(self, view: View, rounds: int | None) -> list[str]:
        """Choose the way; returns the drafts with weights in the order in which they will run."""
        able = {name: self._own[name] for name in self.drafts if name not in view.failed and view.capacity}
        legs = self._ahead.foresee(able, self._common, rounds, view.capacity)
        self._way, self._meanwhile = legs[0].way, legs[0].meanwhile
        self._active = self._way.draft if self._way.draft in self._own else None
        self._coming = [leg for leg in legs if leg.way.draft in self._own]
        return [str(leg.way.draft) for leg in self._coming]

    def reads(self) -> str:
        """The draft that reads up in this round: what runs, what stands in for it, then what runs next. Lookup, which
        has nothing to read, where nobody shall."""
        soon = [leg.way.draft for leg in self._coming if leg.begins <= _READ_AHEAD]
        for name in (self._way.draft, self._meanwhile.draft, *soon):
            if name in self._own and self._ahead.behind(str(name)):
                return str(name)
        return LOOKUP

    def informed(self) -> bool:
        return True

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        able = {candidate.name: candidate.level for candidate in candidates if candidate.level > 0}
        way = self._meanwhile if self._active is not None and self._active not in able else self._way
        gamma = min(way.gamma, limit)
        if gamma > 0 and way.lookup and able.get(LOOKUP, 0) >= LOOKUP_LEVEL:
            return Plan(LOOKUP, gamma)
        return Plan(way.draft, gamma) if gamma > 0 and way.draft in able else PLAIN


_READ_AHEAD = 16  # rounds before it runs, at most, that a draft begins to read


class OracleStatic(_Oracle):
    """`oracle-static`: the best (draft, gamma) of each text, by trying all on all of it. With `@gamma`, that gamma."""

    name = "oracle-static"

    def hold(self, view: View) -> Holding | None:
        if view.round:
            return None
        wanted = self._foresee(view, None)
        return Holding(tuple(wanted), f"{self._active} will be best in this text")


class OracleDynamic(_Oracle):
    """`oracle-dynamic`: at every scheduling point what is best from there to the end of the text, same N and K.

    For the next N rounds that is one draft (of those that can run, or will in the meantime), one gamma, and lookup
    first or not. A draft is loaded, and reads the text, while another one runs, as soon as it is known to be next. With
    `@gamma`, that gamma, and lookup first.
    """

    name = "oracle-dynamic"

    def hold(self, view: View) -> Holding | None:
        wanted = self._foresee(view, self._interval)
        if self._meanwhile.draft in view.resident and self._active is not None:  # must not go while it stands in
            wanted[1:1] = [str(self._meanwhile.draft)]
        wanted += [name for name in self.drafts if name in view.resident]
        reason = f"{self._active} will be best in the next {self._interval} rounds"
        return Holding(tuple(dict.fromkeys(wanted)), reason)
