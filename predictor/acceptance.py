"""How often a draft is right, by position, learned from few and ageing tries."""

from __future__ import annotations

from collections.abc import Sequence

PRIOR_TRIES = 4.0
_FAST, _SLOW = 0.92, 0.99  # discounts of the recent past (about 12 tries) and of the long run (about 100)
_SLOW_TRIES = 4.0  # weight of the long run in today's estimate
_FURTHER_TRIES = 12.0  # weight of the position before, at further positions
_EXPECTED_TRIES = 14.0  # weight of an expectation for this very text, against tries in it: a few lucky ones mean little
_FRESH = 0.3  # what the recent past counts when another text begins
_FOREIGN = 0.1  # the same, where there is an expectation for the other text
_MOST = 0.98
_LAST_CHANCE = 0.01  # a token that is reached and right more rarely is the last one whose worth is worked out
_FALLEN, _FALLEN_TRIES = 0.5, 3.0


class _LongRun:
    """What all texts share of one (draft, level). Counts are lists [hits, tries] by position."""

    __slots__ = ("offered", "offers", "tried", "version")

    def __init__(self, positions: int) -> None:
        self.tried = [[0.0, 0.0] for _ in range(positions)]  # [accepted, tried]
        self.offers = [[1.0, 1.0] for _ in range(positions)]  # [offered, asked for]; a block is whole until seen cut
        self.offered = [1.0] * positions
        self.version = 0  # of `tried`: rates that were worked out before are out of date


def _count(positions: list[list[float]], tries: int, hits: int, keep: float) -> None:
    """Count a try at each of the first positions, the first of which were hits."""
    for place in range(tries):
        counts = positions[place]
        counts[0] = counts[0] * keep + (place < hits)
        counts[1] = counts[1] * keep + 1


