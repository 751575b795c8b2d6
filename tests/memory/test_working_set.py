"""The working set's states: what is loaded, kept, evicted, called off, retried, and what a lease protects."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgespec.errors import DraftError
from edgespec.memory import books
from edgespec.memory.working_set import State, WorkingSet
from edgespec.telemetry.trace import LOADS, Tracer
from tests.support.loadables import WAIT, Clock, Events, ScriptedDraft

Make = Callable[..., WorkingSet]


@pytest.fixture
def drafts() -> dict[str, ScriptedDraft]:
    return {name: ScriptedDraft(name) for name in ("a", "b", "c", "d")}


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def make(drafts: dict[str, ScriptedDraft], events: Events) -> Iterator[Make]:
    """Working sets over `drafts`, closed at the end; then nothing that must not happen has happened."""
    made: list[WorkingSet] = []

    def build(slots: int = 2, **options: Any) -> WorkingSet:
        options = {"watch_seconds": None, "on_event": events, **options}
        made.append(WorkingSet(list(drafts.values()), slots=slots, **options))
        return made[-1]

    yield build
    for draft in drafts.values():
        draft.gate.set()
        if draft.hang is not None:
            draft.hang.set()
    for each in made:
        each.close()
    assert [problem for draft in drafts.values() for problem in draft.problems] == []
    assert not any(draft.loaded for draft in drafts.values())


def hold(working_set: WorkingSet, *names: str, **options: Any) -> None:
    working_set.retarget(names, reason="test", **options)
    assert working_set.idle(WAIT)


def resident(working_set: WorkingSet) -> set[str]:
    with working_set.acquire() as lease:
        return set(lease.names)


def state(working_set: WorkingSet, name: str) -> State:
    return working_set.states()[name].state


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


def test_an_overtaken_load_is_called_off(make: Make, drafts: dict[str, ScriptedDraft], events: Events) -> None:
    """B145 midway: not in the pool afterwards, and its slot is used by the next one."""
    working_set = make(slots=1)
    drafts["a"].gate.clear()
    working_set.retarget(["a"], reason="first")
    assert drafts["a"].entered.wait(WAIT)
    begin = time.perf_counter()
    working_set.retarget(["b"], reason="second")
    assert time.perf_counter() - begin < 0.05
    events.wait("cancel")
    assert time.perf_counter() - begin < 0.05
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"b"}
    assert working_set.counters.cancelled == 1
    assert (state(working_set, "a"), working_set.states()["a"].reason) == (State.COLD, "called off")


def test_cancelled_before_it_began(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    """B145 before start: what waits behind another load and is not wanted any more never starts."""
    working_set = make()
    drafts["a"].gate.clear()
    working_set.retarget(["a", "b"], reason="test")
    assert drafts["a"].entered.wait(WAIT)
    working_set.retarget(["a"], reason="test")
    drafts["a"].gate.set()
    assert working_set.idle(WAIT)
    assert resident(working_set) == {"a"}
    assert drafts["b"].loads == 0


def test_cancelled_when_all_was_read(make: Make, drafts: dict[str, ScriptedDraft], events: Events) -> None:
    """B145 at publish: nobody ever sees it if its slot is needed."""
    working_set = make(slots=1)
    drafts["a"].at_end = lambda: working_set.retarget(["b"], reason="late")
    hold(working_set, "a")
    assert resident(working_set) == {"b"}
    assert (drafts["a"].loads, drafts["a"].unloads) == (1, 1)
    counters = working_set.counters
    assert (counters.loads, counters.cancelled, counters.evictions) == (1, 1, 0)
    assert [event.draft for event in events.of("drop")] == ["a"]
    assert not [event for event in events.of("load") if event.draft == "a"]


def test_done_before_it_could_be_called_off_it_is_kept_where_there_is_room(
    make: Make, drafts: dict[str, ScriptedDraft]
) -> None:
    working_set = make()
    drafts["a"].at_end = lambda: working_set.retarget(["b"], reason="late")
    hold(working_set, "a")
    assert resident(working_set) == {"a", "b"}
    assert working_set.counters.cancelled == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "there is not enough memory for it"),
        (FileNotFoundError(2, "No such file", "/x/head"), r"/x/head: cannot be read \(No such file\)"),
        (DraftError("logits are NaN"), "logits are NaN"),
        (ValueError("surprise"), "ValueError: surprise"),
    ],
)
def test_a_failed_load_is_one_warning_and_the_next_draft_takes_the_slot(
    make: Make,
    drafts: dict[str, ScriptedDraft],
    error: Exception,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B018: named with its cause, its slot is used by the next in the ranking, and it is not tried again at once."""
    working_set = make(slots=1, clock=Clock())
    drafts["a"].errors = [error]
    hold(working_set, "a", "b")
    assert resident(working_set) == {"b"}
    failed = working_set.states()["a"]
    assert failed.state is State.FAILED
    assert failed.slot is None
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("draft a cannot be loaded: ")
    assert re.search(words, failed.reason)
    assert re.search(words, caplog.text)
    hold(working_set, "a", "c")
    assert drafts["a"].loads == 1
    assert working_set.counters.failures == 1


