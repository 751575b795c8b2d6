"""Runs a schedule on a system: calibrates, warms every arm up, puts the loads on in turn, and keeps what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from edgespec.bench.load import runner
from edgespec.bench.load.compare import NONE
from edgespec.bench.load.prompts import Pool
from edgespec.bench.load.records import Ask, Served, Stretch
from edgespec.bench.load.schedule import Capacity, Schedule, Turn, seed_of
from edgespec.bench.load.system import Arm, System
from edgespec.bench.load.texts import Difference, Key, Reference, differences, key_of, reference_of
from edgespec.bench.watch import Watch
from edgespec.bench.words import counted
from edgespec.errors import ConfigError

MOST_ALONE = 96  # answers that are made again alone; other texts are compared between arms
_CALIBRATION_S, _WARM_UP_S = 10.0, 4.0

Say = Callable[[str], None]


@dataclass
class Measured:
    """All that a run came to. asks: by (rate, repeat), then by number. left_out: stretches for which no time was.
    uncompared: answers for which there was no other one to compare them with."""

    schedule: Schedule
    capacity: Capacity | None = None
    stretches: list[Stretch] = field(default_factory=list)
    asks: dict[tuple[float, int], dict[int, Ask]] = field(default_factory=dict)
    interrupted: bool = False
    left_out: int = 0
    compared: int = 0
    uncompared: int = 0
    alone: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def stuck(self) -> str:
        """Which requests did not end although they were cancelled; empty if all did."""
        return next((stretch.stuck for stretch in self.stretches if stretch.stuck), "")


class _Process:
    """This process, as `Watch` wants it."""

    def cpu_seconds(self) -> float:
        used = psutil.Process().cpu_times()
        return float(used.user + used.system)


class Measuring:
    """One run. keep: called with every stretch when it has ended. now: seconds of a clock, for the whole run's limit.

    exact: every answer has as many tokens as its request says, whatever the model would end.
    """

    def __init__(
        self,
        system: System,
        schedule: Schedule,
        pool: Pool,
        *,
        exact: bool = False,
        say: Say = lambda text: None,
        advance: Callable[[int], None] = lambda steps: None,
        keep: Callable[[Stretch], None] = lambda stretch: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system, self._pool = system, pool
        self._params = runner.to_the_limit if exact else runner.greedy
        self._say, self._advance, self._keep, self._now = say, advance, keep, now
        self._began = now()
        self.measured = Measured(schedule)

    def run(self, *, alone: bool = True) -> Measured:
        """Everything, in order; after Ctrl-C, or when requests are stuck, what was measured so far. Raises ConfigError
        for a rate that cannot end, and Stuck where nothing is measured yet."""
        measured = self.measured
        try:
            if self._prepare():
                self._stretches()
        finally:
            measured.interrupted = measured.interrupted or any(s.interrupted for s in measured.stretches)
        if measured.stretches:
            self._check_texts(alone and not measured.interrupted)
        return measured

    def calibrate(self) -> float:
        """Requests a second that a full batch answers without speculation. Raises ConfigError if none came of it."""
        self._system.use(self._plain_arm())
        return capacity_of(self._closed(_CALIBRATION_S)).requests_per_second

    def _plain_arm(self) -> Arm:
        arms = self.measured.schedule.arms
        return next((arm for arm in arms if arm.planner == NONE), Arm(NONE, arms[0].elastic))

    def _prepare(self) -> bool:
        """Capacity, rates, and a warm-up of every arm; False if it was interrupted."""
        schedule = self.measured.schedule
        self._say("how much a full batch can do")
        self._system.use(self._plain_arm())
        full = self._closed(_CALIBRATION_S)
        capacity = capacity_of(full)
        self.measured.capacity = capacity
        if full.interrupted:
            self.measured.interrupted = True
            return False
        self.measured.schedule = schedule.settled(capacity)
        for arm in schedule.arms:
            self._say(f"warming up {arm.name}")
            self._system.use(arm)
            if arm.planner != NONE and self._closed(_WARM_UP_S).interrupted:
                self.measured.interrupted = True
                return False
        return True

    def _closed(self, seconds: float) -> Stretch:
        stretch = Stretch(NONE, 0.0, 0, -1, seconds, min(2.0, seconds / 4))
        asks = self._pool.endless(len(self.measured.asks))

        async def work(stop: asyncio.Event) -> None:
            await runner.closed_loop(
                self._system, asks, stretch, stop, sessions=self._system.max_sessions, limit_s=seconds,
                params=self._params,
            )  # fmt: skip

        runner.run(work)
        return stretch

    def _stretches(self) -> None:
        schedule, measured = self.measured.schedule, self.measured
        turns = schedule.turns()
        for place, turn in enumerate(turns):
            if self._now() - self._began + schedule.seconds > schedule.most_s:
                measured.left_out = len(turns) - place
                self._say(f"time is up: {counted(measured.left_out, 'stretch', 'stretches')} left out")
                return
            self._say(f"{turn.arm.name} at {turn.rate:g} requests/s, repeat {turn.repeat + 1}")
            stretch = self._stretch(turn)
            measured.stretches.append(stretch)
            self._keep(stretch)
            self._advance(1)
            if stretch.interrupted:
                return

    def _stretch(self, turn: Turn) -> Stretch:
        schedule = self.measured.schedule
        self._system.use(turn.arm)
        stretch = Stretch(turn.arm.name, turn.rate, turn.repeat, turn.order, schedule.seconds, schedule.warm_up)
        asks = self.asks(turn.rate, turn.repeat)

        async def work(stop: asyncio.Event) -> None:
            await runner.open_loop(
                self._system, list(asks.values()), stretch, stop, limit_s=schedule.limit_s, params=self._params
            )

        watch = Watch(_Process(), ())
        runner.measure(work, stretch)
        stretch.busy = watch.shares()[0]
        return stretch

    def asks(self, rate: float, repeat: int) -> dict[int, Ask]:
        """The requests of one rate and repeat, the same for every arm."""
        schedule = self.measured.schedule
        key = (rate, repeat)
        if key not in self.measured.asks:
            arrivals = schedule.arrivals(rate, repeat)
            made = self._pool.asks(arrivals, seed_of(schedule.seed, schedule.rates.index(rate), repeat))
            self.measured.asks[key] = {ask.number: ask for ask in made}
        return self.measured.asks[key]

    def _check_texts(self, alone: bool) -> None:
        measured = self.measured
        self._say("comparing the texts")
        reference = self._alone(_keys(measured)) if alone else {}
        measured.alone = len(reference)
        for (rate, repeat), asks in measured.asks.items():
            of_place = [s for s in measured.stretches if (s.rate, s.repeat) == (rate, repeat)]
            for arm in (each.name for each in measured.schedule.arms):
                for key, expected in reference_of(asks, of_place, arm).items():
                    reference.setdefault(key, expected)
            for stretch in of_place:
                compared, without, found = differences(stretch, asks, reference)
                measured.compared += compared
                measured.uncompared += without
                measured.differences += found

    def _alone(self, keys: Iterable[Key]) -> dict[Key, Reference]:
        found = {}
        for ids, new in list(dict.fromkeys(keys))[:MOST_ALONE]:
            params = self._params(Ask(0, 0.0, "", ids, new))
            found[ids, new] = Reference(tuple(self._system.alone(ids, params).token_ids))
        return found


def _keys(measured: Measured) -> list[Key]:
    """Of all requests of which something came."""
    return [
        key_of(measured.asks[stretch.rate, stretch.repeat][one.number])
        for stretch in measured.stretches
        for one in stretch.served
        if one.ids
    ]


def capacity_of(stretch: Stretch) -> Capacity:
    """From a closed loop that kept every place taken. Raises ConfigError if nothing came of it."""
    begin, end = stretch.window
    tokens = sum(count for one in stretch.served for time, count in one.pieces if begin <= time < end)
    errors = [one.error for one in stretch.served if one.error]
    if tokens <= 0 or end <= begin:
        if stretch.interrupted:
            return Capacity(1.0, 1.0)
        why = f": {errors[0]}" if errors else ""
        raise ConfigError(f"Nothing came of {end - begin:g} s under full load{why}.")
    return Capacity(tokens / (end - begin), max(answer_tokens(stretch.served), 1.0))


def answer_tokens(served: Sequence[Served]) -> float:
    """Mean tokens of an answer, where one that was cut off has at least what came (Kaplan and Meier's estimate).

    The mean of those that ended in time would be that of the short ones. Beyond the longest of all nothing is known.
    """
    ends = sorted((one.tokens, one.outcome != "finished") for one in served if one.tokens)
    mean, left, before = 0.0, 1.0, 0
    for place, (tokens, cut_off) in enumerate(ends):
        mean += left * (tokens - before)
        before = tokens
        if not cut_off:
            left *= 1 - 1 / (len(ends) - place)
    return mean
