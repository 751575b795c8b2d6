"""When memory gets short the working set shrinks, down to none; when it has been calm for a while, it grows again.

Two signs, either of which is enough to give up one slot at a time:
- available memory (of the system within all limits, or what a GPU's allocator can still give) is below a floor;
- the kernel's pressure stall information says that tasks often wait for memory, while not much of it is available.
  (Stalls alone prove little: they are also counted for other programs that hit limits of their own.)
It grows by one slot when neither holds, and what that slot would take is available beyond the floor and a margin, all
through a calm time. The margin and the calm time are the hysteresis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.memory.budget import format_bytes
from edgespec.memory.topology import Topology

_MOST_FLOOR = 256 << 20
_FLOOR_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """floor: bytes that must stay available. margin: what must be available beyond it, after growing.

    stalled, calm: percent of the last 10 seconds in which some task waited for memory: above the first is pressure,
    below the second is none. calm_seconds: how long all must be well. step_seconds: between two steps, so that the
    first one can be seen in the readings. look_seconds: between two readings, of which one takes up to a millisecond
    (the kernel adds up a control group's pages for it).
    """

    floor: int
    margin: int
    stalled: float = 10.0
    calm: float = 2.0
    calm_seconds: float = 10.0
    step_seconds: float = 1.0
    look_seconds: float = 1.0

    @classmethod
    def of(cls, total_bytes: int) -> Limits:
        """For a device with that much memory: a floor of 5%, at most 256 MiB, and half of it as margin."""
        floor = min(_MOST_FLOOR, int(total_bytes * _FLOOR_SHARE))
        return cls(floor, floor // 2)


@dataclass(frozen=True, slots=True)
class Reading:
    """available: bytes. stalled: percent (PSI "some", avg10), None where the kernel does not tell."""

    available: int
    stalled: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The new capacity, and why, in words and numbers."""

    capacity: int
    reason: str


class PressureMonitor:
    """Says when the capacity should change. Not locked: one thread calls `check`.

    read: what there is now. slots: the most that can be used; slot_bytes: what one takes when it is filled.
    """

    def __init__(self, read: Callable[[], Reading], limits: Limits, *, slots: int, slot_bytes: int) -> None:
        self._read = read
        self._limits = limits
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._calm_since: float | None = None
        self._stepped = self._looked = float("-inf")

    @classmethod
    def of(
        cls,
        topology: Topology,
        *,
        slots: int,
        slot_bytes: int,
        allocator: Callable[[], int] | None = None,
        limits: Limits | None = None,
    ) -> PressureMonitor:
        """Watches the memory of `topology`.

        allocator: bytes that the device's allocator can still give, read beside the system's; the lesser one counts.
        """

        def read() -> Reading:
            available = topology.available_bytes()
            if allocator is not None:
                available = min(available, allocator())
            return Reading(available, stalled_percent(topology.root))

        return cls(read, limits or Limits.of(topology.total_bytes), slots=slots, slot_bytes=slot_bytes)

    def check(self, now: float, capacity: int) -> Step | None:
        """The change to make now (seconds of any steady clock), if any. May be called as often as one likes."""
        if now - self._looked < self._limits.look_seconds:
            return None
        self._looked = now
        reading = self._read()
        pressed = self._pressed(reading)
        if pressed or not self._room(reading) or capacity >= self._slots:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        if now - self._stepped < self._limits.step_seconds:
            return None
        if pressed and capacity > 0:
            self._stepped = now
            return Step(capacity - 1, pressed)
        if self._calm_since is not None and now - self._calm_since >= self._limits.calm_seconds:
            self._stepped, self._calm_since = now, None
            return Step(capacity + 1, f"{format_bytes(reading.available)} are available, calm for a while")
        return None

    def _pressed(self, reading: Reading) -> str:
        """What is wrong, or ""."""
        limits, available = self._limits, format_bytes(reading.available)
        if reading.available < limits.floor:
            return f"{available} are available, less than the {format_bytes(limits.floor)} to be left"
        if reading.stalled is not None and reading.stalled >= limits.stalled and not self._plenty(reading):
            return f"programs wait for memory {reading.stalled:.0f}% of the time, {available} are available"
        return ""

    def _plenty(self, reading: Reading) -> bool:
        """Whether what is available is so much that stalls must have another cause."""
        return reading.available >= 4 * (self._limits.floor + self._limits.margin + self._slot_bytes)

    def _room(self, reading: Reading) -> bool:
        limits = self._limits
        stalled = reading.stalled is not None and reading.stalled >= limits.calm and not self._plenty(reading)
        return not stalled and reading.available >= limits.floor + limits.margin + self._slot_bytes


def stalled_percent(root: Path = Path("/")) -> float | None:
    """PSI: the share of the last 10 seconds in which some task waited for memory, or None."""
    try:
        first = (root / "proc/pressure/memory").read_text().splitlines()[0]
        fields = dict(field.split("=", 1) for field in first.split()[1:])
        return float(fields["avg10"])
    except (OSError, ValueError, KeyError, IndexError):
        return None
