"""The working set shrinks, grows, meets storage that hangs, and closes at any state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from edgespec.memory.working_set import State, WorkingSet
from tests.support.loadables import WAIT, Clock, Events, ScriptedDraft
from tests.support.working_sets import hold, resident, state

Make = Callable[..., WorkingSet]


def test_shrinking_and_growing(make: Make, events: Events, caplog: pytest.LogCaptureFixture) -> None:
    working_set = make()
    hold(working_set, "a", "b")
    working_set.set_capacity(1, "test pressure")
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"a"}
    assert working_set.capacity == 1
    assert "1 of 2 draft slots are used from now on: test pressure" in caplog.text
    working_set.set_capacity(-5, "more pressure")
    assert working_set.idle(WAIT)
    assert resident(working_set) == set()
    assert working_set.capacity == 0
    working_set.set_capacity(7, "calm")
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"a", "b"}  # still wanted
    assert [(event.kind, event.reason) for event in events.all if event.kind in ("shrink", "grow")] == [
        ("shrink", "2 to 1 slots: test pressure"),
        ("shrink", "1 to 0 slots: more pressure"),
        ("grow", "0 to 2 slots: calm"),
    ]


def test_shrinking_calls_a_load_off(make: Make, drafts: dict[str, ScriptedDraft], events: Events) -> None:
    working_set = make()
    hold(working_set, "a")
    drafts["b"].gate.clear()
    working_set.retarget(["a", "b"], reason="test")
    assert drafts["b"].entered.wait(WAIT)
    working_set.set_capacity(1, "test pressure")
    events.wait("cancel")
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"a"}


def test_a_load_that_hangs_costs_one_slot_until_it_comes_back(
    make: Make, drafts: dict[str, ScriptedDraft], events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    working_set = make(clock=clock, stall_seconds=5.0)
    drafts["a"].hang = threading.Event()
    working_set.retarget(["a", "b"], reason="test")
    assert drafts["a"].entered.wait(WAIT)
    clock.now += 4.9
    working_set.tick()
    assert not events.of("stuck")
    clock.now += 0.2
    working_set.tick()
    assert events.wait("stuck").draft == "a"
    assert working_set.idle(WAIT)  # another thread went on
    assert resident(working_set) == {"b"}
    assert state(working_set, "a") is State.FAILED
    assert "its load hangs" in caplog.text
    clock.now += 1000
    hold(working_set, "a", "c", "b")  # its thread is still in it: it is not touched, and "c" cannot have its slot
    assert drafts["a"].loads == 1
    assert resident(working_set) == {"c"}
    hanging, drafts["a"].hang = drafts["a"].hang, None
    hanging.set()
    events.wait("late")
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"a", "c"}  # tried again, in the slot that came back
    assert drafts["a"].loads == 2
    assert working_set.counters.failures == 1


def test_a_read_that_goes_on_after_it_was_called_off_is_given_up_sooner(
    make: Make, drafts: dict[str, ScriptedDraft], events: Events
) -> None:
    clock = Clock()
    working_set = make(clock=clock)
    drafts["a"].hang = threading.Event()
    working_set.retarget(["a"], reason="test")
    assert drafts["a"].entered.wait(WAIT)
    working_set.retarget(["b"], reason="test")
    clock.now += 1.1
    working_set.tick()
    events.wait("stuck")
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"b"}


def test_closing_while_a_load_hangs_takes_a_bounded_time(
    make: Make, drafts: dict[str, ScriptedDraft], caplog: pytest.LogCaptureFixture
) -> None:
    working_set = make(close_seconds=0.05)
    hold(working_set, "b")
    drafts["a"].hang = threading.Event()
    working_set.retarget(["a", "b"], reason="test")
    assert drafts["a"].entered.wait(WAIT)
    begin = time.perf_counter()
    working_set.close()
    assert time.perf_counter() - begin < 1.0
    assert "does not end" in caplog.text
    assert not drafts["b"].loaded
    drafts["a"].hang.set()
    deadline = time.monotonic() + WAIT
    while drafts["a"].loads != drafts["a"].unloads and not drafts["a"]._inside.acquire(timeout=0.01):
        assert time.monotonic() < deadline


@pytest.mark.parametrize("moment", ["new", "loading", "resident", "leaving", "failed", "closed"])
def test_closing_at_any_state(make: Make, drafts: dict[str, ScriptedDraft], moment: str) -> None:
    working_set = make(slots=1, close_seconds=0.2, watch_seconds=0.01)
    lease = None
    if moment == "loading":
        drafts["a"].gate.clear()
        working_set.retarget(["a"], reason="test")
        assert drafts["a"].entered.wait(WAIT)
    elif moment != "new":
        drafts["a"].errors = [MemoryError()] if moment == "failed" else []
        hold(working_set, "a")
    if moment == "leaving":
        lease = working_set.acquire()
        working_set.retarget(["b"], reason="test")
        threading.Timer(0.02, lease.release).start()
    working_set.close()
    working_set.close()
    assert not drafts["a"].loaded
    assert resident(working_set) == set()
    working_set.retarget(["a"], reason="after the end")
    working_set.set_capacity(0, "after the end")
    assert not working_set.wait_for("a", WAIT)
    names = {thread.name for thread in threading.enumerate()}
    assert not {"edgespec-loader", "edgespec-watch"} & names


def test_closing_leaves_what_a_lease_still_has(
    make: Make, drafts: dict[str, ScriptedDraft], caplog: pytest.LogCaptureFixture
) -> None:
    working_set = make(close_seconds=0.02)
    hold(working_set, "a", "b")
    lease = working_set.acquire()
    working_set.close()
    assert drafts["a"].loaded
    assert drafts["b"].loaded
    assert "still in use" in caplog.text
    lease.release()
    for name in "ab":
        drafts[name].unload()


def test_logging_level_of_growth(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    working_set = make()
    working_set.set_capacity(1, "x")
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        working_set.set_capacity(2, "y")
    assert caplog.records == []
