"""The working set: what is loaded, kept and evicted, what a lease protects, and what it tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from edgespec.memory import books
from edgespec.memory.working_set import State, WorkingSet
from edgespec.telemetry.trace import LOADS, Tracer
from tests.support.loadables import WAIT, Events, ScriptedDraft
from tests.support.working_sets import hold, resident, state

Make = Callable[..., WorkingSet]


def test_the_first_k_are_loaded_best_first_and_the_next_are_read_ahead(make: Make, events: Events) -> None:
    working_set = make()
    assert state(working_set, "a") is State.COLD
    hold(working_set, "b", "a", "c", "d")
    assert resident(working_set) == {"a", "b"}
    assert [event.draft for event in events.of("load")] == ["b", "a"]
    assert state(working_set, "c") is state(working_set, "d") is State.WARM
    assert {working_set.states()[name].slot for name in "ab"} == {0, 1}
    assert working_set.counters.loads == 2


def test_what_is_loaded_is_seen_by_the_next_lease_only(
    make: Make, drafts: dict[str, ScriptedDraft], events: Events
) -> None:
    working_set = make()
    drafts["a"].gate.clear()
    working_set.retarget(["a"], reason="test")
    assert drafts["a"].entered.wait(WAIT)
    assert state(working_set, "a") is State.LOADING
    lease = working_set.acquire()
    drafts["a"].gate.set()
    events.wait("load")
    assert lease.names == frozenset()
    assert resident(working_set) == {"a"}
    lease.release()
    lease.release()  # idempotent


def test_retargeting_to_the_same_does_nothing(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    working_set = make()
    for _ in range(3):
        hold(working_set, "a", "b")
        hold(working_set, "a", "ngram", "b", "a")  # names without weights and doubles are left out
    assert working_set.counters.loads == 2
    assert drafts["a"].loads == drafts["b"].loads == 1
    for _ in range(100):
        working_set.retarget(["a", "b"], reason="the same as before")
        assert working_set.idle(0)  # not even the loader wakes


def test_what_is_not_wanted_stays_until_its_slot_is_needed(make: Make, events: Events) -> None:
    working_set = make()
    hold(working_set, "a", "b")
    hold(working_set, "b")
    hold(working_set)
    assert resident(working_set) == {"a", "b"}
    hold(working_set, "c")  # room is made for one, and "a" is as little wanted as "b"
    assert len(resident(working_set)) == 2
    assert working_set.counters.evictions == 1
    assert "makes room for c" in events.of("evict")[0].reason


@pytest.mark.parametrize(("wanted", "stays"), [("cda", "a"), ("cdb", "b"), ("cdab", "a"), ("cdba", "b")])
def test_the_lowest_in_the_ranking_leaves_first(
    make: Make, drafts: dict[str, ScriptedDraft], wanted: str, stays: str
) -> None:
    working_set = make()
    hold(working_set, "a", "b")
    drafts["c"].gate.clear()
    working_set.retarget(wanted, reason="test")
    assert drafts["c"].entered.wait(WAIT)
    assert resident(working_set) == {stays}


@pytest.mark.parametrize("active", ["a", "b"])
def test_the_draft_in_use_leaves_last(make: Make, active: str) -> None:
    working_set = make()
    hold(working_set, "a", "b")
    hold(working_set, "c", in_use=active)
    assert resident(working_set) == {"c", active}
    hold(working_set, "c", "d", in_use=active)  # now there is no other way
    assert resident(working_set) == {"c", "d"}


def test_a_slot_is_freed_only_when_the_load_is_next(
    make: Make, drafts: dict[str, ScriptedDraft], events: Events
) -> None:
    """While the first of two new drafts loads, the second one's victim still works."""
    working_set = make()
    hold(working_set, "a", "b")
    drafts["c"].gate.clear()
    working_set.retarget(["c", "d"], reason="test", in_use="a")
    assert drafts["c"].entered.wait(WAIT)
    assert resident(working_set) == {"a"}
    drafts["c"].gate.set()
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"c", "d"}
    assert [event.draft for event in events.of("evict")] == ["b", "a"]


def test_a_leased_victim_is_unloaded_after_its_last_lease(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    working_set = make(slots=1)
    hold(working_set, "a")
    first, second = working_set.acquire(), working_set.acquire()
    drafts["a"].users = 1
    working_set.retarget(["b"], reason="test")
    assert not working_set.idle(0.05)
    assert state(working_set, "a") is State.LEAVING
    assert resident(working_set) == set()  # not offered any more
    first.release()
    assert not working_set.idle(0.05)
    assert drafts["a"].loaded
    drafts["a"].users = 0
    second.release()
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"b"}


