"""Load planners that learn by trying, one gamma for the whole batch: Nightjar's and BanditSpec's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictor.bandits import AdaBinGreedy, UcbSpec
from predictor.costs import CostTable
from predictor.load.base import BatchOutcome, LoadView, clipped, free_to_choose
from predictor.load.costs import BatchCosts
from predictor.load.counting import Counting, speed_of

_MEMORY = 0.7  # of what switching on took before


class SwitchCosts:
    """C_switch(max lag, batch): the seconds in which drafts read what they missed (methods.md §1.3).

    By powers of two of the greatest lag, and by the number of sequences. Until one was measured it is what the drafts'
    own seconds for a token say.
    """

    def __init__(self) -> None:
        self._measured: dict[tuple[int, int], float] = {}

    def seconds(self, view: LoadView, reading: float) -> float:
        """reading: what the drafts' seconds say."""
        return self._measured.get(self._key(view), reading)

    def observe(self, view: LoadView, seconds: float) -> None:
        """Take in what reading took in a batch that switched on."""
        key = self._key(view)
        before = self._measured.get(key, seconds)
        self._measured[key] = _MEMORY * before + (1 - _MEMORY) * seconds

    @staticmethod
    def _key(view: LoadView) -> tuple[int, int]:
        lag = max((s.behind for s in view.running), default=0)
        return lag.bit_length(), len(view.running)


class NightjarLoad(Counting):
    """`nightjar:G`: Nightjar's planner (arXiv 2512.22420; methods.md §1.2 to 1.4), from the paper, not from its code.

    One gamma of 0..G (3, as in its scripts) for the batch by ADA-BINGREEDY, a timeline for each number of sequences.
    Loss of a batch: seconds a token, 1/goodput. After a batch of gamma 0, exploitation adds C_switch / gamma to every
    gamma > 0; the means hold the losses without it, so what drafts read when they are switched on is left out of them.
    Batches with a prompt's rows say nothing about gamma and are left out, too: the paper's engine never mixes the two.
    """

    def __init__(self, costs: BatchCosts, drafts: CostTable, gamma_max: int, rng: np.random.Generator) -> None:
        super().__init__(costs, drafts)
        self.name = f"nightjar:{gamma_max}"
        self._bandit = AdaBinGreedy(gamma_max, rng)
        self._switch = SwitchCosts()
        self._chosen: int | None = None

    def lengths(self, view: LoadView) -> Sequence[int]:
        self._chosen = None
        if not free_to_choose(view):
            return clipped(view, 0)
        reading = self.costs.drafting * sum(self.reading(s) for s in view.running if s.behind)
        switch = self._switch.seconds(view, reading)
        self._chosen = self._bandit.choose(str(len(view.running)), switch)
        return clipped(view, self._chosen)

    def observe(self, outcome: BatchOutcome) -> None:
        view, gamma = outcome.view, self._chosen
        self._chosen = None
        steps = self.costs.drafting * self.steps(view.running, outcome.lengths)
        super().observe(outcome)
        caught_up = any(length and s.behind for s, length in zip(view.running, outcome.lengths))
        extra = max(outcome.draft_seconds - steps, 0.0) if caught_up else 0.0
        if caught_up:
            self._switch.observe(view, extra)
        if gamma is None or view.prefill_rows or (gamma and not any(outcome.lengths)):
            return
        emitted, seconds = sum(outcome.emitted), outcome.seconds - extra
        if emitted > 0 and seconds > 0:
            self._bandit.update(gamma, seconds / emitted, str(len(view.running)))


class BanditSpecLoad(Counting):
    """`banditspec:G`: UCBSpec of BanditSpec (arXiv 2505.15141; methods.md §3) over gamma 0..G (4) for the batch.

    Each batch is a pull of one arm, no context. Reward: tokens a second, as in its released code, over the most that
    was seen, since the confidence radius is made for rewards in [0, 1].
    """

    def __init__(self, costs: BatchCosts, drafts: CostTable, gamma_max: int) -> None:
        super().__init__(costs, drafts)
        self.name = f"banditspec:{gamma_max}"
        self._bandit = UcbSpec(gamma_max + 1)
        self._most = 0.0
        self._chosen: int | None = None

    def lengths(self, view: LoadView) -> Sequence[int]:
        self._chosen = self._bandit.choose() if free_to_choose(view) else None
        return clipped(view, self._chosen or 0)

    def observe(self, outcome: BatchOutcome) -> None:
        super().observe(outcome)
        gamma, speed = self._chosen, speed_of(outcome)
        self._chosen = None
        if gamma is None or (gamma and not any(outcome.lengths)) or not speed > 0:
            return
        if speed > self._most:  # rewards so far were shares of less
            self._bandit.sums = [total * self._most / speed for total in self._bandit.sums]
            self._most = speed
        self._bandit.update(gamma, speed / self._most)
