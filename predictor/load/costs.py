"""Measured seconds of a batch: one forward of the target over several sequences, and what goes with it."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.costs import CostTable

CONTEXT = 256  # positions of each sequence at which points are measured and kept
_BUDGET = 1.5  # seconds that measuring may take, the last forwards not counted
_WIDTHS = (1, 2, 4)  # tokens of each sequence that are measured
_PREFILL = 64  # prompt tokens beside one token each, the same
_RATE = 0.1  # weight of a new sample at the points that it lies between
_DRIFT = 0.05  # and everywhere: a hotter device slows all of them
_FORGOTTEN = 0.01  # of what drafting seems to take too much, each batch that drafts nothing
_OUTLIER = 3.0  # a sample counts at most this many times (or as little as 1 over it) of what was expected
_REFRESH = 16  # samples after which curves are worked out anew
_GUESSED_SEQUENCE = 0.15  # an unmeasured further sequence, in plain steps, besides its rows
_GUESSED_SLOPE = 0.1  # an unmeasured further row, in plain steps, where not even one sequence was measured wider
_CURVE = 160  # rows worked out at once

Point = tuple[int, int]
Run = Callable[[Sequence[int], int], object]
FloatArray = npt.NDArray[np.float64]


class BatchCosts:
    """Seconds of one forward by sequences, further rows (beyond one each, prompt tokens included) and context.

    points: seconds by (sequences, further rows) with `CONTEXT` positions a sequence. Between points the time is
    interpolated (rows first, then sequences), beyond them extended by the steepest slope known there; it never falls
    with rows. per_position: seconds of each position of context, of all sequences together. All of it follows the
    batches that really ran, outliers capped.

    Besides: `drafting` = what drafting takes, over the sum of what each sequence's draft works (below 1 where drafts
    work side by side), and `overhead` = seconds a sequence of all that a batch needs whatever is drafted: planning,
    what drafts guess only to be compared, judging, committing. Any thread may call anything.
    """

    def __init__(
        self,
        points: Mapping[Point, float],
        *,
        per_position: float = 0.0,
        drafting: float = 1.0,
        overhead: float = 0.0,
    ) -> None:
        if not points:
            raise ValueError("a batch's costs need at least one point")
        if any(n < 1 or further < 0 for n, further in points):
            raise ValueError("points are (sequences, further rows) from (1, 0) on")
        if not all(0 < seconds < math.inf for seconds in points.values()):
            raise ValueError("batch times must be positive, finite seconds")
        if not all(0 <= value < math.inf for value in (per_position, drafting, overhead)):
            raise ValueError("per_position, drafting and overhead must be finite, 0 or more")
        self._points = {(int(n), int(further)): float(seconds) for (n, further), seconds in points.items()}
        self.per_position, self.drafting, self.overhead = float(per_position), float(drafting), float(overhead)
        self._scale = 1.0
        self._samples = 0
        self._pending: dict[Point, list[float]] = {}  # [weight, weighted logs of ratios] of samples not taken in yet
        self._curves: dict[int, list[float]] = {}  # by sequences; without scale and context
        self._lock = threading.Lock()

    @classmethod
    def guessed(cls, costs: CostTable, most_sequences: int = 8) -> BatchCosts:
        """From the times of one sequence alone, until batches were measured."""
        step = costs.verify(1)
        points = {}
        for n in sorted({1, 2, most_sequences}):
            for width in _WIDTHS:
                alone = max(costs.verify(n * width), step * (1 + _GUESSED_SLOPE * (n * width - 1)) if n > 1 else 0.0)
                points[n, n * (width - 1)] = alone + (n - 1) * _GUESSED_SEQUENCE * step
        return cls(points)

    # What a batch takes

    def seconds(self, sequences: int, rows: int, context: int | None = None) -> float:
        """Of one forward over `rows` rows of so many sequences; context: their positions in all, None = usual."""
        sequences = max(sequences, 1)
        known, further = self._curves.get(sequences), max(rows - sequences, 0)
        if known is None or len(known) <= further:
            return self.curve(sequences, further, 0, context)[0]
        seconds = known[further] * self._scale
        if context is None or not self.per_position:
            return seconds
        return max(seconds + self.per_position * (context - CONTEXT * sequences), 0.5 * known[0] * self._scale)

    def curve(self, sequences: int, begin: int, length: int, context: int | None = None) -> list[float]:
        """Seconds with `begin`, `begin` + 1, ... `begin` + `length` rows beyond one a sequence."""
        sequences, begin = max(sequences, 1), max(begin, 0)
        end = begin + length + 1
        known = self._curves.get(sequences)
        if known is None or len(known) < end:
            with self._lock:
                known = self._curves[sequences] = self._worked_out(sequences, max(end, _CURVE))
        scale = self._scale
        extra = 0.0 if context is None else self.per_position * (context - CONTEXT * sequences)
        if not extra:
            return [seconds * scale for seconds in known[begin:end]]
        least = 0.5 * known[0] * scale  # a short context never makes a forward free
        return [max(seconds * scale + extra, least) for seconds in known[begin:end]]

    def _worked_out(self, sequences: int, length: int) -> list[float]:
        measured = sorted({n for n, _ in self._points})
        below = max((n for n in measured if n <= sequences), default=measured[0])
        above = min((n for n in measured if n >= sequences), default=measured[-1])
        if below == above and below < sequences and len(measured) > 1:  # beyond the most: extended
            above, below = measured[-1], measured[-2]
        rows = np.arange(length, dtype=np.float64)
        low = self._row_curve(below, rows)
        if below == above:
            curve = low * max(sequences / below, 1.0)
        else:
            curve = low + (self._row_curve(above, rows) - low) * (sequences - below) / (above - below)
        return [float(seconds) for seconds in np.maximum.accumulate(curve)]

    def _row_curve(self, sequences: int, rows: FloatArray) -> FloatArray:
        """Seconds by further rows for a number of sequences that was measured."""
        known = sorted((further, seconds) for (n, further), seconds in self._points.items() if n == sequences)
        at = np.array([further for further, _ in known], dtype=np.float64)
        seconds = np.maximum.accumulate(np.array([s for _, s in known]))
        curve = np.interp(rows, at, seconds)
        beyond = rows > at[-1]
        curve[beyond] = seconds[-1] + (rows[beyond] - at[-1]) * self._last_slope(known)
        return np.asarray(curve, dtype=np.float64)

    def _last_slope(self, known: list[tuple[int, float]]) -> float:
        """Seconds of a row beyond the last one measured: that of wide forwards of any number of sequences, if known."""
        end = known[-1][0]
        slopes = [0.0] if len(known) < 2 else [(known[-1][1] - known[-2][1]) / max(known[-1][0] - known[-2][0], 1)]
        for n in {n for n, _ in self._points}:
            points = sorted((further, s) for (m, further), s in self._points.items() if m == n)
            if len(points) > 1 and points[-1][0] > end:
                slopes = [(points[-1][1] - points[-2][1]) / (points[-1][0] - points[-2][0])]
        return max(*slopes, 0.0) if slopes[0] > 0 else _GUESSED_SLOPE * known[0][1]

    # What keeps it current

    def observe(self, sequences: int, rows: int, context: int, seconds: float) -> None:
        """Take in the time of a real forward. Samples that are no time are ignored."""
        if rows < 1 or not 0 < seconds < math.inf:
            return
        sequences = max(min(sequences, rows), 1)
        ratio = min(max(seconds / self.seconds(sequences, rows, context), 1 / _OUTLIER), _OUTLIER)
        with self._lock:
            self._scale *= ratio**_DRIFT
            for point, weight in self._around(sequences, rows - sequences):
                pending = self._pending.setdefault(point, [0.0, 0.0])
                pending[0] += weight
                pending[1] += weight * math.log(ratio)
            self._samples += 1
            if self._samples % _REFRESH == 0:
                self._take_in()

    def _take_in(self) -> None:
        """Move the points by what samples said since the last time: what curves foresaw did not move meanwhile."""
        for point, (weight, logs) in self._pending.items():
            self._points[point] *= math.exp(logs / weight * (1 - (1 - _RATE) ** weight))
        self._pending, self._curves = {}, {}

    def _around(self, sequences: int, further: int) -> list[tuple[Point, float]]:
        """The points that a sample lies between, and how near each is; weights add up to 1."""
        found = []
        for n, near in _bracket(sorted({n for n, _ in self._points}), sequences):
            row = sorted(rows for m, rows in self._points if m == n)
            found += [((n, at), near * weight) for at, weight in _bracket(row, further)]
        return [(point, weight) for point, weight in found if weight > 0]

    def observe_drafting(self, work: float, seconds: float) -> None:
        """Take in that drafting took so long, where sequences' drafts worked for `work` seconds in all.

        0 = nothing was drafted. Then what is above 1 goes back there: nobody would learn better while it makes all
        drafting look too dear.
        """
        if work == 0:
            self.drafting -= _FORGOTTEN * max(self.drafting - 1.0, 0.0)
        elif 0 < work < math.inf and 0 < seconds < math.inf:
            sample = min(max(seconds / work, self.drafting / _OUTLIER), self.drafting * _OUTLIER)
            self.drafting += _RATE * (min(max(sample, 0.05), 20.0) - self.drafting)

    def observe_overhead(self, sequences: int, seconds: float) -> None:
        """Take in the seconds of a batch that were neither planned drafting nor the forward."""
        if sequences > 0 and 0 <= seconds < math.inf:
            most = _OUTLIER * self.overhead if self.overhead else seconds
            self.overhead += _RATE * (min(seconds / sequences, most) - self.overhead)

    def measure(
        self,
        run: Run,
        most_sequences: int,
        *,
        budget: float = _BUDGET,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Replace what is known by what `run(widths, context)` takes: one forward of widths[i] tokens per sequence.

        Each forward once untimed and then timed, while the budget lasts, in the order of what says most; the whole is
        timed again while there is time left, and the quicker of both counts. Raises what `run` raises; then, and where
        the clock stands still, nothing is replaced.
        """
        begin, points, longer = clock(), dict[Point, float](), 0.0
        most = max(most_sequences, 1)

        def timed(widths: list[int], context: int) -> float:
            started = clock()
            run(widths, context)
            return clock() - started

        for again in range(2):
            for n, widths in _plan(most):
                if points and clock() - begin > budget:
                    break
                if not again:
                    run(widths, CONTEXT)
                seconds = timed(widths, CONTEXT)
                point = (n, sum(widths) - n)
                if seconds > 0:
                    points[point] = min(seconds, points.get(point, seconds))
            if not again and clock() - begin < budget:
                longer = timed([1] * most, 2 * CONTEXT)
        if not points:
            return
        fresh = BatchCosts(points)
        with self._lock:
            self._points, self._scale, self._pending, self._curves = fresh._points, 1.0, {}, {}
            if longer > 0 and (most, 0) in points:  # what a longer context takes
                self.per_position = max(longer - points[most, 0], 0.0) / (most * CONTEXT)

    # From run to run

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, the drift included in the points."""
        with self._lock:
            self._take_in()
            points = [[n, further, seconds * self._scale] for (n, further), seconds in sorted(self._points.items())]
            return {
                "points": points,
                "per_position": self.per_position,
                "drafting": self.drafting,
                "overhead": self.overhead,
            }

    @classmethod
    def from_json(cls, data: Any) -> BatchCosts:
        """What `to_json` wrote. Raises ValueError for anything else."""
        try:
            points = {(int(n), int(further)): float(seconds) for n, further, seconds in data["points"]}
            more = {key: float(data[key]) for key in ("per_position", "drafting", "overhead")}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError("not a table of a batch's costs") from error
        return cls(points, **more)


def _plan(most: int) -> list[tuple[int, list[int]]]:
    """(sequences, widths) of the forwards to measure, those that say most first."""
    ends = [1] if most == 1 else [1, most]
    between = [2, most // 2] if most > 4 else [2] * (most > 2)
    plan = [(n, [width] * n) for width in _WIDTHS for n in ends]
    plan.append((most, [_PREFILL + 1] + [1] * (most - 1)))  # a prompt's rows beside the others' tokens
    return plan + [(n, [width] * n) for n in between for width in _WIDTHS]


def _bracket(known: Sequence[int], value: int) -> list[tuple[int, float]]:
    """The one or two of `known` (ascending) that `value` lies between, with weights that add up to 1."""
    if value <= known[0]:
        return [(known[0], 1.0)]
    for low, high in itertools.pairwise(known):
        if value < high:
            share = (value - low) / (high - low)
            return [(low, 1 - share), (high, share)] if share else [(low, 1.0)]
    return [(known[-1], 1.0)]
