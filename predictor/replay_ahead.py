"""What the rounds ahead would be, for every draft, gamma and position of a text at once: an oracle's foresight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from predictor.policies.base import LOOKUP, LOOKUP_LEVEL
from predictor.policies.oracle import Stretch
from predictor.replay_world import TextTrace, World

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Choice = tuple[str | None, int]


class Ahead:
    """One text. Row 0 of the arrays is position 0, which no round begins at; the last one is the end of the text."""

    def __init__(self, world: World, trace: TextTrace, verify: Sequence[float], steps: Mapping[str, float]) -> None:
        self._world, self._trace = world, trace
        self._steps = steps
        self._places = {name: row for row, name in enumerate(world.names)}
        self._verify = np.asarray(verify)
        self._length = trace.accepts.shape[1] + 1
        self._best: dict[tuple[tuple[Choice, ...], int | None, bool], tuple[list[int], list[int], list[float]]] = {}
        self._tables: dict[tuple[tuple[Choice, ...], int | None, bool], tuple[Ints, Floats]] = {}

    def stretch(self, choice: Choice, rounds: int | None, start: int, lookup: bool) -> Stretch:
        """The next `rounds` rounds from a position, None = all."""
        ends, seconds = self._table((choice,), rounds, lookup)
        return Stretch(int(ends[0, start]) - start, float(seconds[0, start]), int(ends[0, start]))

    def best(self, choices: tuple[Choice, ...], rounds: int | None, start: int, lookup: bool) -> tuple[Choice, Stretch]:
        """The choice that makes most tokens a second of them; equals go to the earlier one."""
        key = choices, rounds, lookup
        if key not in self._best:
            ends, seconds = self._table(choices, rounds, lookup)
            tokens = ends - np.arange(ends.shape[1])
            places = np.argmax(tokens / np.maximum(seconds, 1e-12), axis=0)
            row = np.arange(ends.shape[1])
            self._best[key] = places.tolist(), ends[places, row].tolist(), seconds[places, row].tolist()
        places_of, ends_of, seconds_of = self._best[key]
        end = ends_of[start]
        return choices[places_of[start]], Stretch(end - start, seconds_of[start], end)

    def _table(self, choices: tuple[Choice, ...], rounds: int | None, lookup: bool) -> tuple[Ints, Floats]:
        """Where so many rounds end and what they take: [choices, positions]."""
        key = choices, rounds, lookup
        if key not in self._tables:
            ends, seconds = self._one(choices, lookup)
            self._tables[key] = _repeated(ends, seconds, self._length if rounds is None else rounds)
        return self._tables[key]

    def _one(self, choices: Sequence[Choice], lookup: bool) -> tuple[Ints, Floats]:
        """Where one round from each position ends, and what it takes: [choices, positions]."""
        trace, length = self._trace, self._length
        at = np.arange(1, length)
        looked = trace.lookup_accepts.astype(np.int64)
        rows = [trace.lookup_accepts if d in (None, LOOKUP) else trace.accepts[self._places[d]] for d, _ in choices]
        right = np.stack(rows).astype(np.int64)
        block = np.minimum(np.array([[gamma] for _, gamma in choices]), length - at - 1)
        width = np.where([[draft is None] for draft, _ in choices], 0, block)
        step = np.array([[0.0 if draft is None else self._steps[draft]] for draft, _ in choices])
        if lookup:
            looks = trace.lookup_level >= LOOKUP_LEVEL
            right, width = np.where(looks, looked, right), np.where(looks, block, width)
            step = np.where(looks, self._steps[LOOKUP], step)
        ends = np.empty((len(choices), length + 1), np.int64)
        seconds = np.zeros((len(choices), length + 1))
        ends[:, 0], ends[:, length] = 0, length
        ends[:, 1:length] = at + np.minimum(right, width) + 1
        seconds[:, 1:length] = self._verify[width + 1] + width * step + self._world.overhead
        return ends, seconds


def _repeated(ends: Ints, seconds: Floats, times: int) -> tuple[Ints, Floats]:
    """So many rounds from each position, by squaring: [choices, positions]."""
    row = np.arange(len(ends))[:, None]
    found, taken = np.tile(np.arange(ends.shape[1]), (len(ends), 1)), np.zeros_like(seconds)
    while times:
        if times & 1:
            taken = taken + seconds[row, found]
            found = ends[row, found]
        seconds, ends = seconds + seconds[row, ends], ends[row, ends]
        times >>= 1
    return found, taken
