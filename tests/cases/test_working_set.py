"""Fault cases of the kinds "Memory, loading" and "Threads" that meet the working set, with real files and threads."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafts.base import LoadCancelled, LoadControl, Slot
from edgespec.errors import DraftError
from edgespec.memory.pressure import Limits, PressureMonitor, Reading
from edgespec.memory.topology import process_memory
from edgespec.memory.working_set import State, WorkingSet
from tests.support.loadables import WAIT, Clock, Events, ScriptedDraft, address

MIB = 1 << 20


class FileDraft:
    """A Loadable that reads its weights from a file into its slot, as heads do, and checks them.

    The file is filled with one number. size: that it must have.
    """

    kind = "head"

    def __init__(self, name: str, path: Path, size: int, number: int) -> None:
        self.name = name
        self.path = path
        self.number = number
        self.slot_bytes = self.buffer_bytes = size
        self.weights: np.ndarray | None = None
        self.addresses: list[int] = []
        self.users = 0
        self.problems: list[str] = []
        path.write_bytes(bytes([number]) * size)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def loaded(self) -> bool:
        return self.weights is not None

    def load(self, slot: Slot, control: LoadControl) -> None:
        buffer = slot.buffer[: self.buffer_bytes]
        fd = os.open(self.path, os.O_RDONLY)
        try:
            control.read(fd, buffer, 0)
        finally:
            os.close(fd)
        weights = np.frombuffer(buffer, np.uint8)
        if not (weights[::997] == self.number).all():  # a comparison of all would take memory of its own
            raise DraftError(f"{self.path}: holds other weights")
        self.addresses.append(address(buffer))
        self.weights = weights

    def unload(self) -> None:
        if self.users:
            self.problems.append(f"{self.name} is unloaded in use")
        if self.weights is not None:
            self.weights[:] = 255  # whoever still looks at them notices
        self.weights = None

    def use(self) -> None:
        self.users += 1
        if self.weights is None or self.weights[0] != self.number or self.weights[-1] != self.number:
            self.problems.append(f"{self.name} is used but not there")
        self.users -= 1


@pytest.fixture
def files(tmp_path: Path) -> list[FileDraft]:
    return [FileDraft(name, tmp_path / name, MIB + 77, number) for number, name in enumerate("abc", start=1)]


@pytest.fixture
def open_set() -> Iterator[Callable[..., WorkingSet]]:
    made: list[WorkingSet] = []

    def build(drafts: Any, **options: Any) -> WorkingSet:
        made.append(WorkingSet(drafts, **{"slots": 2, "watch_seconds": None, **options}))
        return made[-1]

    yield build
    for each in made:
        each.close()


def hold(working_set: WorkingSet, *names: str, in_use: str | None = None) -> None:
    working_set.retarget(names, reason="test", in_use=in_use)
    assert working_set.idle(WAIT)


def resident(working_set: WorkingSet) -> set[str]:
    with working_set.acquire() as lease:
        return set(lease.names)


def test_slots_are_reused_and_each_byte_is_read_once(
    files: list[FileDraft], open_set: Callable[..., WorkingSet]
) -> None:
    """B133: bytes read are those of the files, and no load brings memory of its own."""
    working_set = open_set(files)
    names = ["a", "b", "c"]
    for turn in range(30):
        hold(working_set, names[turn % 3], names[(turn + 1) % 3])
    counters = working_set.counters
    assert counters.loads > 10
    assert counters.bytes_read == counters.loads * (MIB + 77)  # well below 1.1 times
    assert len({where for draft in files for where in draft.addresses}) == 2
    assert counters.loads - counters.evictions == len(resident(working_set)) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures resident memory")
def test_memory_is_flat_over_200_loads(files: list[FileDraft], open_set: Callable[..., WorkingSet]) -> None:
    """B127."""
    working_set = open_set(files, slots=1)
    sizes = []
    for turn in range(200):
        hold(working_set, "abc"[turn % 3])
        if turn % 20 == 19:
            gc.collect()
            sizes.append(process_memory())
    assert working_set.counters.loads == 200
    assert max(sizes[2:]) - sizes[1] < MIB // 2


@pytest.mark.parametrize("damage", ["removed", "truncated", "replaced", "unreadable"])
@pytest.mark.parametrize("when", ["cold", "warm", "loading", "resident"])
def test_a_file_is_damaged_at_any_state(
    files: list[FileDraft],
    open_set: Callable[..., WorkingSet],
    damage: str,
    when: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B018, B019: one warning that names draft and cause; what is resident is left alone; whole again, it loads."""
    first, other = files[0], files[1]
    clock, events = Clock(), Events()
    working_set = open_set(files, slots=1, clock=clock, on_event=events)
    content = first.path.read_bytes()

    def harm() -> None:
        if damage == "removed":
            first.path.unlink()
        elif damage == "truncated":
            os.truncate(first.path, 1000)
        elif damage == "replaced":
            first.path.write_bytes(bytes([99]) * len(content))
        else:
            first.path.unlink()
            first.path.mkdir()

    if when == "warm":
        hold(working_set, "b", "a")
        assert working_set.states()["a"].state is State.WARM
    if when == "resident":
        hold(working_set, "a")
        harm()
        with working_set.acquire() as lease:
            assert lease.names == {"a"}
            first.use()
        hold(working_set, "b")
    elif when == "loading":
        original = first.load
        first.load = lambda *given: (harm(), original(*given))[1]  # type: ignore[method-assign]
    else:
        harm()
    hold(working_set, "a", "b")
    state = working_set.states()["a"]
    assert state.state is State.FAILED
    assert resident(working_set) == {"b"}  # the next in the ranking
    assert len(caplog.records) == 1
    assert "draft a cannot be loaded" in caplog.text
    words = {"removed": "No such file", "truncated": "is incomplete", "replaced": "other weights"}
    assert words.get(damage, "directory") in state.reason
    if when == "loading":
        first.load = original  # type: ignore[method-assign]
    if damage == "unreadable":
        first.path.rmdir()
    first.path.write_bytes(content)
    clock.now += 100
    hold(working_set, "a", in_use="a")
    events.wait("load", 2 if when != "resident" else 3)
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"a"}
    assert [problem for draft in (first, other) for problem in draft.problems] == []


