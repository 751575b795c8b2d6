"""A working set whose memory is lent, and what pressure says meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgespec.memory.pressure import Limits, PressureMonitor, Reading
from edgespec.memory.working_set import WorkingSet
from tests.support.loadables import WAIT, Clock, ScriptedDraft

SLOT = 100
Make = Callable[..., WorkingSet]


@pytest.fixture
def drafts() -> list[ScriptedDraft]:
    return [ScriptedDraft(name, slot_bytes=SLOT) for name in "ab"]


@pytest.fixture
def make(drafts: list[ScriptedDraft]) -> Iterator[Make]:
    made: list[WorkingSet] = []

    def build(**options: Any) -> WorkingSet:
        made.append(WorkingSet(drafts, slots=2, watch_seconds=None, **options))
        made[-1].retarget(["a", "b"], reason="test")
        assert made[-1].idle(WAIT)
        return made[-1]

    yield build
    for each in made:
        each.close()
    assert [problem for draft in drafts for problem in draft.problems] == []


def loaded(drafts: list[ScriptedDraft]) -> list[str]:
    return [draft.name for draft in drafts if draft.loaded]


def test_what_pressure_said_before_holds_when_the_memory_is_back(make: Make, drafts: list[ScriptedDraft]) -> None:
    working_set = make()
    working_set.set_capacity(1, "the device is short")
    working_set.lend("test")
    assert working_set.idle(WAIT)
    assert (working_set.capacity, working_set.empty, loaded(drafts)) == (0, True, [])
    working_set.take_back("test")
    assert working_set.idle(WAIT)
    assert (working_set.capacity, loaded(drafts)) == (1, ["a"])
    working_set.set_capacity(2, "calm")
    assert working_set.idle(WAIT)
    assert loaded(drafts) == ["a", "b"]


def test_pressure_is_heard_while_the_memory_is_lent(make: Make, drafts: list[ScriptedDraft]) -> None:
    clock, available = Clock(), [1 << 30]
    limits = Limits(floor=1000, margin=100, calm_seconds=5.0)
    monitor = PressureMonitor(lambda: Reading(available[0]), limits, slots=2, slot_bytes=SLOT)
    working_set = make(pressure=monitor, clock=clock)

    def look(times: int) -> None:
        for _ in range(times):
            clock.now += 2.0
            working_set.tick()
        assert working_set.idle(WAIT)

    working_set.lend("test")
    available[0] = 10
    look(1)
    working_set.take_back("test")
    assert working_set.idle(WAIT)
    assert loaded(drafts) == ["a"]  # one slot less, as if the memory had never been lent
    working_set.lend("test")
    look(5)
    available[0] = 1 << 30
    look(5)
    assert (working_set.capacity, loaded(drafts)) == (0, [])
    working_set.take_back("test")
    assert working_set.idle(WAIT)
    assert loaded(drafts) == ["a"]  # calm for long enough for one


def test_one_that_begins_lent_loads_nothing_until_it_has_its_memory(make: Make, drafts: list[ScriptedDraft]) -> None:
    working_set = make(lent=True)
    assert working_set.lent
    assert (working_set.capacity, working_set.empty, loaded(drafts)) == (0, True, [])
    assert [draft.loads for draft in drafts] == [0, 0]
    assert not working_set.wait_for("a", WAIT)  # at once: it is not to be loaded
    working_set.take_back("test")
    assert working_set.idle(WAIT)
    assert (working_set.lent, loaded(drafts)) == (False, ["a", "b"])


def test_one_that_is_closed_has_no_memory_to_lend(make: Make) -> None:
    """It may be that of the working set in its place, which loads into it."""
    working_set = make(lent=True)
    assert working_set.empty
    working_set.close()
    assert not working_set.empty