def test_a_leaving_draft_that_is_wanted_again_stays(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    working_set = make(slots=1)
    hold(working_set, "a")
    with working_set.acquire():
        working_set.retarget(["b"], reason="test")
        assert not working_set.idle(0.02)
        working_set.retarget(["a"], reason="test")
        assert resident(working_set) == {"a"}
    assert working_set.idle(WAIT)
    assert drafts["a"].loads == 1
    assert drafts["b"].loads == 0
    assert working_set.counters.evictions == 0


def test_the_end_of_a_lease_wakes_the_loader(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "_POLL", 10 * WAIT)
    working_set = make(slots=1)
    hold(working_set, "a")
    lease = working_set.acquire()
    working_set.retarget(["b"], reason="test")
    assert not working_set.idle(0.02)
    lease.release()
    assert working_set.idle(WAIT)


def test_wanted_again_too_late(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    """B143: while it is being unloaded it is not offered; afterwards it is loaded again."""
    working_set = make(slots=1)
    hold(working_set, "a")
    unloading, go_on, unload = threading.Event(), threading.Event(), drafts["a"].unload

    def slowly() -> None:
        unloading.set()
        assert go_on.wait(WAIT)
        unload()

    drafts["a"].unload = slowly  # type: ignore[method-assign]
    working_set.retarget(["b"], reason="test")
    assert unloading.wait(WAIT)
    working_set.retarget(["a"], reason="test")
    assert state(working_set, "a") is State.LEAVING
    assert resident(working_set) == set()
    drafts["a"].unload = unload  # type: ignore[method-assign]
    go_on.set()
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"a"}
    assert drafts["a"].loads == 2


def test_a_lease_that_is_forgotten_ends(make: Make) -> None:
    working_set = make(slots=1)
    hold(working_set, "a")
    lease = working_set.acquire()
    working_set.retarget(["b"], reason="test")
    assert not working_set.idle(0.02)
    del lease
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"b"}


def test_drafts_can_be_added(make: Make) -> None:
    working_set = make()
    late = ScriptedDraft("late")
    working_set.add(late)
    hold(working_set, "late")
    assert resident(working_set) == {"late"}


def test_no_slots_no_threads(make: Make) -> None:
    before = threading.active_count()
    working_set = make(slots=0, watch_seconds=0.25)
    hold(working_set, "a")
    assert resident(working_set) == set()
    assert threading.active_count() == before
    assert not working_set.wait_for("a", 0.01)


def test_listeners_and_traces(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tracer, seen = Tracer(), []

    def listener(event: Any) -> None:
        seen.append(event)
        raise RuntimeError("a listener's own fault")

    working_set = make(slots=1, on_event=listener, tracer=tracer)
    hold(working_set, "a", "b")
    hold(working_set, "b", "a")
    assert resident(working_set) == {"b"}
    assert [event.kind for event in seen] == ["load", "warm", "evict", "load"]
    traced = tracer.events()
    assert [event.name for event in traced] == ["load a", "warm b", "evict a", "load b"]
    assert {event.lane for event in traced} == {LOADS}
    assert all(event.begin_ns <= event.end_ns and event.args["reason"] for event in traced)
    assert caplog.text.count("a listener to the working set failed") == 4


def test_acquiring_is_cheap(make: Make) -> None:
    working_set = make()
    hold(working_set, "a", "b")
    best = min(_acquire_seconds(working_set) for _ in range(20))
    assert best < 50e-6  # a few microseconds where nothing else runs


def _acquire_seconds(working_set: WorkingSet, repeats: int = 200) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        working_set.acquire().release()
    return (time.perf_counter() - begin) / repeats


def test_nothing_of_a_draft_runs_under_the_lock(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    """A load, an unload and a listener may themselves ask the working set."""
    working_set = make(slots=1, on_event=lambda event: working_set.states())
    for draft in drafts.values():
        draft.at_end = lambda: working_set.acquire().release()
        original = draft.unload
        draft.unload = lambda original=original: (working_set.states(), original())[1]  # type: ignore[method-assign]
    hold(working_set, "a")
    hold(working_set, "b")
    assert resident(working_set) == {"b"}
