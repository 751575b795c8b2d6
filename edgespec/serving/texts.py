"""The working set while several texts are made: each has a view of the policy, and what they wish for is combined."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from edgespec.memory.states import DraftState
from edgespec.steering import Scheduler, Steering
from predictor.load import Wish, combine
from predictor.policies import Policy

_log = logging.getLogger(__name__)


class Texts:
    """The texts that are made at once on one working set. Belongs to the serving thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._wishes: dict[int, Wish] = {}
        self._last: tuple[tuple[tuple[str, ...], ...], int, frozenset[str], Wish] | None = None
        self._gathering = False
        self._voted = False  # since wishes were passed on last
        self._in_use: str | None = None  # by the text that voted last, of those that use one
        self._states: Mapping[str, DraftState] | None = None  # while votes are gathered

    def steering(self, policy: Policy, limit: int) -> tuple[Steering, Voter]:
        """For a text of at most `limit` new tokens, with the policy's view of it; its vote is to be withdrawn in the
        end."""
        ticket = self.scheduler.ticket()
        voter = Voter(self, policy, ticket)
        return Steering(voter, ticket, limit), voter

    @contextmanager
    def together(self) -> Iterator[None]:
        """All votes in this block are one: they are combined, and passed on, at its end. Does not raise."""
        self._gathering, self._states = True, None
        try:
            yield
        finally:
            self._gathering, self._states = False, None
            try:
                self.settle()
            except Exception:
                _log.exception("the working set is left as it is")

    def states(self) -> Mapping[str, DraftState]:
        """As the working set has them now; while votes are gathered, looked up once for all."""
        if not self._gathering:
            return self.scheduler.states()
        if self._states is None:
            self._states = self.scheduler.states()
        return self._states

    def vote(self, key: int, wish: Wish, in_use: str | None) -> None:
        """One text wants this from now on, and uses that draft; passed on now, unless votes are gathered."""
        self._wishes[key] = wish
        self._voted, self._in_use = True, in_use or self._in_use
        if not self._gathering:
            self.settle()

    def withdraw(self, key: int) -> None:
        """A text is over; what it wanted is let go of with the next vote."""
        self._wishes.pop(key, None)

    def settle(self) -> None:
        """Pass on what all want together, if anybody has voted since the last time."""
        if self._voted:
            in_use, self._voted, self._in_use = self._in_use, False, None
            wish, self._states = self._together(), None
            self.scheduler.retarget(wish.wanted, wish.reason, in_use=in_use)

    def _together(self) -> Wish:
        working_set = self.scheduler.working_set
        with working_set.acquire() as lease:
            resident = lease.names
        asked, capacity = tuple(tuple(each.wanted) for each in self._wishes.values()), working_set.capacity
        if self._last is None or self._last[:3] != (asked, capacity, resident):  # mostly, nobody has changed his mind
            holding = combine(list(self._wishes.values()), capacity, resident)
            self._last = (asked, capacity, resident, Wish(holding.wanted, holding.reason))
        return self._last[3]


class Voter(Scheduler):
    """One text's scheduler: what its policy wants is a vote."""

    def __init__(self, texts: Texts, policy: Policy, key: int) -> None:
        common = texts.scheduler
        self._texts, self._key = texts, key
        super().__init__(policy, common.working_set, common.drafts, common.costs, tracer=common.tracer)
        self.ranker, self.features = common.ranker, common.features

    @property
    def pinned(self) -> str | None:  # type: ignore[override]
        return self._texts.scheduler.pinned

    @pinned.setter
    def pinned(self, name: str | None) -> None:
        pass  # what is asked for by name is a matter of all texts

    @property
    def exposed_seconds(self) -> float:  # type: ignore[override]
        return self._texts.scheduler.exposed_seconds

    @exposed_seconds.setter
    def exposed_seconds(self, seconds: float) -> None:
        self._texts.scheduler.exposed_seconds = max(seconds, self._texts.scheduler.exposed_seconds)

    def states(self) -> Mapping[str, DraftState]:
        return self._texts.states()

    def settle(self) -> None:
        self._texts.settle()

    def retarget(self, wanted: Sequence[str], reason: str, *, in_use: str | None = None) -> bool:
        """Give this text's vote; it counts unless a draft was pinned."""
        self._texts.vote(self._key, Wish(wanted, reason), in_use)
        return self.pinned is None

    def withdraw(self) -> None:
        """The text is over."""
        self._texts.withdraw(self._key)

    def close(self) -> None:
        """The ranker is the common one's."""
