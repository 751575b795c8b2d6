"""The working set when something raises where nobody expects it, and books that only rare orders of events reach."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drafts.base import LoadControl, Slot
from edgespec.memory import jobs, loader
from edgespec.memory.loader import Control, Loader, RateLimit
from edgespec.memory.records import Record
from edgespec.memory.schedule import Schedule
from edgespec.memory.slots import MemorySlot, SlotPool
from edgespec.memory.watch import Watch
from edgespec.memory.working_set import State, WorkingSet
from tests.support.loadables import WAIT, Clock, Events, ScriptedDraft

Open = Callable[..., tuple[WorkingSet, dict[str, ScriptedDraft]]]


@pytest.fixture
def open_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """A working set without a watching thread, and its drafts "a" to "d"; at the end nothing is left behind."""
    monkeypatch.setattr(jobs, "_PAUSE", 0.01)
    made: list[WorkingSet] = []

    def build(slots: int = 2, names: str = "abcd", **options: Any) -> tuple[WorkingSet, dict[str, ScriptedDraft]]:
        drafts = {name: ScriptedDraft(name) for name in names}
        made.append(WorkingSet(list(drafts.values()), slots=slots, **{"watch_seconds": None, **options}))
        return made[-1], drafts

    yield build
    for each in made:
        each.close()
    assert left_alone() == []


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("edgespec")]


def left_alone() -> list[str]:
    """The threads that are still there after a while: one whose storage hung ends when it comes back to its loader."""
    deadline = time.monotonic() + WAIT
    while threads() and time.monotonic() < deadline:
        time.sleep(0.005)
    return threads()


def hold(working_set: WorkingSet, *names: str, in_use: str | None = None) -> set[str]:
    """What is resident then."""
    working_set.retarget(names, reason="test", in_use=in_use)
    assert working_set.idle(WAIT)
    with working_set.acquire() as lease:
        return set(lease.names)


def once(method: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """The method, but its first call raises."""
    left = [error]
    return lambda *given: (_ for _ in ()).throw(left.pop()) if left else method(*given)


# Errors in the loader's thread


@pytest.mark.parametrize("method", ["choose", "loaded", "unloaded", "warmed", "called_off", "failed"])
def test_an_error_in_the_books_costs_one_load_at_most(
    open_set: Open, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    working_set, drafts = open_set(slots=1, clock=clock)
    schedule = working_set._books.schedule
    monkeypatch.setattr(schedule, method, once(getattr(schedule, method), MemoryError()))
    if method == "failed":
        drafts["a"].errors = [OSError(5, "I/O error")]
    if method == "called_off":
        drafts["a"].gate.clear()
        working_set.retarget(["a"], reason="test")
        assert drafts["a"].entered.wait(WAIT)
    hold(working_set, "b", "a")
    drafts["a"].gate.set()
    hold(working_set, "a", "b")
    hold(working_set, "b", "a")
    clock.now += 100.0  # whatever failed may be tried again
    for name in ("a", "b", "a"):
        assert hold(working_set, name, in_use=str(clock.now)) == {name}
        assert schedule.pool.free == 0
    assert [draft.name for draft in drafts.values() if draft.loaded] == ["a"]
    assert not [draft.problems for draft in drafts.values() if draft.problems]
    told = [record for record in caplog.records if "met an error and goes on" in record.getMessage()]
    assert len(told) == 1


def test_pages_that_cannot_be_given_up_do_not_keep_a_slot_in_service(
    open_set: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(slot: MemorySlot) -> None:
        raise OSError(12, "Cannot allocate memory")

    working_set, _ = open_set()
    hold(working_set, "a", "b")
    monkeypatch.setattr(MemorySlot, "give_up_pages", refused)
    working_set.set_capacity(1, "test")
    assert working_set.idle(WAIT)
    assert working_set._books.schedule.pool.resting == 1
    working_set.set_capacity(2, "test")
    assert hold(working_set, "c", "a") == {"a", "c"}


def test_a_draft_that_cannot_say_whether_it_is_loaded_has_failed(open_set: Open) -> None:
    working_set, _ = open_set(slots=1)

    class Odd(ScriptedDraft):
        def load(self, slot: Slot, control: LoadControl) -> None:
            raise OSError(5, "I/O error")

        @property
        def loaded(self) -> bool:
            raise RuntimeError("who knows")

        @loaded.setter
        def loaded(self, value: bool) -> None: ...

    working_set.add(Odd("odd"))
    assert hold(working_set, "odd", "a") == {"a"}
    assert working_set.states()["odd"].state is State.FAILED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_all_the_same_is_replaced(open_set: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    working_set, _ = open_set()
    schedule = working_set._books.schedule
    with monkeypatch.context() as patch:
        patch.setattr(schedule, "choose", once(schedule.choose, MemoryError()))
        patch.setattr(schedule, "mend", once(schedule.mend, MemoryError()))
        ended = working_set._loader._thread
        assert ended is not None
        working_set.retarget(["a", "b"], reason="test")
        ended.join(WAIT)
        assert not ended.is_alive()
    working_set.tick()
    assert hold(working_set, "b", "a") == {"a", "b"}


# Making and closing


@pytest.mark.parametrize("kind", [Loader, Watch])
def test_threads_that_cannot_be_started_leave_none_behind(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", _but("edgespec-" + kind.__name__.lower()))
    with pytest.raises(RuntimeError, match="start"):
        WorkingSet([ScriptedDraft("a")], slots=1)
    assert left_alone() == []


def _but(name: str) -> Callable[[threading.Thread], None]:
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    return refusing


def test_two_drafts_of_one_name_leave_no_thread_behind() -> None:
    with pytest.raises(ValueError, match="a draft a already"):
        WorkingSet([ScriptedDraft("a"), ScriptedDraft("a")], slots=1)
    assert left_alone() == []


def test_closing_waits_for_rounds_as_long_as_it_is_told_to(open_set: Open) -> None:
    working_set, drafts = open_set(close_seconds=0.0)
    hold(working_set, "a", "b")
    lease = working_set.acquire()
    threading.Timer(0.1, lease.release).start()
    working_set.close(patience=WAIT)
    assert not any(draft.loaded for draft in drafts.values())


def test_closing_goes_on_after_it_was_interrupted(open_set: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    working_set, drafts = open_set()
    hold(working_set, "a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(working_set._loader, "join", once(lambda timeout: True, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            working_set.close()
    working_set.close()
    assert not any(draft.loaded or draft.problems for draft in drafts.values())


def test_a_load_that_fails_because_all_is_closed_is_not_blamed(
    open_set: Open, caplog: pytest.LogCaptureFixture
) -> None:
    working_set, drafts = open_set()
    original = drafts["a"].load

    def fails_at_the_end(slot: Slot, control: LoadControl) -> None:
        drafts["a"].entered.set()
        while not control.cancelled:  # type: ignore[attr-defined]
            time.sleep(0.001)
        raise ValueError("the target is closed")

    drafts["a"].load = fails_at_the_end  # type: ignore[method-assign]
    working_set.retarget(["a"], reason="test")
    assert drafts["a"].entered.wait(WAIT)
    working_set.close()
    drafts["a"].load = original  # type: ignore[method-assign]
    assert caplog.records == []


def test_what_a_failed_load_had_made_is_gone_at_once(open_set: Open) -> None:
    class Weights:
        pass

    working_set, drafts = open_set()
    made: list[weakref.ref[Weights]] = []

    def load(slot: Slot, control: LoadControl) -> None:
        weights = Weights()
        made.append(weakref.ref(weights))
        raise OSError(5, "I/O error")

    drafts["a"].load = load  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        hold(working_set, "a")
        assert made[0]() is None
    finally:
        gc.enable()


# Rare orders of events


def test_shrinking_by_one_takes_one(open_set: Open) -> None:
    working_set, _ = open_set(slots=3)
    assert hold(working_set, "a", "b", "c") == {"a", "b", "c"}
    assert hold(working_set, "a") == {"a", "b", "c"}
    working_set.set_capacity(2, "test")
    assert working_set.idle(WAIT)
    with working_set.acquire() as lease:
        assert len(lease.names) == 2


def test_an_unload_that_was_chosen_and_not_begun_is_chosen_again() -> None:
    schedule = Schedule(SlotPool(1, 0), 100, Control)
    record = schedule.records["a"] = Record(ScriptedDraft("a"), 0.0, State.LEAVING, slot=schedule.pool.take())
    assert schedule.choose(0.0, ()) is not None
    assert record.unloading
    schedule.mend(None, MemoryError(), None, 1.0, 30.0)
    assert (record.unloading, schedule.pool.free) == (False, 0)
    again = schedule.choose(2.0, ())
    assert again is not None
    assert again.kind == "evict"


def test_a_draft_that_was_never_offered_is_loaded_again_before_it_is() -> None:
    """Wanted again while it is being dropped, it stays dropped: nobody has counted it as loaded."""
    schedule = Schedule(SlotPool(1, 0), 100, Control)
    for name in "ab":
        schedule.records[name] = Record(ScriptedDraft(name), 0.0)
    schedule.wanted = ("a",)
    job = schedule.choose(0.0, ())
    assert job is not None
    job.control.cancel()
    schedule.wanted = ("b",)
    assert not schedule.loaded(job, 1.0)
    schedule.wanted = ("a",)
    assert not schedule.keep_wanted(2.0)
    assert schedule.records["a"].state is State.LEAVING


def test_reading_ahead_that_hangs_is_not_tried_again(
    open_set: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, events = Clock(), Events()
    reading, go_on, asked = threading.Event(), threading.Event(), []

    def hangs(files: object, control: Control) -> None:
        asked.append(files)
        control.reading = True
        reading.set()
        go_on.wait(WAIT)

    monkeypatch.setattr(jobs, "read_ahead", hangs)
    working_set, _ = open_set(slots=1, clock=clock, on_event=events)
    working_set.retarget(["a", "b"], reason="test")
    assert reading.wait(WAIT)
    clock.now += 6.0
    working_set.tick()
    assert events.wait("stuck").draft == "b"
    try:
        assert hold(working_set, "c", "d") == {"c"}
        assert len(asked) == 1
    finally:
        go_on.set()


def test_a_rest_between_two_reads_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, beats = Clock(), []

    def slowly(fd: int, into: memoryview, offset: int) -> int:
        clock.now += 3.0
        return len(into)

    monkeypatch.setattr(loader, "_read_at", slowly)
    control = Control(limit=RateLimit(1.0, clock), chunk_bytes=4, clock=clock)
    monkeypatch.setattr(control, "_rest", lambda seconds: beats.append(control.beat))
    control.read(0, memoryview(bytearray(8)), 0)
    assert beats == [1003.0, 1006.0]
