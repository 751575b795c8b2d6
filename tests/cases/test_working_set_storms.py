"""The working set under threads and memory pressure: fault cases of the kinds "Threads" and "Memory"."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drafts.base import LoadControl, Slot
from edgespec.memory.pressure import Limits, PressureMonitor, Reading
from edgespec.memory.topology import process_memory
from edgespec.memory.working_set import WorkingSet
from tests.support.loadables import WAIT, Clock, Events, ScriptedDraft
from tests.support.working_sets import FileDraft, hold, resident

MIB = 1 << 20


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
