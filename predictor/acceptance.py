"""How often a draft is right, by position, learned from few and ageing tries."""

from __future__ import annotations

PRIOR_TRIES = 4.0
_FAST, _SLOW = 0.85, 0.99  # discounts of the recent past (about 7 tries) and of the long run (about 100)
_SLOW_TRIES = 2.0  # weight of the long run in today's estimate
_FRESH = 0.3  # what the recent past counts when another text begins
_FALLEN, _FALLEN_TRIES = 0.5, 3.0


class Acceptance:
    """Acceptance of one (draft, level) by position: Beta counts, discounted, recent ones shrunk to the long run's.

    The rate at position i is conditional on all before it being accepted; one that was rarely reached leans on the rate
    before it, so that a geometric guess stands in where nothing was measured yet. A draft that ends its block for want
    of confidence counts as wrong there (nothing was gained), and `offered` says how often it offers a token at all.
    """

    __slots__ = ("_fast", "_offered", "_offers", "_prior", "_rates", "_slow")

    def __init__(self, prior: float, positions: int) -> None:
        self._prior = prior
        self._fast = [[0.0, 0.0] for _ in range(positions)]  # [accepted, tried]
        self._slow = [[0.0, 0.0] for _ in range(positions)]
        self._offers = [[1.0, 1.0] for _ in range(positions)]  # [offered, asked for]; a block is whole until seen cut
        self._offered = [1.0] * positions
        self._rates: list[float] | None = None

    def update(self, proposed: int, accepted: int) -> None:
        """Take in a block whose first `proposed` tokens were judged, of which the first `accepted` were right."""
        self._rates = None
        for position in range(min(proposed, accepted + 1, len(self._fast))):
            hit = position < accepted
            for counts, keep in ((self._fast[position], _FAST), (self._slow[position], _SLOW)):
                counts[0] = counts[0] * keep + hit
                counts[1] = counts[1] * keep + 1

    def offer(self, asked: int, offered: int) -> None:
        """Take in that of `asked` tokens the draft offered the first `offered`."""
        for position in range(min(asked, len(self._offers))):
            counts = self._offers[position]
            counts[0] = counts[0] * _SLOW + (position < offered)
            counts[1] = counts[1] * _SLOW + 1
            self._offered[position] = counts[0] / counts[1]

    def rates(self) -> list[float]:
        """The chance of each position, given that all before it were accepted."""
        if self._rates is None:
            self._rates, before = [], self._prior
            for (fast, fast_tries), (slow, slow_tries) in zip(self._fast, self._slow, strict=True):
                long_run = (slow + PRIOR_TRIES * before) / (slow_tries + PRIOR_TRIES)
                before = (fast + _SLOW_TRIES * long_run) / (fast_tries + _SLOW_TRIES)
                self._rates.append(before)
        return self._rates

    def offered(self) -> list[float]:
        """For each position, the share of blocks that reach it, of those that were asked to."""
        return self._offered

    @property
    def fallen(self) -> bool:
        """Whether the first token is right much more rarely of late than in the long run: the text has turned."""
        (fast, tries), (slow, slow_tries) = self._fast[0], self._slow[0]
        return tries >= _FALLEN_TRIES and fast / tries < _FALLEN * slow / slow_tries

    def age(self) -> None:
        """Another text begins: what was seen lately counts for less."""
        self._rates = None
        for counts in self._fast:
            counts[0] *= _FRESH
            counts[1] *= _FRESH