def test_retries_wait_twice_as_long_each_time(
    make: Make, drafts: dict[str, ScriptedDraft], events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    working_set = make(clock=clock, retry_seconds=30.0)
    drafts["a"].errors = [OSError(5, "I/O error") for _ in range(3)]
    hold(working_set, "a")
    for number, wait in enumerate((30.0, 60.0, 120.0), start=1):
        clock.now += wait - 1
        working_set.retarget(["a"], reason="again", in_use=str(clock.now))  # wakes the loader
        assert working_set.idle(WAIT)
        assert drafts["a"].loads == number
        clock.now += 1
        working_set.retarget(["a"], reason="again", in_use=str(clock.now))
        events.wait("fail" if number < 3 else "load", number + 1 if number < 3 else 1)
    assert resident(working_set) == {"a"}
    assert len(caplog.records) == 1  # the same cause is told once


def test_what_failed_is_not_retried_unless_it_is_wanted(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    clock = Clock()
    working_set = make(clock=clock)
    drafts["a"].errors = [MemoryError()]
    hold(working_set, "a")
    hold(working_set, "b")
    clock.now += 1000
    hold(working_set, "c")
    assert drafts["a"].loads == 1
    hold(working_set, "a")
    assert resident(working_set) >= {"a"}


def test_a_draft_that_is_larger_than_a_slot_fails_at_once(
    make: Make, drafts: dict[str, ScriptedDraft], caplog: pytest.LogCaptureFixture
) -> None:
    drafts["a"].slot_bytes = 5000
    working_set = make(slot_bytes=1024)
    assert "draft a needs 4.9 KiB, but a slot has 1.0 KiB" in caplog.text
    hold(working_set, "a", "b", "c")
    assert resident(working_set) == {"b", "c"}
    with pytest.raises(ValueError, match="a draft b already"):
        working_set.add(ScriptedDraft("b"))


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


def test_waiting_for_a_draft(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    working_set = make(slots=1)
    assert not working_set.wait_for("a", WAIT)  # not wanted: no use to wait
    assert not working_set.wait_for("nobody", WAIT)
    drafts["a"].gate.clear()
    working_set.retarget(["a"], reason="test")
    assert not working_set.wait_for("a", 0.02)
    threading.Timer(0.02, drafts["a"].gate.set).start()
    assert working_set.wait_for("a", WAIT)
    assert 0.03 < working_set.counters.exposed_seconds < WAIT
    drafts["b"].errors = [MemoryError()]
    working_set.retarget(["b"], reason="test")
    assert not working_set.wait_for("b", WAIT)  # fails
    assert working_set.counters.waits_in_round == 0
    with working_set.acquire():
        working_set.wait_for("b", 0.0)
    assert working_set.counters.waits_in_round == 1


def test_waiting_ends_when_another_is_wanted(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    working_set = make(slots=1)
    drafts["a"].gate.clear()
    working_set.retarget(["a"], reason="test")
    threading.Timer(0.02, lambda: working_set.retarget(["b"], reason="test")).start()
    assert not working_set.wait_for("a", WAIT)


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


def test_load_seconds_are_those_of_completed_loads(make: Make, drafts: dict[str, ScriptedDraft]) -> None:
    clock = Clock()
    working_set = make(slots=1, clock=clock)

    def passes() -> None:
        clock.now += 3.0

    drafts["a"].at_end = passes
    drafts["b"].errors = [MemoryError()]
    hold(working_set, "b")
    hold(working_set, "a")
    assert working_set.counters.load_seconds == 3.0
    assert working_set.states()["a"].load_seconds == 3.0


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


def test_logging_level_of_growth(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    working_set = make()
    working_set.set_capacity(1, "x")
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        working_set.set_capacity(2, "y")
    assert caplog.records == []
