"""When the working set shrinks and grows: made-up readings, and a clock that is told to go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.memory.pressure import Limits, PressureMonitor, Reading, stalled_percent
from edgespec.memory.topology import Topology
from tests.support.loadables import Clock

MIB = 1 << 20
LIMITS = Limits(floor=100 * MIB, margin=50 * MIB, look_seconds=0.0)


class World:
    """available, stalled: what the next look will find."""

    def __init__(self, slots: int = 3, slot_bytes: int = 40 * MIB) -> None:
        self.available = 1000 * MIB
        self.stalled: float | None = 0.0
        self.clock = Clock()
        self.capacity = slots
        self.reasons: list[str] = []
        self.monitor = PressureMonitor(
            lambda: Reading(self.available, self.stalled), LIMITS, slots=slots, slot_bytes=slot_bytes
        )

    def run(self, seconds: float, every: float = 0.25) -> list[int]:
        """The capacities that the time passes through, the first one included."""
        seen = [self.capacity]
        for _ in range(int(seconds / every)):
            self.clock.now += every
            step = self.monitor.check(self.clock.now, self.capacity)
            if step is not None:
                self.capacity = step.capacity
                self.reasons.append(step.reason)
                seen.append(step.capacity)
        return seen


def test_short_memory_takes_slot_by_slot_down_to_none() -> None:
    world = World()
    assert world.run(60) == [3]
    world.available = 99 * MIB
    assert world.run(0.25) == [3, 2]
    assert world.reasons == ["99.0 MiB are available, less than the 100.0 MiB to be left"]
    assert world.run(0.75) == [2]  # what the first step freed must show before the next one
    assert world.run(5) == [2, 1, 0]


def test_it_stops_when_there_is_enough_again() -> None:
    world = World()
    world.available = 99 * MIB
    world.run(0.25)
    world.available = 120 * MIB
    assert world.run(60) == [2]


def test_growing_needs_room_for_the_slot_and_a_calm_time() -> None:
    world = World()
    world.available = 99 * MIB
    world.run(10)
    assert world.capacity == 0
    world.available = 189 * MIB  # the floor, the margin and a slot: 190
    assert world.run(60) == [0]
    world.available = 190 * MIB
    assert world.run(9.75) == [0]
    world.available = 189 * MIB  # the calm begins anew
    world.run(0.25)
    world.available = 190 * MIB
    assert world.run(10) == [0]
    assert world.run(0.5) == [0, 1]
    assert "190.0 MiB are available" in world.reasons[-1]
    world.available = 2000 * MIB
    assert world.run(60) == [1, 2, 3]


@pytest.mark.parametrize(("stalled", "expected"), [(9.0, [3]), (10.0, [3, 2, 1, 0])])
def test_waiting_for_memory_is_pressure_too(stalled: float, expected: list[int]) -> None:
    world = World()
    world.available, world.stalled = 500 * MIB, stalled
    assert world.run(30) == expected


def test_stalls_while_there_is_plenty_have_another_cause() -> None:
    world = World()
    world.available, world.stalled = 4 * 190 * MIB, 80.0
    assert world.run(30) == [3]


def test_it_does_not_grow_while_programs_wait() -> None:
    world = World()
    world.available = 99 * MIB
    world.run(10)
    world.available, world.stalled = 500 * MIB, 3.0
    assert world.run(60) == [0]
    world.stalled = None  # a kernel that does not tell
    assert world.run(60) == [0, 1, 2, 3]


def test_readings_of_a_system_and_of_an_allocator(tmp_path: Path) -> None:
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    psi = tmp_path / "proc/pressure/memory"
    psi.write_text("some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=99.00 avg60=0 avg300=0 total=1\n")
    assert stalled_percent(tmp_path) == 12.5
    topology = Topology("cpu", 8 << 30, root=tmp_path)
    free = 8 << 30
    monitor = PressureMonitor.of(topology, slots=2, slot_bytes=MIB, allocator=lambda: free)
    assert monitor._read() == Reading(4 << 30, 12.5)
    free = 5
    assert monitor.check(0.0, 2) is not None  # the device's allocator has nothing left


@pytest.mark.parametrize("text", ["", "some\n", "some avg10=x\n", "some total=1\n"])
def test_pressure_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    assert stalled_percent(tmp_path) is None
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/pressure/memory").write_text(text)
    assert stalled_percent(tmp_path) is None


def test_limits_follow_the_device() -> None:
    assert Limits.of(1 << 30).floor == int((1 << 30) * 0.05)
    assert Limits.of(64 << 30).floor == 256 * MIB


def test_readings_are_not_taken_more_often_than_needed() -> None:
    looks: list[float] = []
    now = 0.0

    def read() -> Reading:
        looks.append(now)
        return Reading(1000 * MIB)

    monitor = PressureMonitor(read, Limits(floor=1, margin=1, look_seconds=1.0), slots=1, slot_bytes=1)
    for tick in range(41):
        now = tick / 4
        monitor.check(now, 1)
    assert looks == [float(second) for second in range(11)]
