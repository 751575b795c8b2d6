"""What every load planner does: foresee what a batch takes, and keep the measured seconds current."""

from __future__ import annotations

from collections.abc import Sequence

from predictor.costs import CostTable
from predictor.load.base import BatchOutcome, LoadView, Running
from predictor.load.costs import BatchCosts


class Counting:
    """The base of load planners. costs: of batches, drafts: of drafts; both are shared with whoever else measures."""

    name = "counting"
    floor = 0.0
    plain = False

    def __init__(self, costs: BatchCosts, drafts: CostTable) -> None:
        self.costs = costs
        self.drafts = drafts

    def steps(self, sequences: Sequence[Running], lengths: Sequence[int]) -> float:
        """Seconds of the drafts' steps, one after the other."""
        step = self.drafts.draft
        return sum(length * step(s.draft) for s, length in zip(sequences, lengths) if length and s.draft is not None)

    def reading(self, sequence: Running) -> float:
        """Seconds in which its draft reads what it missed."""
        return 0.0 if sequence.draft is None else self.drafts.catch_up(sequence.draft, sequence.behind)

    def forward(self, view: LoadView, further: int) -> float:
        """Seconds of the target's forward with so many drafted tokens."""
        n = len(view.running)
        return self.costs.curve(n, view.prefill_rows + further, 0, context_of(view))[0]

    def observe(self, outcome: BatchOutcome) -> None:
        """Take in what the batch took. Subclasses add what they learn."""
        running, costs = outcome.view.running, self.costs
        costs.observe(len(running), outcome.rows, context_of(outcome.view), outcome.target_seconds)
        costs.observe_drafting(outcome.draft_work, outcome.draft_seconds)
        # One table is for all planners, and drafts are not even looked at for one that never asks any.
        if not self.plain or not costs.overhead:
            costs.observe_overhead(len(running), outcome.seconds - outcome.draft_seconds - outcome.target_seconds)


def context_of(view: LoadView) -> int:
    """Positions of all its sequences."""
    return sum(s.context for s in view.running)


def speed_of(outcome: BatchOutcome) -> float:
    """Tokens a second of a batch; 0 if that is no number."""
    emitted = sum(outcome.emitted)
    return emitted / outcome.seconds if outcome.seconds > 0 and emitted > 0 else 0.0
