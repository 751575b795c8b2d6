"""The working set while several texts are made: each has a view of the policy, and what they wish for is combined."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.memory.working_set import State
from edgespec.steering import Scheduler, Steering
from predictor.load import Wish, combine
from predictor.policies import Policy


class Texts:
    """The texts that are made at once on one working set. Belongs to the serving thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._wishes: dict[int, Wish] = {}
        self._last: tuple[tuple[tuple[str, ...], ...], int, tuple[str, ...], Wish] | None = None

    def steering(self, policy: Policy, limit: int) -> tuple[Steering, Voter]:
        """For a text of at most `limit` new tokens, with the policy's view of it; its vote is to be withdrawn in the
        end."""
        ticket = self.scheduler.ticket()
        voter = Voter(self, policy, ticket)
        return Steering(voter, ticket, limit), voter

    def wish(self, key: int, wish: Wish | None) -> Wish:
        """What all want together, now that one wants this (None: nothing any more)."""
        if wish is None:
            self._wishes.pop(key, None)
        else:
            self._wishes[key] = wish
        working_set = self.scheduler.working_set
        resident = tuple(name for name, state in working_set.states().items() if state.state is State.RESIDENT)
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

    def retarget(self, wanted: Sequence[str], reason: str, *, in_use: str | None = None) -> bool:
        """Give this text's vote, and pass on what all want together."""
        together = self._texts.wish(self._key, Wish(wanted, reason))
        return self._texts.scheduler.retarget(together.wanted, together.reason, in_use=in_use)

    def withdraw(self) -> None:
        """The text is over."""
        self._texts.wish(self._key, None)

    def close(self) -> None:
        """The ranker is the common one's."""
