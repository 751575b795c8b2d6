"""Load planners that do not try things out: none, fixed, goodput and tetris."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from predictor.costs import CostTable
from predictor.load.base import BatchOutcome, LoadView, clipped, free_to_choose, longest
from predictor.load.costs import BatchCosts
from predictor.load.counting import Counting, context_of


class FixedLoad(Counting):
    """`none` and `fixed:G`: the same gamma whatever runs."""

    def __init__(self, costs: BatchCosts, drafts: CostTable, gamma: int) -> None:
        super().__init__(costs, drafts)
        self.name = f"fixed:{gamma}" if gamma else "none"
        self.plain = gamma == 0
        self._gamma = gamma

    def lengths(self, view: LoadView) -> Sequence[int]:
        return clipped(view, self._gamma)


class GoodputLoad(Counting):
    """`goodput:G`: SmartSpec, also called TurboSpec and DSD (arXiv 2406.14066; methods.md §1.6, §3).

    One k for the batch: the argmax over 0..G of expected tokens / T(k), with (1 - a^(k+1)) / (1 - a) tokens a sequence
    and T(k) = k draft steps + one forward of k + 1 tokens each; a = the mean of the last ten batches' acceptance, 0.7
    before there is one. Their two linear models of time are what is measured here (`BatchCosts`, `CostTable`).
    """

    _LAST = 10
    _FIRST = 0.7

    def __init__(self, costs: BatchCosts, drafts: CostTable, gamma_max: int) -> None:
        super().__init__(costs, drafts)
        self.name = f"goodput:{gamma_max}"
        self._gamma_max = gamma_max
        self._rates: deque[float] = deque(maxlen=self._LAST)

    def lengths(self, view: LoadView) -> Sequence[int]:
        best, best_speed = clipped(view, 0), 0.0
        rate = sum(self._rates) / len(self._rates) if self._rates else self._FIRST
        curve = self.costs.curve(
            len(view.running), view.prefill_rows, self._gamma_max * len(view.running), context_of(view)
        )
        for gamma in range(self._gamma_max + 1):
            lengths = clipped(view, gamma)
            tokens = sum(_emitted(rate, length) for length in lengths)
            drafting = self.costs.drafting * self.steps(view.running, lengths)
            speed = tokens / (curve[min(sum(lengths), len(curve) - 1)] + drafting)
            if speed > best_speed:
                best, best_speed = lengths, speed
        return best

    def observe(self, outcome: BatchOutcome) -> None:
        super().observe(outcome)
        drafted = sum(outcome.lengths)
        if drafted > 0:
            self._rates.append(min(max(sum(outcome.accepted) / drafted, 0.0), 1.0))


def _emitted(rate: float, length: int) -> float:
    """Expected tokens of a block of `length` guesses, the target's own included (Leviathan et al. 2023)."""
    return length + 1.0 if rate >= 1 else float((1 - rate ** (length + 1)) / (1 - rate))


class TetrisLoad(Counting):
    """`tetris:C`: TETRIS' choice of what to verify (arXiv 2502.15197; methods.md §3), with C rows a forward.

    Greedy over a heap: again and again the token with the greatest chance to stand (the product of its sequence's
    chances up to it) until the rows are used up. The paper takes the chances from what the drafts have already
    proposed; here they are what is expected by place, so that nothing is drafted that will not be verified.
    """

    def __init__(self, costs: BatchCosts, drafts: CostTable, rows: int) -> None:
        super().__init__(costs, drafts)
        self.name = f"tetris:{rows}"
        self._rows = rows

    def lengths(self, view: LoadView) -> Sequence[int]:
        lengths = clipped(view, 0)
        left = self._rows - len(lengths) - sum(lengths)
        free = [i for i in free_to_choose(view) if view.running[i].rates[0] > 0]
        heap = [(-view.running[i].rates[0], i) for i in free]
        heapq.heapify(heap)
        while heap and left > 0:
            chance, i = heap[0]
            lengths[i] += 1
            left -= 1
            sequence = view.running[i]
            if lengths[i] < longest(sequence) and sequence.rates[lengths[i]] > 0:
                heapq.heapreplace(heap, (chance * sequence.rates[lengths[i]], i))
            else:
                heapq.heappop(heap)
        return lengths
