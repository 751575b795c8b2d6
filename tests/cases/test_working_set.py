"""Fault cases of the kind "Memory, loading" that meet the working set, with real files."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drafts.base import LoadCancelled, LoadControl, Slot
from edgespec.errors import DraftError
from edgespec.memory.topology import process_memory
from edgespec.memory.working_set import State, WorkingSet
from tests.support.loadables import WAIT, Clock, Events, ScriptedDraft
from tests.support.working_sets import FileDraft, hold, resident

MIB = 1 << 20


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
