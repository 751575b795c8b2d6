"""What the rounds ahead would be, for every way to go and every position of a text at once: an oracle's foresight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.catch_up import FREELY, PIECE
from predictor.policies.base import LOOKUP, LOOKUP_LEVEL
from predictor.policies.oracle import Leg, Way, Ways
from predictor.replay_world import TextTrace, World

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_STRETCHES = 32  # that are looked ahead for drafts that come


class Entry(NamedTuple):
    """What stands between a draft and its running now: rounds in which another one has to run, and seconds in which it
    reads. resident: it is in memory."""

    rounds: int
    seconds: float
    resident: bool


def pieces(behind: int) -> int:
    """Rounds in which a draft that lags so far reads, the one in which it can run again included."""
    return math.ceil(max(behind - FREELY, 0) / PIECE)


class Ahead:
    """One text. Row 0 of the arrays is position 0, which no round begins at; the last one is the end of the text."""

    def __init__(self, world: World, trace: TextTrace, verify: Sequence[float], steps: Mapping[str, float]) -> None:
        self.world, self.trace = world, trace
        self.length = trace.accepts.shape[1] + 1
        self._limit = max(world.max_new_tokens, self.length)
        self._steps = steps
        self._places = {name: row for row, name in enumerate(world.names)}
        self._verify = np.asarray(verify)
        self._once: dict[Ways, tuple[Ints, Floats]] = {}
        self._courses: dict[tuple[tuple[str, ...], int | None, int], Course] = {}

    def foresee(
        self,
        own: Mapping[str, Ways],
        common: Ways,
        rounds: int | None,
        capacity: int,
        here: int,
        entries: Mapping[str, Entry],
    ) -> list[Leg]:
        """See `predictor.policies.oracle.Foresight`. here: the position; entries: of all drafts of `own`."""
        key = tuple(own), rounds, capacity
        if key not in self._courses:
            self._courses[key] = Course(self, own, common, rounds, capacity)
        return self._courses[key].legs(here, [entries[name] for name in own])

    def after(self, ways: Ways, rounds: int | None) -> tuple[Ints, Floats]:
        """Where so many rounds (None = all) end and what they take, from each position: [ways, positions]."""
        if ways not in self._once:
            self._once[ways] = self._one(ways)
        return _repeated(*self._once[ways], self.length if rounds is None else rounds)

    def _one(self, ways: Ways) -> tuple[Ints, Floats]:
        """Where one round from each position ends, and what it takes: [ways, positions]."""
        found = [self._round(way) for way in ways]
        ends = np.empty((len(ways), self.length + 1), np.int64)
        seconds = np.zeros((len(ways), self.length + 1))
        ends[:, 0], ends[:, self.length] = 0, self.length
        ends[:, 1 : self.length] = [end for end, _ in found]
        seconds[:, 1 : self.length] = [taken for _, taken in found]
        return ends, seconds

    def _round(self, way: Way) -> tuple[Ints, Floats]:
        trace, at = self.trace, np.arange(1, self.length)
        block = np.minimum(np.maximum(self._limit - at - 1, 0), way.gamma)
        right = width = steps = np.zeros_like(block)
        step = np.zeros(len(block))
        if way.draft is not None:
            row = self._places[way.draft]
            right = trace.accepts[row].astype(np.int64)
            width, steps = self._offered(row, block)
            if way.draft in trace.levels:
                runs = trace.levels[way.draft] > 0
                width, steps = width * runs, steps * runs
            step = np.full(len(block), self._steps[way.draft])
        if way.lookup:
            looks = trace.lookup_level >= LOOKUP_LEVEL
            right = np.where(looks, trace.lookup_accepts, right)
            width, steps = np.where(looks, block, width), np.where(looks, block, steps)
            step = np.where(looks, self._steps[LOOKUP], step)
        ends = np.minimum(at + np.minimum(right, width) + 1, self.length)
        return ends, self._verify[width + 1] + steps * step + self.world.overhead

    def _offered(self, row: int, block: Ints) -> tuple[Ints, Ints]:
        """Tokens that a draft offers of each block, and the steps it took: fewer where it has none."""
        if self.trace.confidences is None:
            return block, block
        sure = (self.trace.confidences[row] > 0).cumprod(axis=-1).sum(axis=-1)
        width = np.minimum(block, sure)
        return width, width + ((width < block) & (sure < self.trace.confidences.shape[-1]))


class Course:
    """The fewest seconds in which a text can be finished from every position, by backward induction.

    Every `rounds` rounds the draft that is ready goes on in one of its ways (or one that needs no draft), or another
    one takes over, which has to read the text. With several slots it is loaded and reads while the other one runs; with
    one slot rounds without a draft lie between. run[p, d]: seconds to the end if draft d begins at p; way[p, d]: its
    best way; left[p, d]: the same if another may take over first, which is taker[p, d]. The last column stands for no
    draft at all.
    """

    def __init__(self, ahead: Ahead, own: Mapping[str, Ways], common: Ways, rounds: int | None, capacity: int) -> None:
        self._ahead, self._rounds, self._capacity = ahead, rounds, capacity
        self._names = tuple(own)
        self._ways: Ways = (*(way for ways in own.values() for way in ways), *common)
        none, count = len(own), ahead.length + 1
        owners = [place for place, ways in enumerate(own.values()) for _ in ways] + [none] * len(common)
        self._owner = np.array(owners)
        self._tables: dict[int, tuple[Ints, Floats]] = {}
        self._ends, self._seconds = ahead.after(self._ways, rounds)
        self._pick = _padded(
            [np.flatnonzero((self._owner == place) | (self._owner == none)) for place in range(none + 1)]
        )
        self.run, self.left = np.zeros((count, none + 1)), np.zeros((count, none + 1))
        self.way, self.taker = np.zeros((count, none + 1), np.int64), np.zeros((count, none + 1), np.int64)
        self._work_out(common)

    def _work_out(self, common: Ways) -> None:
        run, left, pick = self.run, self.left, self._pick
        ends, seconds = self._ends.T[:, pick], self._seconds.T[:, pick]  # [positions, drafts + 1, ways]
        every = np.arange(len(pick))
        if self._rounds is None:  # one way to the end: nothing comes after it
            chosen = seconds.argmin(axis=2)
            self.run = np.take_along_axis(seconds, chosen[:, :, None], axis=2)[:, :, 0]
            self.way = pick[every, chosen]
            return
        switching = bool(self._names)
        if switching:
            over_ends, over_seconds = self._handing_over(common)  # [positions, drafts, ways]
        for p in range(self._ahead.length - 1, 0, -1):
            total = seconds[p] + left[ends[p], every[:, None]]
            chosen = total.argmin(axis=1)
            run[p] = left[p] = total[every, chosen]
            self.way[p], self.taker[p] = pick[every, chosen], every
            if switching:
                over = (over_seconds[p] + run[over_ends[p], every[:-1, None]]).min(axis=1)
                best = int(over.argmin())
                better = run[p] > over[best]
                left[p, better], self.taker[p, better] = over[best], best

    def _handing_over(self, common: Ways) -> tuple[Ints, Floats]:
        """For each draft where the rounds end in which it is waited for, and the seconds of them and of its reading."""
        world, at = self._ahead.world, np.arange(self._ahead.length + 1)
        costs, known = world.costs, self._ahead.trace.prompt_length
        ends, seconds = [], []
        for name in self._names:
            price = costs.catch_up(name, 1) * np.minimum(known + at, world.window)
            rounds = 0
            if self._capacity < len(self._names):
                price = price + (world.slow_down - 1) * costs.load(name)
                if self._capacity == 1:
                    rounds = math.ceil(costs.load(name) / costs.verify(1))
                    rounds += max(pieces(min(known + 1, world.window)) - 1, 0)
            end, taken = self._ahead.after(common if self._capacity == 1 else common[-1:], rounds)
            ends.append(end.T)
            seconds.append(taken.T + price[:, None])
        return np.stack(ends, axis=1), np.stack(seconds, axis=1)

    def legs(self, here: int, entries: Sequence[Entry]) -> list[Leg]:
        """The course from a position, with the drafts as they are now."""
        none = len(self._names)
        ready = np.array([entry.seconds if not entry.rounds else math.inf for entry in entries] + [0.0])
        first = _Option(float(self.run[here, none]), none, here, _NOW)
        for place, entry in enumerate(entries):
            option = self._option(here, place, entry, ready)
            if option.seconds < first.seconds:
                first = option
        way = int(self.way[first.at, first.place])
        meanwhile = way if first.meanwhile == _NOW else first.meanwhile
        legs = [Leg(self._ways[way], self._ways[meanwhile], 0)]
        if self._rounds is not None:
            legs += self._following(first.place, way, int(self._ends[way, first.at]), self._rounds)
        return legs

    def _option(self, here: int, place: int, entry: Entry, ready: Floats) -> _Option:
        """Go on with that draft, as soon as it can run."""
        if not entry.rounds:
            return _Option(entry.seconds + float(self.run[here, place]), place, here, _NOW)
        if entry.rounds not in self._tables:
            self._tables[entry.rounds] = self._ahead.after(self._ways, entry.rounds)
        ends, seconds = (table[:, here] for table in self._tables[entry.rounds])
        price = ready[self._owner]
        if self._rounds is None or (self._capacity == 1 and not entry.resident):  # nothing else is here then
            price = np.where(self._owner == len(self._names), 0.0, math.inf)
        total = seconds + price + self.run[ends, place]
        best = int(total.argmin())
        return _Option(entry.seconds + float(total[best]), place, int(ends[best]), best)

    def _following(self, place: int, way: int, at: int, rounds: int) -> list[Leg]:
        """The legs after the first one, which ends at that position."""
        legs: list[Leg] = []
        runs = self._ways[way].draft
        for stretch in range(1, _STRETCHES + 1):
            if at >= self._ahead.length:
                break
            place = int(self.taker[at, place])
            way = int(self.way[at, place])
            draft = self._ways[way].draft
            if draft in self._names and draft != runs:
                legs.append(Leg(self._ways[way], self._ways[way], stretch * rounds))
                runs = draft
            at = int(self._ends[way, at])
        return legs


_NOW = -1  # nothing has to be waited for


class _Option(NamedTuple):
    """A draft to go on with: seconds to the end of the text, its place, the position at which it begins, and the way to
    go until then."""

    seconds: float
    place: int
    at: int
    meanwhile: int


def _padded(rows: Sequence[Ints]) -> Ints:
    """Rows of different lengths as one array; the last of a row fills it up."""
    widest = max(map(len, rows))
    return np.stack([np.pad(row, (0, widest - len(row)), mode="edge") for row in rows])


def _repeated(ends: Ints, seconds: Floats, times: int) -> tuple[Ints, Floats]:
    """So many rounds from each position, by squaring: [ways, positions]."""
    row = np.arange(len(ends))[:, None]
    found, taken = np.tile(np.arange(ends.shape[1]), (len(ends), 1)), np.zeros_like(seconds)
    while times:
        if times & 1:
            taken = taken + seconds[row, found]
            found = ends[row, found]
        times >>= 1
        if times:
            seconds, ends = seconds + seconds[row, ends], ends[row, ends]
    return found, taken