class Acceptance:
    """Acceptance of one (draft, level) by position: Beta counts, discounted, recent ones shrunk to the long run's.

    The rate at position i is conditional on all before it being accepted; one that was rarely reached leans on the rate
    before it, scaled as the two relate in the long run: in a text that the draft does badly in, it does so everywhere.
    A draft that ends its block for want of confidence counts as wrong there (nothing was gained), and `offered` says
    how often it offers a token at all.

    With an expectation for the text at hand (`expect`), that takes the place of the long run at the first position;
    what is observed in the text outweighs it within some fifteen tries.
    """

    __slots__ = ("_common", "_expected", "_fast", "_foresaw", "_long", "_prior", "_rates", "_tokens", "_version")

    def __init__(self, prior: float, positions: int) -> None:
        self._prior = prior
        self._fast = [[0.0, 0.0] for _ in range(positions)]  # [accepted, tried]
        self._long = _LongRun(positions)
        self._expected: float | None = None
        self._foresaw = False  # whether there was an expectation for the text at hand
        self._rates: list[float] | None = None
        self._tokens: list[float] | None = None  # that these rates promise
        self._version = -1  # of the long run, in which the rates were worked out
        self._common: Acceptance | None = None

    def for_text(self) -> Acceptance:
        """The same draft in one of several texts at a time: with a recent past and an expectation of its own.

        The long run is one for all. The new text begins with the common recent past, which each of them adds to.
        """
        own = Acceptance(self._prior, len(self._fast))
        own._common, own._long = self, self._long
        own._fast = [list(counts) for counts in self._fast]
        return own

    def update(self, proposed: int, accepted: int) -> None:
        """Take in a block whose first `proposed` tokens were judged, of which the first `accepted` were right."""
        tries = min(proposed, accepted + 1, len(self._fast))
        if tries <= 0:
            return
        self._long.version += 1
        _count(self._fast, tries, accepted, _FAST)
        _count(self._long.tried, tries, accepted, _SLOW)
        if self._common is not None:
            _count(self._common._fast, tries, accepted, _FAST)

    def offer(self, asked: int, offered: int) -> None:
        """Take in that of `asked` tokens the draft offered the first `offered`."""
        long = self._long
        asked = min(asked, len(long.offers))
        _count(long.offers, asked, offered, _SLOW)
        for position in range(asked):
            hits, tries = long.offers[position]
            long.offered[position] = hits / tries

    def expect(self, rate: float | None) -> None:
        """What is expected of the first token in this text; None = nothing but the long run."""
        if rate != self._expected:
            self._expected, self._rates = rate, None
            for arm in (self, self._common):
                if arm is not None:
                    arm._foresaw = rate is not None

    def rates(self) -> list[float]:
        """The chance of each position, given that all before it were accepted."""
        rates = self._rates
        if rates is None or self._version != self._long.version:
            self._version = self._long.version
            self._rates = rates = self._worked_out()
            self._tokens = None
        return rates

    def _worked_out(self) -> list[float]:
        """The rates, one position after the other."""
        places = zip(self._fast, self._long.tried)
        (fast, tries), (slow, slow_tries) = next(places)
        usual = (slow + PRIOR_TRIES * self._prior) / (slow_tries + PRIOR_TRIES)
        lean, weight = usual, _SLOW_TRIES
        if self._expected is not None:
            lean, weight = self._expected, _EXPECTED_TRIES
        rate = (fast + weight * lean) / (tries + weight)
        rates = [rate]
        for (fast, tries), (slow, slow_tries) in places:
            before, usual = usual, (slow + PRIOR_TRIES * usual) / (slow_tries + PRIOR_TRIES)
            lean = rate * usual / before if before else 0.0
            if lean > _MOST:
                lean = _MOST
            rate = (fast + _FURTHER_TRIES * lean) / (tries + _FURTHER_TRIES)
            rates.append(rate)
        return rates

    def tokens(self) -> list[float]:
        """Expected tokens of a round with gamma 1, 2, ...: up to the first gamma whose last token is hopeless."""
        rates = self.rates()
        if self._tokens is None:
            reached = expected = 1.0
            self._tokens = tokens = []
            for rate in rates:
                reached *= rate
                expected += reached
                tokens.append(expected)
                if reached < _LAST_CHANCE:
                    break
        return self._tokens

    @property
    def seen(self) -> float:
        """First tokens that were judged in the long run, older ones counting for less."""
        return self._long.tried[0][1]

    def usual(self) -> float:
        """The first token's chance in the long run, whatever is expected of this text."""
        slow, tries = self._long.tried[0]
        return (slow + PRIOR_TRIES * self._prior) / (tries + PRIOR_TRIES)

    def history(self) -> tuple[list[tuple[float, float]], list[float]]:
        """What lasts: (accepted, tried) of the long run by position, and how often each is offered."""
        return [(hits, tries) for hits, tries in self._long.tried], list(self._long.offered)

    def recall(self, tried: Sequence[tuple[float, float]], offered: Sequence[float], most: float) -> None:
        """Begin with what an earlier run learned, as at most `most` tries of each position."""
        long = self._long
        long.version += 1
        for place, ((hits, tries), share) in enumerate(zip(tried, offered)):
            if place < len(long.tried) and tries > 0:
                weight = min(tries, most)
                long.tried[place] = [hits / tries * weight, weight]
                long.offers[place] = [share * weight, weight]
                long.offered[place] = share

    def offered(self) -> list[float]:
        """For each position, the share of blocks that reach it, of those that were asked to."""
        return self._long.offered

    @property
    def fallen(self) -> bool:
        """Whether the first token is right much more rarely of late than in the long run: the text has turned."""
        (fast, tries), (slow, slow_tries) = self._fast[0], self._long.tried[0]
        return tries >= _FALLEN_TRIES and fast / tries < _FALLEN * slow / slow_tries

    def age(self) -> None:
        """Another text begins: what was seen lately counts for less, an expectation for nothing."""
        keep = _FOREIGN if self._foresaw else _FRESH
        self._rates = self._expected = None
        self._foresaw = False
        for counts in self._fast:
            counts[0] *= keep
            counts[1] *= keep
