"""What the rounds ahead would be, for every way to go and every position of a text at once: an oracle's foresight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.catch_up import FREELY, PIECE
from predictor.policies.base import LOOKUP, LOOKUP_LEVEL
from predictor.policies.oracle import Leg, Ways
from predictor.replay_world import TextTrace, World

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_STRETCHES = 32  # that are looked ahead for drafts that come
_ENDLESS = 1 << 20  # tokens of a block that a draft does not end
_NOBODY = -1  # the row of no draft


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
        self._tables: dict[Ways, Tables] = {}
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
        return self.tables(ways).after(self.length if rounds is None else rounds)

    def tables(self, ways: Ways) -> Tables:
        """What rounds along these ways come to."""
        if ways not in self._tables:
            self._tables[ways] = Tables(*self._one(ways))
        return self._tables[ways]

    def _one(self, ways: Ways) -> tuple[Ints, Floats]:
        """Where one round from each position ends, and what it takes: [ways, positions]."""
        trace, at = self.trace, np.arange(1, self.length)
        rows = [_NOBODY if way.draft is None else self._places[way.draft] for way in ways]
        step = np.array([0.0 if way.draft is None else self._steps[way.draft] for way in ways])[:, None]
        gammas = np.array([way.gamma for way in ways])[:, None]
        block = np.minimum(np.maximum(self._limit - at - 1, 0), gammas)
        right, sure, longest = self._guesses()
        width = np.minimum(block, sure[rows])
        steps = width + ((width < block) & (sure < longest)[rows])
        looks = np.array([way.lookup for way in ways])[:, None] & (trace.lookup_level >= LOOKUP_LEVEL)
        width, steps = np.where(looks, block, width), np.where(looks, block, steps)
        right = np.where(looks, trace.lookup_accepts, right[rows])
        step = np.where(looks, self._steps[LOOKUP], step)
        ends = np.zeros((len(ways), self.length + 1), np.int64)
        seconds = np.zeros(ends.shape)
        ends[:, self.length] = self.length
        ends[:, 1 : self.length] = np.minimum(at + np.minimum(right, width) + 1, self.length)
        seconds[:, 1 : self.length] = self._verify[width + 1] + steps * step + self.world.overhead
        return ends, seconds

    def _guesses(self) -> tuple[Ints, Ints, Ints]:
        """By draft and position: guesses that are right, those that the draft offers, and those that it may offer (if
        it offers fewer, it made one more step). The last row is of no draft, which offers nothing and makes no step."""
        trace = self.trace
        right = np.vstack([trace.accepts, np.zeros_like(trace.lookup_accepts)]).astype(np.int64)
        sure = np.full_like(right, _ENDLESS)
        longest = np.full_like(right, _ENDLESS)
        if trace.confidences is not None:
            sure[:-1] = (trace.confidences > 0).cumprod(axis=-1).sum(axis=-1)
            longest[:-1] = trace.confidences.shape[-1]
        sure[_NOBODY] = longest[_NOBODY] = 0
        for name in trace.levels.keys() & self._places.keys():
            cannot = trace.levels[name] == 0
            sure[self._places[name], cannot] = longest[self._places[name], cannot] = 0
        return right, sure, longest


class Tables:
    """Where any number of rounds ends and what it takes, along each of some ways: by squaring what one round does.

    ends, seconds: of one round from each position, [ways, positions].
    """

    def __init__(self, ends: Ints, seconds: Floats) -> None:
        self._powers = [(ends, seconds)]
        self._row = np.arange(len(ends))

    def after(self, rounds: int) -> tuple[Ints, Floats]:
        """From each position: [ways, positions]."""
        ends, seconds = self._powers[0]
        found, taken = np.tile(np.arange(ends.shape[1]), (len(ends), 1)), np.zeros_like(seconds)
        row = self._row[:, None]
        for ends, seconds in self._parts(rounds):
            found, taken = ends[row, found], taken + seconds[row, found]
        return found, taken

    def after_here(self, rounds: int, here: int) -> tuple[Ints, Floats]:
        """From one position: [ways]. A round or more."""
        (ends, seconds), *further = self._parts(rounds)
        found, taken = ends[:, here], seconds[:, here]
        for ends, seconds in further:
            found, taken = ends[self._row, found], taken + seconds[self._row, found]
        return found, taken

    def _parts(self, rounds: int) -> list[tuple[Ints, Floats]]:
        """The powers of two that make up so many rounds, the least first."""
        row = self._row[:, None]
        while len(self._powers) < rounds.bit_length():
            ends, seconds = self._powers[-1]
            self._powers.append((ends[row, ends], seconds + seconds[row, ends]))
        return [self._powers[power] for power in range(rounds.bit_length()) if rounds >> power & 1]


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
        self._tables = ahead.tables(self._ways)
        self._ends, self._seconds = self._tables.after(ahead.length if rounds is None else rounds)
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
            over_at = over_ends * len(pick) + every[:-1, None]
        chosen = np.zeros_like(self.way)
        self.taker[:] = every
        at, flat_run, flat_left = ends * len(pick) + every[:, None], run.reshape(-1), left.reshape(-1)
        for p in range(self._ahead.length - 1, 0, -1):
            total = seconds[p] + flat_left[at[p]]
            chosen[p] = total.argmin(axis=1)
            run[p] = left[p] = total.min(axis=1)
            if switching:
                over = (over_seconds[p] + flat_run[over_at[p]]).min(axis=1)
                best = int(over.argmin())
                better = run[p] > over[best]
                left[p, better], self.taker[p, better] = over[best], best
        self.way[:] = pick[every, chosen]

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
        ends, seconds = self._tables.after_here(entry.rounds, here)
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
