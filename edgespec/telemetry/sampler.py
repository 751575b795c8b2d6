"""Energy of an answer, and what slowed the device down meanwhile.

One thread per engine reads the board's watts while an answer is made, and sleeps otherwise; it is only there where the
board measures its power. The energy is the area under these samples (trapezoids) from the begin to the end of the
answer: that of the whole board, whatever else it does. Nothing measured, or not throughout: None.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from edgespec.memory import topology
from edgespec.memory.loader import lower_priority
from edgespec.memory.pressure import Limits
from edgespec.telemetry.board import gpu_clock
from edgespec.telemetry.power import PowerSource, find_power
from edgespec.telemetry.rails import find_rails
from edgespec.telemetry.system_files import SYSTEM_ROOT
from edgespec.telemetry.thermal import throttling
from edgespec.telemetry.trace import NULL_TRACER, NullTracer, Tracer

_log = logging.getLogger(__name__)

LANE = "device"
_LOOK_SECONDS = 1.0  # between two looks at heat, current limits and memory; one takes about a millisecond
_MOST_GAP = 1.0  # seconds without a sample (or ten intervals, if that is more) after which an energy is unknown
_MIB = 1 << 20


class Meter:
    """Adds up one answer. Made by `Sampler.begin`; `end` it once, in any thread. Times: perf_counter seconds."""

    def __init__(self, begin: float, most_gap: float) -> None:
        self.notes: dict[str, str] = {}  # what slowed the device down, by cause, as it was first seen
        self.loads: tuple[float, ...] = ()  # of the GPU, 0 to 1, at each look
        self._last = begin
        self._most_gap = most_gap
        self._watts: float | None = None
        self._joules = 0.0
        self._samples = 0
        self._gap = False

    def add(self, now: float, watts: float) -> None:
        """One sample. From the begin to the first sample the draw is taken to be that of the first."""
        before = watts if self._watts is None else self._watts
        self._extend(now, (before + watts) / 2)
        self._watts, self._samples = watts, self._samples + 1

    def close(self, now: float) -> None:
        """From the last sample to the end the draw is taken to be that of the last."""
        self._extend(now, self._watts or 0.0)

    def lose(self) -> None:
        """Nothing more is measured, though the answer goes on."""
        self._gap = True

    def _extend(self, now: float, watts: float) -> None:
        seconds = max(0.0, now - self._last)
        self._gap = self._gap or seconds > self._most_gap
        self._joules += watts * seconds
        self._last += seconds

    @property
    def gpu_load(self) -> float | None:
        """Mean of the looks, 0 to 1; None where the GPU does not tell it."""
        return sum(self.loads) / len(self.loads) if self.loads else None

    @property
    def joules(self) -> float | None:
        """So far; None unless there are two samples or more without a gap between them."""
        return self._joules if self._samples > 1 and not self._gap else None


class Sampler:
    """Measures answers. `root`: where /proc and /sys are looked for. `source`: of the watts, None where there is none.

    Its thread starts with the first answer. `close` ends it; answers that still run have no energy then.
    """

    def __init__(
        self,
        source: PowerSource | None,
        *,
        root: Path = SYSTEM_ROOT,
        tracer: Tracer | NullTracer = NULL_TRACER,
        floor: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """floor: bytes of available memory below which memory is called short, None = 5%, at most 256 MiB."""
        self._source = source
        self._root = root
        self._tracer = tracer
        self._clock = clock
        self._floor = Limits.of(topology.host_total_bytes(root)).floor if floor is None else floor
        self._rails = find_rails(root)
        # Of the meters, and of the source. A stream that nobody ended is ended by the collector, in whatever thread.
        self._lock = threading.RLock()
        self._awake = threading.Event()
        self._meters: set[Meter] = set()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._told = False

    @classmethod
    def of_this_device(cls, tracer: Tracer | NullTracer = NULL_TRACER) -> Sampler:
        return cls(find_power(SYSTEM_ROOT), tracer=tracer)

    def begin(self) -> Meter:
        interval = 0.0 if self._source is None else self._source.interval
        meter = Meter(self._clock(), max(_MOST_GAP, 10 * interval))
        with self._lock:
            if self._source is not None and not self._closed:
                self._meters.add(meter)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="edgespec-power", daemon=True)
                    self._thread.start()
        self._awake.set()
        return meter

    def end(self, meter: Meter) -> None:
        """Close the account with one sample of now, and one look at heat and memory."""
        with self._lock:
            if meter in self._meters:
                self._sample()
                meter.close(self._clock())
                self._meters.discard(meter)
        self._look([meter])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for meter in tuple(self._meters):
                meter.lose()
            self._meters.clear()
        self._awake.set()
        if self._thread is not None:
            self._thread.join(2.0)
        if self._source is not None:
            self._source.close()

    def _run(self) -> None:
        assert self._source is not None
        lower_priority()
        looked = -_LOOK_SECONDS
        while True:
            with self._lock:
                if self._closed:
                    return
                if not self._meters:
                    self._awake.clear()
                self._sample()
                meters = list(self._meters)
            if meters and self._clock() - looked >= _LOOK_SECONDS:
                looked = self._clock()
                self._look(meters)
            if meters:
                time.sleep(self._source.interval)
            else:
                self._awake.wait()

    def _sample(self) -> None:
        """Give the watts of now to all meters; a rail that vanished leaves a gap. Holds the lock."""
        if self._source is None or not self._meters:
            return
        begin = self._clock()
        watts = self._source.watts()
        now = self._clock()
        if watts is None:
            if not self._told:
                _log.warning("%s does not tell the power any more: answers have no energy", self._source.name)
            self._told = True
            return
        self._told = False
        for meter in tuple(self._meters):
            meter.add(now, watts)
        self._tracer.event(f"{watts:.1f} W", int(begin * 1e9), int(now * 1e9), lane=LANE, watts=watts)

    def _look(self, meters: list[Meter]) -> None:
        """Note in each meter, and in the trace, what slows the device down now, and how busy the GPU is."""
        begin = self._clock()
        notes = {f"throttled: {cause}": f"throttled: {cause}" for cause in throttling(self._root, self._rails)}
        available = topology.host_available_bytes(self._root)
        if available < self._floor:
            notes["memory"] = f"memory low: {available // _MIB} MiB left"
        for note in notes.values():
            self._tracer.event(note, int(begin * 1e9), int(self._clock() * 1e9), lane=LANE)
        clock = gpu_clock(self._root)
        load = None if clock is None else clock.load
        if clock is not None and load is not None:
            name = f"GPU {load:.0%}" + ("" if clock.hertz is None else f" at {clock.hertz / 1e6:.0f} MHz")
            self._tracer.event(name, int(begin * 1e9), int(self._clock() * 1e9), lane=LANE, gpu_load=load)
        for meter in meters:
            meter.notes = {**notes, **meter.notes}  # replaced, not changed: another thread may be reading it
            if load is not None:
                meter.loads = (*meter.loads, load)
