"""`edgespec`: our load planner. A length for each sequence, by what each further token adds to the batch's speed."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from predictor.costs import CostTable
from predictor.load.base import BatchOutcome, LoadView, Running, clipped, longest
from predictor.load.calibration import Bin, Calibration
from predictor.load.costs import BatchCosts
from predictor.load.counting import Counting, context_of
from predictor.load.marginal import Offer, Shares

HORIZON = 16  # rounds that share the price of what a draft has to read up
MARGIN = 0.01  # that speculating must promise above plain rows: chances are estimates, and the best of many flatters
GUARD = 0.03  # a plan predicted to be slower by more than that than the best one known is never tried
EXPLORED = 1 / 32  # of all batches at most that many try a neighbour
_SAVED = 2.0  # of what was not spent on trying, in batches
_SEEN = 8.0  # batches in a bin, from which on it is known well enough
_LEAST_CHANCE = 0.02  # a token that stands more rarely is offered to no batch
_BOLDER = 1.5  # a neighbour's price of a row, over or under the one that is right
_TOLD = 512  # sequences whose last length is remembered


class _Plan(NamedTuple):
    """Lengths that sequences choose (fixed ones not counted), and the kind of plan; what a token costs, corrected."""

    lengths: list[int]
    bin: Bin
    cost: float


class _Expected(NamedTuple):
    """What was foreseen of a batch, for the comparison with what it showed."""

    view: LoadView
    bin: Bin
    tokens: float
    seconds: float


class EdgeLoad(Counting):
    """A length for each sequence, such that all texts take the fewest seconds a token; from measured costs and each
    text's own chances.

    A further token has a chance to stand (the product of its text's rates up to it) and takes a step of its draft and a
    row of the target's forward, whose price rises with the rows. `Shares` says what to make small, and why that is not
    the batch's tokens a second; what runs alone gets what `AutoPlanner` would give it. Where a sequence drafted nothing
    in its last round, and its draft has to read, guessing carries that price, spread over the rounds that are likely to
    share it (re-entry); a sequence that drafts already pays nothing of the kind. What a prompt's rows take has to be
    taken anyway and is left out.

    On top, as practice on such devices advises (methods.md §1.10): it starts warm from measured seconds; what batches
    made is held against what was expected of them, by sequences and tokens drafted (`Calibration`); a plan with a
    little more or a little less, within 3% of the best one and of a kind that was rarely seen, is tried in one batch of
    32 at most. No other exploration is needed: chances come from shadows where nothing runs. Nothing is drawn at
    random.
    """

    def __init__(self, costs: BatchCosts, drafts: CostTable, gamma_max: int) -> None:
        super().__init__(costs, drafts)
        self.name = f"edgespec:{gamma_max}"
        self.gamma_max = gamma_max
        self._calibration = Calibration()
        self._last: dict[int, int] = {}  # tokens that a sequence drafted in its last round
        self._prices: dict[int, float] = {}  # of a row, in the last batch with so many sequences
        self._allowance = 0.0
        self._expected: _Expected | None = None
        self.explored = 0

    def lengths(self, view: LoadView) -> Sequence[int]:
        lengths = clipped(view, 0)
        self._expected, self.floor = None, 0.0
        if not lengths:
            return lengths
        self._allowance = min(self._allowance + EXPLORED, _SAVED)
        n, fixed = len(lengths), sum(lengths)
        offers = [self._offer(s, length) for s, length in zip(view.running, lengths)]
        most = sum(len(offer.rows) - 1 for offer in offers)
        curve = self.costs.curve(n, view.prefill_rows + fixed, most + 1, context_of(view))
        prompts = curve[0] - self.forward(view._replace(prefill_rows=0), fixed) if view.prefill_rows else 0.0
        shares = Shares(offers, n * self.costs.overhead - prompts, curve)
        best = shares.best(self._prices.get(n, 0.0))
        self._prices[n] = price = shares.row_price(best)
        plan = self._pick(shares, best, price, fixed)
        expected = shares.tokens(plan.lengths), shares.seconds(plan.lengths) + prompts
        self._expected = _Expected(view, plan.bin, *expected)
        self.floor = self._floor(view, plan.lengths, price, plan.cost / n)
        return [length + own for length, own in zip(lengths, plan.lengths)]

    def _offer(self, s: Running, fixed: int) -> Offer:
        """What a sequence may choose from; one whose length is fixed has one choice, its rows counted elsewhere."""
        step = 0.0 if s.draft is None else self.costs.drafting * self.drafts.draft(s.draft)
        if s.fixed is not None:
            return Offer([1.0 + sum(itertools.accumulate(s.rates[:fixed], operator.mul))], [fixed * step], [0.0])
        most = min(longest(s), self.gamma_max)
        made = chance = before = 1.0
        spent = rows = 0.0
        if most and s.behind and not self._last.get(s.key):
            spent = self.costs.drafting * self.reading(s) / max(min(HORIZON, s.limit / 2), 1.0)
        tokens, seconds, further = [1.0], [0.0], [0.0]
        for rate, offered in zip(s.rates[:most], s.offered):
            chance *= rate
            if not chance > _LEAST_CHANCE:
                break
            made += chance
            spent += before * step  # a token is made before its draft thinks better of it
            rows += offered
            before = offered
            tokens.append(made)
            seconds.append(spent)
            further.append(rows)
        return Offer(tokens, seconds, further)

    def _pick(self, shares: Shares, best: list[int], price: float, fixed: int) -> _Plan:
        """The best plan as corrected by experience, plain rows in doubt; now and then a neighbour of it."""
        none, plan = (self._plan(shares, lengths, fixed) for lengths in ([0] * len(best), best))
        others: list[_Plan] = []
        if self._allowance >= 1 or plan.cost > shares.cost(best) * (1 + GUARD):
            prices = price / _BOLDER, price * _BOLDER
            others = [self._plan(shares, shares.at_price(other), fixed) for other in prices]
        plan = min(plan, *others, key=lambda other: other.cost) if others else plan
        if not plan.cost < none.cost * (1 - MARGIN):
            plan = none
        if self._allowance >= 1:
            for other in others:
                rare = other.bin != plan.bin and self._calibration.weight(other.bin) < _SEEN
                if rare and other.cost <= plan.cost * (1 + GUARD):
                    self._allowance -= 1
                    self.explored += 1
                    return other
        return plan

    def _plan(self, shares: Shares, lengths: list[int], fixed: int) -> _Plan:
        bin = self._calibration.bin(len(lengths), sum(lengths) + fixed)
        return _Plan(lengths, bin, shares.cost(lengths) / self._calibration.factor(bin))

    def _floor(self, view: LoadView, lengths: Sequence[int], price: float, token: float) -> float:
        """The tokens that the seconds of one more token would bring, at the mean price of a token."""
        steps = [self.drafts.draft(str(s.draft)) for s, length in zip(view.running, lengths) if length]
        return min((self.costs.drafting * min(steps) + price) / token, 1.0) if steps and token > 0 else 0.0

    def observe(self, outcome: BatchOutcome) -> None:
        super().observe(outcome)
        for sequence, length in zip(outcome.view.running, outcome.lengths):
            self._last[sequence.key] = length
        while len(self._last) > _TOLD:
            del self._last[next(iter(self._last))]
        expected, self._expected = self._expected, None
        if expected is not None and expected.view is outcome.view:
            emitted = float(sum(outcome.emitted))
            self._calibration.observe(expected.bin, emitted, expected.tokens, outcome.seconds, expected.seconds)
