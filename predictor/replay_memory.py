"""The working set of a replay: slots, one load at a time in the background, and what drafts have read of a text."""

from __future__ import annotations

from collections.abc import Sequence

from predictor.costs import CostTable


class Memory:
    """K slots and a loader, as `edgespec.memory.working_set` has them, in simulated time.

    The victim of a load goes when the load begins (its slot is what is loaded into). A load that was started and is no
    longer wanted is called off.
    """

    def __init__(
        self, costs: CostTable, capacity: int, resident: Sequence[str] = (), failing: frozenset[str] = frozenset()
    ) -> None:
        self._costs = costs
        self._capacity = capacity
        self._resident = set(resident[:capacity])
        self._visible = frozenset(self._resident)
        self._failing = failing
        self._wanted: tuple[str, ...] = ()
        self._left = self._took = 0.0
        self._in_use: str | None = None
        self.loading: str | None = None
        self.failed: frozenset[str] = frozenset()
        self.loads = self.cancelled = 0
        self.load_seconds = 0.0

    def acquire(self) -> frozenset[str]:
        """The drafts that can run now; what finished loading becomes visible here."""
        if len(self._visible) != len(self._resident) or self._visible != self._resident:
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
            self._resident.discard(max(victims, key=lambda n: (order.get(n, last), n != self._in_use, n)))
        self.loading = draft
        self._left = self._took = self._costs.load(draft)

    def advance(self, seconds: float) -> list[tuple[str, float]]:
        """Let time pass; returns the loads that were completed, with their seconds."""
        done: list[tuple[str, float]] = []
        while self.loading is not None and self._left <= seconds:
            seconds -= self._left
            draft, self.loading = self.loading, None
            if draft in self._failing:
                self.failed |= {draft}
            else:
                self._resident.add(draft)
                self.loads += 1
                self.load_seconds += self._took
                done.append((draft, self._took))
            self._start()
        if self.loading is not None:
            self._left -= seconds
        return done

    def wait_for(self, name: str) -> float:
        """Let time pass until the draft is there (or cannot come); returns the seconds."""
        waited = 0.0
        while name not in self._resident and self.loading is not None:
            waited += self._left
            self.advance(self._left)
        return waited


class Reading:
    """How far every draft has read the conversation; one that lags reads in pieces (`edgespec.decoding.catch_up`)."""

    FREELY = 16  # tokens that a draft may lag behind and still run
    PIECE = 64
    _SHARE = 0.03
    _SAVED_ROUNDS = 16

    def __init__(self, costs: CostTable, prompt_length: int, window: int) -> None:
        self._costs = costs
        self._window = window
        self._read: dict[str, int] = {}
        self._purse = 0.0
        self._begun = False
        self._turn: dict[str, int] = {}
        self._turns = 0

    def earn(self, seconds: float) -> None:
        """A round is over."""
        self._begun = True
        self._purse = min(self._purse + self._SHARE * seconds, self._SAVED_ROUNDS * self._SHARE * seconds)

    def behind(self, name: str, known: int) -> int:
        """Tokens it has to read before it could propose, beyond the few of an ordinary round."""
        lag = min(known - self._read.get(name, 0), self._window)
        return lag if lag > self.FREELY // 2 else 0

    def lagging(self, names: Sequence[str], known: int) -> list[tuple[str, int]]:
        """`behind` of several drafts."""
        read, window, usual = self._read, self._window, self.FREELY // 2
        found = []
        for name in names:
            lag = known - read.get(name, 0)
            found.append((name, 0 if lag <= usual else min(lag, window)))
        return found

    def read(self, name: str, known: int) -> int:
        """It proposes now, and so reads everything; returns how much that was."""
        unread = min(known - self._read.get(name, 0), self._window)
        self._read[name] = known
        return unread

    def catch_up(
        self, lagging: Sequence[tuple[str, int]], preferred: str | None, known: int, informed: bool = False
    ) -> float:
        """Seconds in which one of the drafts that lag too far reads a piece, the preferred one first.

        informed: see `Policy.informed`; then only that one reads, unless it is away.
        """
        far = {name: behind for name, behind in lagging if behind > self.FREELY}
        if not far:
            return 0.0
        if preferred in far:
            name = str(preferred)
            piece = min(self.PIECE, far[name]) if self._begun else far[name]
        elif informed and any(name == preferred for name, _ in lagging):
            return 0.0
        else:
            name = min(far, key=lambda other: self._turn.get(other, -1))
            piece = min(self.PIECE, far[name])
            price = self._costs.catch_up(name, piece)
            if self._purse < price:
                return 0.0
            self._purse -= price
            self._turns += 1
            self._turn[name] = self._turns
        self._read[name] = known - (far[name] - piece)
        return self._costs.catch_up(name, piece)