def test_a_damaged_file_is_only_read_again_when_it_has_changed(
    files: list[FileDraft], open_set: Callable[..., WorkingSet]
) -> None:
    """B018: not in a hot loop, not even after any time."""
    clock, loads = Clock(), []
    draft = files[0]
    os.truncate(draft.path, 10)
    original = draft.load
    draft.load = lambda *given: (loads.append(1), original(*given))[1]  # type: ignore[method-assign]
    working_set = open_set(files, clock=clock)
    for turn in range(5):
        hold(working_set, "a", in_use=str(turn))
        clock.now += 1e6
    assert len(loads) == 1
    draft.path.write_bytes(bytes([1]) * (MIB + 77))
    hold(working_set, "a", in_use="again")
    clock.now += 1e6
    hold(working_set, "a", in_use="and again")
    assert working_set.wait_for("a", WAIT) or resident(working_set) == {"a"}
    assert len(loads) == 2


@pytest.mark.parametrize("rate", [1e6, 100e6])
def test_cancelled_within_50_ms(
    files: list[FileDraft], open_set: Callable[..., WorkingSet], tmp_path: Path, rate: float | None
) -> None:
    """B145 midway, with a file of 64 MiB."""
    large = FileDraft("large", tmp_path / "large", 64 * MIB, 7)
    events = Events()
    working_set = open_set([large, *files], slots=1, rate=rate, on_event=events)
    working_set.retarget(["large"], reason="test")
    while working_set.states()["large"].state is not State.LOADING:
        time.sleep(0.0005)
    time.sleep(0.005)
    begin = time.perf_counter_ns()
    working_set.retarget(["a"], reason="test")
    called = time.perf_counter_ns()
    ended = events.wait("cancel").end_ns
    assert called - begin < 10e6  # the caller does not wait
    assert ended - begin < 50e6
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"a"}
    assert not large.loaded


