"""Loads of the working set: called off, failed, retried, waited for."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest

from edgespec.errors import DraftError
from edgespec.memory.working_set import State, WorkingSet
from tests.support.loadables import WAIT, Clock, Events, ScriptedDraft
from tests.support.working_sets import hold, resident, state

Make = Callable[..., WorkingSet]


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
