"""Bandits of the literature: small, seeded, each as published where that is known, else as said in its docstring.

Arms are numbered from 0. Randomness comes from the generator that is handed in, so that a run can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


class Ucb1:
    """UCB1 (Auer et al. 2002) as the baseline of MetaSD and MemSpec: each arm once, then mean + c sqrt(ln t / n).

    Rewards in [0, 1]. MemSpec tried c in {0.1, 0.5, 1, 2, 3} and found 2.0 best.
    """

    def __init__(self, arms: int, c: float = 2.0) -> None:
        self.c = c
        self.counts = [0] * arms
        self.sums = [0.0] * arms

    def index(self, arm: int) -> float:
        """What the arm promises at best; infinite if it was never tried."""
        count = self.counts[arm]
        if not count:
            return math.inf
        return self.sums[arm] / count + self._radius(count, sum(self.counts))

    def _radius(self, count: int, total: int) -> float:
        return self.c * math.sqrt(math.log(total) / count)

    def choose(self, arms: Sequence[int] | None = None) -> int:
        """The arm (among `arms`) that promises most; the first of equals."""
        return max(range(len(self.counts)) if arms is None else arms, key=self.index)

    def update(self, arm: int, reward: float) -> None:
        self.counts[arm] += 1
        self.sums[arm] += reward


class UcbSpec(Ucb1):
    """UCBSpec of BanditSpec (arXiv 2505.15141): the radius as transcribed in Nightjar's repository (methods.md §3).

    radius = 1/2 sqrt((1 + n) / n^2 (1 + 2 log(K t^2 sqrt(1 + n) / delta))) for rewards in [0, 1] (there, times their
    range L). delta is not given; 0.1 is ours.
    """

    def __init__(self, arms: int, delta: float = 0.1) -> None:
        super().__init__(arms)
        self.delta = delta

    def _radius(self, count: int, total: int) -> float:
        log = math.log(len(self.counts) * total**2 * math.sqrt(1 + count) / self.delta)
        return 0.5 * math.sqrt((1 + count) / count**2 * (1 + 2 * log))


class Exp3:
    """EXP3 (Auer et al. 2002; EXP3-IX's anytime rate, Neu 2015) for EXP3Spec: losses in [0, 1], an adversary.

    p_i ~ exp(-eta_t L_i), L_i the sum of loss / p at the time of the draw, eta_t = sqrt(ln K / (K t)). BanditSpec's own
    pseudo-code was not found.
    """

    def __init__(self, arms: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._losses = np.zeros(arms)
        self._draws = 1

    def probabilities(self) -> np.ndarray:
        arms = len(self._losses)
        eta = math.sqrt(math.log(max(arms, 2)) / (arms * self._draws))
        weights = np.exp(-eta * (self._losses - self._losses.min()))
        return np.asarray(weights / weights.sum())

    def choose(self) -> tuple[int, float]:
        """An arm, and the probability with which it was drawn (`update` needs it)."""
        p = self.probabilities()
        arm = int(self._rng.choice(len(p), p=p))
        return arm, float(p[arm])

    def update(self, arm: int, loss: float, probability: float) -> None:
        self._losses[arm] += loss / probability
        self._draws += 1


class NormalHedge:
    """NormalHedge (Chaudhuri, Freund, Hsu 2009), as in HedgeSpec (arXiv 2510.20064): full information, no parameter.

    R_i = regret towards arm i; w_i ~ [R_i]+ / c exp([R_i]+^2 / 2c) with c such that the mean of exp([R_i]+^2 / 2c) is
    e. Arms may sleep (drafts that are not resident): their regret does not move, they get no weight.
    """

    def __init__(self, arms: int) -> None:
        self.regrets = [0.0] * arms

    def weights(self, awake: Sequence[int]) -> list[float]:
        """Probabilities of the arms in `awake`, in that order."""
        positive = [max(self.regrets[arm], 0.0) for arm in awake]
        if not any(positive):
            return [1 / len(awake)] * len(awake)
        scale = self._scale(positive)
        peak = max(positive) ** 2 / (2 * scale)
        raw = [r * math.exp(r * r / (2 * scale) - peak) for r in positive]
        total = sum(raw)
        return [value / total for value in raw]

    @staticmethod
    def _scale(positive: Sequence[float]) -> float:
        low, high = max(positive) ** 2 / (2 * (1 + math.log(len(positive)))), 2 * max(positive) ** 2
        for _ in range(50):  # the mean falls with the scale; e lies between the two
            middle = (low + high) / 2
            if sum(math.exp(r * r / (2 * middle)) for r in positive) / len(positive) > math.e:
                low = middle
            else:
                high = middle
            if high - low < 1e-6 * high:
                break
        return high

    def update(self, losses: Mapping[int, float], weights: Mapping[int, float]) -> None:
        """losses in [0, 1] of the arms that were awake, and the weights that they had."""
        total = sum(weights[arm] for arm in losses)
        if not total:
            return
        mixed = sum(weights[arm] * loss for arm, loss in losses.items()) / total
        for arm, loss in losses.items():
            self.regrets[arm] += mixed - loss


class _Timeline:
    """Block, bin and means of one context of `AdaBinGreedy`."""

    __slots__ = ("arm", "bin", "block", "counts", "exploring", "left_in_bin", "left_in_block", "means")

    def __init__(self, arms: int) -> None:
        self.block = self.bin = 0
        self.left_in_block = self.left_in_bin = 0
        self.arm = 0
        self.exploring = False
        self.counts = [0] * arms
        self.means = [0.0] * arms


class AdaBinGreedy:
    """ADA-BINGREEDY as Nightjar's paper has it (arXiv 2512.22420, methods.md §1.4); arms are gammas 0..gamma_max.

    Block j lasts H_j = 2^(j-1) steps and falls into bins of floor(sqrt(H_j)) steps. At the begin of a bin, with
    probability 1/b (b = the bin's number in its block) it explores: an arm drawn uniformly, locked for the bin. Else it
    exploits: the arm of least mean loss, with `switch_loss / gamma` added to gamma > 0 after gamma 0, locked too. Every
    context has its own timeline. An arm that was never tried cannot be exploited.
    """

    def __init__(self, gamma_max: int, rng: np.random.Generator) -> None:
        self.gamma_max = gamma_max
        self._rng = rng
        self._timelines: dict[str, _Timeline] = {}
        self._last = 0

    def choose(self, context: str = "", switch_loss: float = 0.0) -> int:
        """The gamma of the next step. switch_loss: C_switch, in the unit of the losses."""
        line = self._timelines.get(context)
        if line is None:
            line = self._timelines[context] = _Timeline(self.gamma_max + 1)
        if line.left_in_bin == 0:
            self._next_bin(line, switch_loss)
        line.left_in_bin -= 1
        line.left_in_block -= 1
        self._last = line.arm
        return line.arm

    def exploring(self, context: str = "") -> bool:
        """Whether the bin of the last step explores."""
        return self._timelines[context].exploring

    def _next_bin(self, line: _Timeline, switch_loss: float) -> None:
        if line.left_in_block == 0:
            line.block += 1
            line.left_in_block = 2 ** (line.block - 1)
            line.bin = 0
        line.bin += 1
        line.left_in_bin = min(math.isqrt(2 ** (line.block - 1)), line.left_in_block)
        known = [arm for arm, count in enumerate(line.counts) if count]
        line.exploring = not known or self._rng.random() < 1 / line.bin
        if line.exploring:
            line.arm = int(self._rng.integers(self.gamma_max + 1))
            return
        from_zero = self._last == 0
        line.arm = min(known, key=lambda arm: line.means[arm] + (switch_loss / arm if from_zero and arm else 0.0))

    def update(self, arm: int, loss: float, context: str = "") -> None:
        """The latency per token (1/goodput) that a step with `arm` had."""
        line = self._timelines[context]
        line.counts[arm] += 1
        line.means[arm] += (loss - line.means[arm]) / line.counts[arm]
