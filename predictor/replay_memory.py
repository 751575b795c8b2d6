"""The working set of a replay: slots, one load at a time in the background, and what drafts have read of a text."""

from __future__ import annotations

from collections.abc import Sequence

from predictor.catch_up import FREELY
from predictor.costs import CostTable
from predictor.planner import Candidate

Loads = list[tuple[str, float]]  # drafts that arrived, with the seconds of their loads


class Memory:
    """K slots and a loader, as `edgespec.memory.working_set` has them, in simulated time.

    The victim of a load goes when the load begins (its slot is what is loaded into). A load that was started and is no
    longer wanted is called off. hidden_seconds: of completed loads, without what was waited for.
    """

    def __init__(
        self, costs: CostTable, capacity: int, resident: Sequence[str] = (), failing: frozenset[str] = frozenset()
    ) -> None:
        self._costs = costs
        self._capacity = capacity
        self._resident = set(resident[:capacity])
        self._visible: frozenset[str] | None = None  # until somebody asks
        self._failing = failing
        self._wanted: tuple[str, ...] = ()
        self._left = self._took = 0.0
        self._in_use: str | None = None
        self.loading: str | None = None
        self.failed: frozenset[str] = frozenset()
        self.loads = self.cancelled = 0
        self.hidden_seconds = 0.0

    def acquire(self) -> frozenset[str]:
        """The drafts that can run now: the same object as long as they are the same."""
        if self._visible is None:
            self._visible = frozenset(self._resident)
        return self._visible

    def retarget(self, wanted: Sequence[str], in_use: str | None) -> None:
        """The first `capacity` of these are wanted, best first."""
        self._wanted, self._in_use = tuple(wanted), in_use
        if self.loading is not None and self.loading not in self._first():
            self.cancelled += 1
            self.loading = None
        self._start()

    def _first(self) -> tuple[str, ...]:
        return tuple(name for name in self._wanted if name not in self.failed)[: self._capacity]

    def _start(self) -> None:
        """Begin the next load, if one is wanted and has room."""
        if self.loading is not None:
            return
        first = self._first()
        draft = next((name for name in first if name not in self._resident), None)
        if draft is None:
            return
        if len(self._resident) >= self._capacity:
            order = {name: place for place, name in enumerate(self._wanted)}
            victims = [name for name in self._resident if name not in first]
            if not victims:
                return
            last = len(order)
            self._visible = None
            self._resident.discard(max(victims, key=lambda n: (order.get(n, last), n != self._in_use, n)))
        self.loading = draft
        self._left = self._took = self._costs.load(draft)

    def arrival(self, name: str) -> float:
        """Seconds until a draft is here if it is wanted first from now on; 0 = it is."""
        if name in self._resident:
            return 0.0
        return self._left if name == self.loading else self._costs.load(name)

    def busy(self) -> float:
        """Seconds for which loads go on, as things are wanted now."""
        if self.loading is None:
            return 0.0
        coming = [name for name in self._first() if name not in self._resident and name != self.loading]
        return self._left + sum(self._costs.load(name) for name in coming)

    def advance(self, seconds: float) -> Loads:
        """Let time pass; returns the loads that were completed."""
        done: Loads = []
        while self.loading is not None and self._left <= seconds:
            seconds -= self._left
            draft, self.loading = self.loading, None
            if draft in self._failing:
                self.failed |= {draft}
            else:
                self._resident.add(draft)
                self._visible = None
                self.loads += 1
                self.hidden_seconds += self._took
                done.append((draft, self._took))
            self._start()
        if self.loading is not None:
            self._left -= seconds
        return done

    def wait_for(self, name: str) -> tuple[float, Loads]:
        """Let time pass until the draft is there (or cannot come); the seconds, and what was completed in them."""
        waited = 0.0
        done: Loads = []
        while name not in self._resident and self.loading is not None:
            left = self._left
            arrived = self.advance(left)
            self.hidden_seconds -= left if arrived else 0.0
            waited += left
            done += arrived
        return waited, done


class Ledger:
    """How far every draft has read the conversation. Who reads in a round is said by `predictor.catch_up.CatchUp`.

    A draft that ran in the round before lags a few tokens, which it reads on the way: that is no lag here.
    """

    USUAL = FREELY // 2

    def __init__(self, window: int) -> None:
        self._window = window
        self._read: dict[str, int] = {}
        self._proposed: dict[str, int] = {}
        self._candidates: dict[tuple[str, int], Candidate] = {}

    def behind(self, name: str, known: int) -> int:
        """Tokens that it has to read first, of `known` ones, beyond the few of an ordinary round."""
        lag = known - self._read.get(name, 0)
        return 0 if lag <= self.USUAL else min(lag, self._window)

    def candidate(self, name: str, known: int) -> Candidate:
        """A draft with weights as a planner sees it."""
        key = name, self.behind(name, known)
        found = self._candidates.get(key)
        if found is None:
            found = self._candidates[key] = Candidate(name, 1, behind=key[1])
        return found

    def reads(self, name: str, known: int, limit: int) -> int:
        """It reads at most `limit` tokens now; returns how many there were to read."""
        behind = self.behind(name, known)
        tokens = min(limit, behind)
        self._read[name] = known - (behind - tokens)
        return tokens

    def proposes(self, name: str, known: int) -> tuple[int, int]:
        """It proposes now, and so reads all: (tokens since it proposed last, those of them it had still to read)."""
        since = known - self._proposed.get(name, 0)
        behind = self.behind(name, known)
        self._read[name] = self._proposed[name] = known
        return since, behind
