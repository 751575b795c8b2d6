"""Who else used the processor while one contender ran: what makes a number worth less."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Protocol

import psutil

SHORTEST = 0.05  # seconds; the system counts processor time in steps of about 0.01 s


class HasCpuSeconds(Protocol):
    """Anything that knows how much processor time it has used."""

    def cpu_seconds(self) -> float: ...


def _busy_seconds() -> float:
    """Seconds that all processors together have been busy since boot."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


class Watch:
    """Started right before a run; `shares` right after it."""

    def __init__(self, worker: HasCpuSeconds, idle: Sequence[HasCpuSeconds]) -> None:
        self._worker, self._idle = worker, list(idle)
        self._before = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        idle = sum(other.cpu_seconds() for other in self._idle)
        return time.perf_counter(), _busy_seconds(), self._worker.cpu_seconds(), idle

    def shares(self) -> tuple[float, float]:
        """Of all processor time of this machine during the run: other processes' share, and that of idle contenders."""
        wall, busy, own, idle = (after - before for after, before in zip(self._read(), self._before))
        whole = wall * (os.cpu_count() or 1)
        if wall < SHORTEST:
            return 0.0, 0.0
        return max(0.0, min(1.0, (busy - own - idle) / whole)), max(0.0, idle / whole)