def test_weights_are_right_while_eight_threads_use_them(
    files: list[FileDraft], open_set: Callable[..., WorkingSet]
) -> None:
    """B006, B143: loads go on beside eight threads; each sees whole weights, of the right draft, until it lets go."""
    working_set = open_set(files)
    by_name = {draft.name: draft for draft in files}
    stop, used = threading.Event(), [0] * 8

    def rounds(number: int) -> None:
        while not stop.is_set():
            with working_set.acquire() as lease:
                for name in lease.names:
                    weights = by_name[name].weights
                    if weights is None or not (weights[::4096] == by_name[name].number).all():
                        by_name[name].problems.append("wrong weights")
                        return
                    used[number] += 1
            time.sleep(0.0005)

    threads = [threading.Thread(target=rounds, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        hold(working_set, "abc"[turn % 3], "abc"[(turn + 1) % 3])
    stop.set()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    assert [problem for draft in files for problem in draft.problems] == []
    assert min(used) > 0
    assert working_set.counters.loads >= 60


def storm(working_set: WorkingSet, drafts: dict[str, ScriptedDraft], seed: int, turns: int) -> None:
    """One thread's part: random wishes, and random rounds under leases."""
    rng = random.Random(seed)
    names = list(drafts)
    for turn in range(turns):
        wanted = rng.sample(names, rng.randrange(len(names) + 1))
        working_set.retarget(wanted, reason=f"storm {seed}.{turn}", in_use=rng.choice([None, *names]))
        with working_set.acquire() as lease:
            for name in sorted(lease.names):
                drafts[name].use()
            if turn % 3 == 0:
                time.sleep(rng.random() * 0.008)  # others retarget meanwhile
                for name in sorted(lease.names):
                    drafts[name].use()
        if turn % 100 == seed:
            working_set.set_capacity(rng.randrange(4), "storm")
        if turn % 40 == seed:
            working_set.wait_for(rng.choice(names), 0.001)


class BusyDraft(ScriptedDraft):
    """Loads take a few checkpoints; now and then one fails. `users` are counted right from several threads."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, slot_bytes=100)
        self.rng = random.Random(seed)
        self.begun = 0
        self._count = threading.Lock()

    def load(self, slot: Slot, control: LoadControl) -> None:
        self.begun += 1
        if self.loaded:
            self.problems.append(f"{self.name} was loaded already")
        for _ in range(self.rng.randrange(4)):
            time.sleep(0.0002)
            control.checkpoint()
        if self.begun % 6 == 0:
            raise self.rng.choice([MemoryError(), OSError(5, "I/O error")])
        self.loaded = True

    def use(self) -> None:
        with self._count:
            self.users += 1
        if not self.loaded:
            self.problems.append(f"{self.name} is used but not loaded")
        time.sleep(0)
        if not self.loaded:
            self.problems.append(f"{self.name} went in use")
        with self._count:
            self.users -= 1


def test_a_storm_of_retargets(open_set: Callable[..., WorkingSet]) -> None:
    """B021: 2,000 random retargets and leases from 4 threads. No deadlock, nothing freed in use, no slot lost."""
    drafts = {name: BusyDraft(name, number) for number, name in enumerate("abcdef")}
    working_set = open_set(list(drafts.values()), slots=3, retry_seconds=0.001, watch_seconds=0.01)
    threads = [threading.Thread(target=storm, args=(working_set, drafts, seed, 500), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)  # the watchdog
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    working_set.set_capacity(3, "over")
    working_set.retarget([], reason="over")
    assert working_set.idle(WAIT)
    assert [problem for draft in drafts.values() for problem in draft.problems] == []
    counters, now = working_set.counters, resident(working_set)
    assert now == {name for name, draft in drafts.items() if draft.loaded}
    assert counters.loads - counters.evictions == len(now)
    # A load that was called off before it began is counted and never seen by the draft.
    begun = sum(draft.begun for draft in drafts.values())
    assert begun <= counters.loads + counters.cancelled + counters.failures <= begun + counters.cancelled
    assert counters.loads > 0
    assert counters.cancelled > 0
    assert counters.failures > 0
    pool = working_set._books.schedule.pool
    assert pool.free + pool.resting + len(now) == 3
    taken = [state.slot for state in working_set.states().values() if state.slot is not None]
    assert len(set(taken)) == len(taken) == len(now)
    # It still works: whatever three are wanted next come.
    healthy = ScriptedDraft("healthy")
    working_set.add(healthy)
    working_set.retarget(["healthy"], reason="after", in_use=None)
    assert working_set.wait_for("healthy", WAIT)


def test_memory_pressure_shrinks_to_none_and_grows_back(
    files: list[FileDraft], open_set: Callable[..., WorkingSet]
) -> None:
    """B128: instead of being killed, drafts go one by one; when there is room again, they come back."""
    clock, events = Clock(), Events()
    available = 10 * MIB
    monitor = PressureMonitor(
        lambda: Reading(available), Limits(4 * MIB, MIB, calm_seconds=2.0), slots=2, slot_bytes=MIB
    )
    working_set = open_set(files, clock=clock, on_event=events, pressure=monitor)
    hold(working_set, "a", "b")

    def passes(seconds: int) -> list[int]:
        seen = []
        for _ in range(seconds):
            clock.now += 1.0
            working_set.tick()
            assert working_set.idle(WAIT)
            seen.append(len(resident(working_set)))
        return seen

    assert passes(3) == [2, 2, 2]
    available = 3 * MIB
    assert passes(3) == [1, 0, 0]
    assert working_set.capacity == 0
    available = 20 * MIB
    assert passes(7) == [0, 0, 1, 1, 1, 2, 2]
    assert {event.kind for event in events.all} >= {"load", "evict", "shrink", "grow"}
    reasons = [event.reason for event in events.all if event.kind in ("shrink", "grow")]
    assert reasons[0] == "2 to 1 slots: 3.0 MiB are available, less than the 4.0 MiB to be left"
    assert reasons[-1].startswith("1 to 2 slots: 20.0 MiB are available")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures resident memory")
def test_shrinking_gives_the_memory_back(tmp_path: Path, open_set: Callable[..., WorkingSet]) -> None:
    drafts = [FileDraft(name, tmp_path / name, 16 * MIB, 3) for name in "ab"]
    before = process_memory()
    working_set = open_set(drafts)
    hold(working_set, "a", "b")
    assert process_memory() - before > 28 * MIB
    working_set.set_capacity(0, "test")
    assert working_set.idle(WAIT)
    assert process_memory() - before < 8 * MIB
    working_set.set_capacity(2, "test")
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"a", "b"}
    assert {len(set(draft.addresses)) for draft in drafts} == {1}  # the very same slots


def test_a_wish_changed_while_it_is_read_ahead(files: list[FileDraft], open_set: Callable[..., WorkingSet]) -> None:
    """Files that are gone before a read-ahead are no failure: nobody has asked for the draft yet."""
    files[1].path.unlink()
    working_set = open_set(files, slots=1)
    hold(working_set, "a", "b", "c")
    assert working_set.states()["b"].state is State.COLD
    assert working_set.states()["c"].state is State.WARM
    assert working_set.counters.failures == 0


def test_a_load_that_claims_to_be_called_off_is_a_failure(open_set: Callable[..., WorkingSet]) -> None:
    """Else it would be begun again at once, forever."""
    draft = ScriptedDraft("a")
    draft.errors = [LoadCancelled()]
    working_set = open_set([draft], clock=Clock())
    hold(working_set, "a")
    assert working_set.states()["a"].state is State.FAILED
    assert draft.loads == 1


def test_a_draft_that_says_nothing_about_its_files(open_set: Callable[..., WorkingSet]) -> None:
    """Whatever `files` raises, the load decides."""

    class Odd(ScriptedDraft):
        @property
        def files(self) -> tuple[Path, ...]:
            raise DraftError("no folder")

        @files.setter
        def files(self, value: object) -> None: ...

        def _read(self, slot: Slot, control: LoadControl) -> None: ...

    working_set = open_set([Odd("a"), Odd("b")], slots=1)
    hold(working_set, "a", "b")
    assert resident(working_set) == {"a"}
