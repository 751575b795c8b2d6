"""The lengths with which every text takes the fewest seconds a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ROUNDS = 4  # of finding the price of a row
_MOVES = 4  # a sequence, at most, of the search around it


class Offer(NamedTuple):
    """What one sequence may draft; place j is for j tokens, place 0 for none.

    tokens[j]: it then makes, as expected, the target's own included. seconds[j]: of drafting. rows[j]: that the
    target's forward then has for it beyond the first (blocks may end early: parts of rows).
    """

    tokens: Sequence[float]
    seconds: Sequence[float]
    rows: Sequence[float]


class Shares:
    """A batch whose seconds are shared out: what all need (`common`) in equal parts, drafting to whoever drafts, and
    what further rows take by rows.

    A text's price of a token is its share of a batch's seconds over its tokens of a batch, and `cost` the sum of all
    prices. That, not the batch's tokens a second, is what to make small: tokens a second favour texts that are easy to
    guess, but the others have to be written, too, and occupy a place the longer. Where a row always takes the same,
    each text's best length does not depend on the others', and if all do their best, a set of texts is written in the
    fewest seconds: a place costs common / n a batch whoever has it. For one text, and for texts that are alike, it is
    the same as most tokens a second.

    curve[m]: seconds of the forward with m further rows, for as many as all offers have and one more.
    """

    def __init__(self, offers: Sequence[Offer], common: float, curve: Sequence[float]) -> None:
        self.offers = offers
        self._curve = curve
        self._common = common + curve[0]
        self._part = self._common / max(len(offers), 1)

    def tokens(self, lengths: Sequence[int]) -> float:
        """Of a batch, as expected."""
        return sum(offer.tokens[length] for offer, length in zip(self.offers, lengths))

    def seconds(self, lengths: Sequence[int]) -> float:
        """Of the batch, as expected."""
        drafting = sum(offer.seconds[length] for offer, length in zip(self.offers, lengths))
        return self._common + drafting + self._widened(self._rows(lengths))

    def cost(self, lengths: Sequence[int]) -> float:
        """The sum of the texts' seconds a token."""
        return self._cost(*self._sums(lengths))

    def _sums(self, lengths: Sequence[int]) -> tuple[float, float, float]:
        """Further rows; all texts' seconds a token without what these take; rows a token."""
        rows = own = wide = 0.0
        for offer, length in zip(self.offers, lengths):
            made = offer.tokens[length]
            rows += offer.rows[length]
            own += (self._part + offer.seconds[length]) / made
            wide += offer.rows[length] / made
        return rows, own, wide

    def _cost(self, rows: float, own: float, wide: float) -> float:
        return own + wide * self._widened(rows) / rows if rows > 0 else own

    def _rows(self, lengths: Sequence[int]) -> float:
        return sum(offer.rows[length] for offer, length in zip(self.offers, lengths))

    def _widened(self, rows: float) -> float:
        """Seconds of that many further rows."""
        whole = min(int(rows), len(self._curve) - 2)
        low = self._curve[whole]
        return low + (rows - whole) * (self._curve[whole + 1] - low) - self._curve[0]

    def at_price(self, row: float) -> list[int]:
        """Each text's best length, if a row takes that many seconds."""
        return [_cheapest(offer, self._part, row) for offer in self.offers]

    def row_price(self, lengths: Sequence[int]) -> float:
        """Seconds of one more row, or of the last one where that is more (a place's worth on both sides)."""
        rows = self._rows(lengths)
        most = float(len(self._curve) - 2)
        above, below = min(rows + 1, most), max(rows - 1, 0.0)
        return (self._widened(above) - self._widened(below)) / max(above - below, 1e-9)

    def best(self, price: float = 0.0) -> list[int]:
        """The lengths of least cost. price: of a row, as it came out last time; 0 = not known.

        The price that belongs to the lengths it leads to, by iteration, then single steps while they help. (The best
        of all, but for rare curves where several sequences would have to move at once; those differ by little.)
        """
        lengths = self.at_price(price or self.row_price([0] * len(self.offers)))
        for _ in range(_ROUNDS):
            fresh = self.at_price(self.row_price(lengths))
            if fresh == lengths:
                break
            lengths = fresh
        return self._improved(lengths)

    def _improved(self, lengths: list[int]) -> list[int]:
        """One token more or less, or none, for one sequence, again and again, as long as that helps."""
        sums = self._sums(lengths)
        cost, none = self._cost(*sums), self.cost([0] * len(lengths))
        for _ in range(_MOVES * len(lengths)):
            move, fresh = None, sums
            for i, (offer, length) in enumerate(zip(self.offers, lengths)):
                for other in {length - 1, length + 1, 0}:
                    if 0 <= other < len(offer.tokens):
                        trial = self._moved(sums, offer, length, other)
                        other_cost = self._cost(*trial)
                        if other_cost < cost * (1 - 1e-9):
                            move, fresh, cost = (i, other), trial, other_cost
            if move is None:
                break
            lengths[move[0]], sums = move[1], fresh
        return lengths if cost <= none else [0] * len(lengths)

    def _moved(self, sums: tuple[float, float, float], offer: Offer, old: int, new: int) -> tuple[float, float, float]:
        """The sums after one sequence's length has changed."""
        rows, own, wide = sums
        before, after = offer.tokens[old], offer.tokens[new]
        own += (self._part + offer.seconds[new]) / after - (self._part + offer.seconds[old]) / before
        wide += offer.rows[new] / after - offer.rows[old] / before
        return rows + offer.rows[new] - offer.rows[old], own, wide


def _cheapest(offer: Offer, part: float, row: float) -> int:
    best, least = 0, float("inf")
    for length, (made, seconds, rows) in enumerate(zip(*offer)):
        cost = (part + seconds + row * rows) / made
        if cost < least:
            best, least = length, cost
    return best
