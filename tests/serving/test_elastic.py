"""Elastic memory: when drafts lend their memory, when they get it back, and that both together never hold too much."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgespec.memory.pressure import Limits, PressureMonitor, Reading
from edgespec.memory.working_set import State, WorkingSet
from edgespec.models.kv.blocks import BlockPool, PoolStats, Table
from edgespec.serving.elastic import ElasticEvent, ElasticMemory
from edgespec.telemetry.trace import LOADS, Tracer
from tests.support.loadables import WAIT, Clock, ScriptedDraft

BLOCK = 10  # bytes
SLOT = 20


class ScriptedPool:
    """The books of a pool; notes what each call found of the drafts. refuse: `shrink` fails."""

    block_bytes = BLOCK

    def __init__(self, blocks: int, most: int = 100) -> None:
        self.books = BlockPool(blocks, 1)
        self.most = most
        self.refuse = False
        self.seen: list[tuple[str, Any]] = []
        self.drafts: Any = None

    @property
    def stats(self) -> PoolStats:
        return self.books.stats

    def fill(self, blocks: int) -> Table:
        """A request that takes so many blocks."""
        table = self.books.admit(blocks)
        self.books.extend(table, blocks // 2)  # the rest is promised
        return table

    def grow(self, nbytes: int) -> int:
        self.seen.append(("grow", self.drafts.empty))
        count = min(nbytes // BLOCK, self.most - self.books.total)
        self.books.grow(count)
        return count * BLOCK

    def can_shrink(self, nbytes: int) -> bool:
        return self.books.can_shrink(self.books.total - nbytes // BLOCK)

    def shrink(self, nbytes: int) -> int:
        self.seen.append(("shrink", self.drafts.capacity))
        moves = None if self.refuse else self.books.plan_shrink(self.books.total - nbytes // BLOCK)
        if moves is None:
            return 0
        self.books.shrink(self.books.total - nbytes // BLOCK, moves)
        return nbytes


class ScriptedDrafts:
    """A working set that empties when it is told to."""

    def __init__(self, slots: int = 2) -> None:
        self.slots, self.slot_bytes, self.capacity = slots, SLOT, slots
        self.empty = False

    def lend(self, reason: str) -> None:
        self.capacity = 0

    def take_back(self, reason: str) -> None:
        self.capacity, self.empty = self.slots, False


Parts = tuple[ElasticMemory, ScriptedPool, ScriptedDrafts, Clock]


@pytest.fixture
def parts() -> Parts:
    return build()


def build(blocks: int = 20, most: int = 100, **options: Any) -> Parts:
    pool, drafts, clock = ScriptedPool(blocks, most), ScriptedDrafts(), Clock()
    pool.drafts = drafts
    return ElasticMemory(pool, drafts, clock=clock, **options), pool, drafts, clock


def kinds(elastic: ElasticMemory) -> list[str]:
    return [event.kind for event in elastic.events]


def lend(elastic: ElasticMemory, drafts: ScriptedDrafts) -> None:
    for _ in range(3):
        elastic.step(True, 1)
    drafts.empty = True
    event = elastic.step(True, 1)
    assert event is not None
    assert event.kind == "lend"


def test_three_short_steps_in_a_row_and_the_drafts_leave(parts):
    elastic, pool, drafts, clock = parts
    pool.fill(19)  # 5% are free
    for gamma_zero in (True, True, False, True, True):
        assert elastic.step(gamma_zero, 3) is None
    event = elastic.step(True, 3)
    reason = "5% of the KV blocks are free and nothing is drafted"
    assert event == ElasticEvent(clock.now, "leave", 0, 0.0, reason)
    assert elastic.leaving
    assert drafts.capacity == 0
    assert elastic.step(True, 3) is None  # they are not gone yet
    assert pool.stats.total == 20
    drafts.empty = True
    event = elastic.step(True, 3)
    assert event is not None
    assert (event.kind, event.blocks) == ("lend", 4)
    assert (elastic.lent, elastic.leaving, pool.stats.total) == (40, False, 24)
    assert pool.seen == [("grow", True)]  # given back before it was taken


@pytest.mark.parametrize("filled", [17, 18])
def test_enough_free_blocks_or_drafting_change_nothing(parts, filled):
    elastic, pool, drafts, _clock = parts
    pool.fill(filled)  # 10% are not less than 10%
    for _ in range(10):
        assert elastic.step(True, 3) is None
    pool.fill(20 - filled)
    for _ in range(10):
        assert elastic.step(False, 3) is None
    assert drafts.capacity == 2


def test_cached_blocks_count_as_free_and_promised_ones_do_not(parts):
    elastic, pool, _drafts, _clock = parts
    table = pool.books.admit(20)
    pool.books.extend(table, 20)
    pool.books.release(table, list(range(20)))
    assert (pool.stats.cached, pool.stats.free) == (20, 0)
    for _ in range(5):
        assert elastic.step(True, 1) is None
    pool.books.admit(20)
    assert [elastic.step(True, 1) is not None for _ in range(3)] == [False, False, True]


def test_a_request_that_does_not_fit_counts_as_short(parts):
    elastic, pool, _drafts, _clock = parts
    pool.fill(12)
    for _ in range(3):
        elastic.step(True, 1, blocked=True)
    assert kinds(elastic) == ["leave"]


def test_drafts_stay_if_it_passes_before_they_are_gone(parts):
    for gamma_zero, released in ((False, False), (True, True)):
        elastic, pool, drafts, _clock = build()
        table = pool.fill(20)
        for _ in range(3):
            elastic.step(True, 2)
        if released:
            pool.books.release(table)
        event = elastic.step(gamma_zero, 2)
        assert event is not None
        assert event.kind == "stay"
        assert (drafts.capacity, elastic.leaving, elastic.lent) == (2, False, 0)
        drafts.empty = True
        assert elastic.step(gamma_zero, 2) is None
        assert pool.stats.total == 20


def test_they_come_back_when_nobody_waits_and_enough_stays_free(parts):
    elastic, pool, drafts, clock = parts
    small, large = pool.fill(15), pool.fill(5)
    lend(elastic, drafts)
    pool.books.release(large)  # 9 of 24 are free, without the drafts' memory 5 of 20: not more than 25%
    for _ in range(5):
        assert elastic.step(True, 0) is None
    pool.books.release(small)
    pool.fill(14)
    for queued in (0, 0, 1, 0, 0):
        assert elastic.step(False, queued) is None
    event = elastic.step(False, 0)
    assert event is not None
    assert (event.kind, event.blocks, event.time) == ("return", -4, clock.now)
    assert event.reason == "30% of the KV blocks stay free and nobody waits"
    assert (pool.stats.total, elastic.lent, drafts.capacity) == (20, 0, 2)
    assert pool.seen == [("grow", True), ("shrink", 0)]  # the pool gave before the drafts took
    assert kinds(elastic) == ["leave", "lend", "return"]


def test_a_pool_that_cannot_be_compacted_is_left_alone_for_a_while(parts, caplog):
    elastic, pool, drafts, _clock = parts
    table = pool.fill(20)
    lend(elastic, drafts)
    pool.books.release(table)
    pool.refuse = True
    for _ in range(60):
        elastic.step(True, 0)
    assert kinds(elastic) == ["leave", "lend", "fail", "fail"]
    assert drafts.capacity == 0
    pool.refuse = False
    for _ in range(60):
        elastic.step(True, 0)
    assert kinds(elastic)[-1] == "return"


def test_a_pool_that_cannot_grow_keeps_its_drafts_from_then_on():
    elastic, pool, drafts, _clock = build(most=20)
    pool.fill(20)
    for _ in range(3):
        elastic.step(True, 1)
    drafts.empty = True
    for _ in range(20):
        elastic.step(True, 1)
    assert kinds(elastic) == ["leave", "stay"]
    assert drafts.capacity == 2


def test_drafts_under_memory_pressure_and_drafts_too_small_are_not_asked(parts):
    elastic, pool, drafts, _clock = parts
    drafts.capacity = 1  # the device is short of memory: the pool must not take it
    pool.fill(20)
    for _ in range(9):
        assert elastic.step(True, 1) is None
    pool.block_bytes = 41
    drafts.capacity = 2
    for _ in range(9):
        assert elastic.step(True, 1) is None


def test_another_working_set_lends_what_the_one_before_has_lent(parts):
    elastic, pool, drafts, _clock = parts
    table = pool.fill(20)
    lend(elastic, drafts)
    others = ScriptedDrafts(3)
    pool.drafts = others
    elastic.of(others)
    assert others.capacity == 0
    pool.books.release(table)
    for _ in range(3):
        elastic.step(True, 0)
    assert (others.capacity, drafts.capacity) == (3, 0)
    assert pool.stats.total == 20


def test_thresholds_are_checked_and_the_end_gives_back(parts):
    elastic, pool, drafts, _clock = parts
    for wrong in ({"tau_low": 0.3}, {"tau_high": 1.0}, {"tau_low": -0.1}, {"steps": 0}):
        with pytest.raises(ValueError, match="thresholds"):
            ElasticMemory(pool, drafts, **wrong)
    pool.fill(20)
    lend(elastic, drafts)
    elastic.close()
    assert drafts.capacity == 2


def test_what_happened_is_in_the_trace_and_told(caplog):
    tracer, told = Tracer(), []

    def listen(event: ElasticEvent) -> None:
        told.append(event.kind)
        raise RuntimeError("a listener's own fault")

    elastic, pool, drafts, _clock = build(tracer=tracer, on_event=listen)
    pool.fill(20)
    lend(elastic, drafts)
    assert told == ["leave", "lend"]
    assert [(event.name, event.lane, event.args["blocks"]) for event in tracer.events()] == [
        ("KV leave", LOADS, 0),
        ("KV lend", LOADS, 4),
    ]


# With the real working set


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def drafts() -> Iterator[list[ScriptedDraft]]:
    made = [ScriptedDraft(name, slot_bytes=SLOT) for name in "ab"]
    yield made
    assert [problem for draft in made for problem in draft.problems] == []


def together(drafts: list[ScriptedDraft], **options: Any) -> tuple[ElasticMemory, ScriptedPool, WorkingSet]:
    working_set = WorkingSet(drafts, slots=2, watch_seconds=None, **options)
    working_set.retarget(["a", "b"], reason="test")
    assert working_set.idle(WAIT)
    pool = ScriptedPool(20)
    pool.drafts = working_set
    return ElasticMemory(pool, working_set, clock=Clock()), pool, working_set


def test_a_draft_in_use_holds_its_memory_until_its_lease_ends(drafts):
    elastic, pool, working_set = together(drafts)
    with working_set:
        table = pool.fill(20)
        lease = working_set.acquire()
        for _ in range(8):
            elastic.step(True, 1)
        assert kinds(elastic) == ["leave"]
        assert not working_set.empty
        until(lambda: {state.state for state in working_set.states().values()} == {State.LEAVING})
        with working_set.acquire() as other:
            assert other.names == frozenset()
        lease.release()
        assert working_set.idle(WAIT)
        elastic.step(True, 1)
        assert kinds(elastic) == ["leave", "lend"]
        assert not any(draft.loaded for draft in drafts)
        working_set.retarget(["b", "a"], reason="another text")  # a wish is no reason to load now
        assert working_set.idle(WAIT)
        assert not any(draft.loaded for draft in drafts)
        pool.books.release(table)
        for _ in range(3):
            elastic.step(True, 0)
        assert working_set.idle(WAIT)
        assert all(draft.loaded for draft in drafts)
        assert {state.state for state in working_set.states().values()} == {State.RESIDENT}


def test_calm_memory_does_not_bring_drafts_back_while_they_are_lent(drafts):
    clock = Clock()
    limits = Limits(floor=1, margin=1, calm_seconds=1.0)
    pressure = PressureMonitor(lambda: Reading(1 << 30), limits, slots=2, slot_bytes=SLOT)
    elastic, pool, working_set = together(drafts, pressure=pressure, clock=clock)
    with working_set:
        pool.fill(20)
        for _ in range(3):
            elastic.step(True, 1)
        assert working_set.idle(WAIT)
        elastic.step(True, 1)
        assert elastic.lent
        for _ in range(20):
            clock.now += 2.0
            working_set.tick()
        assert working_set.idle(WAIT)
        assert working_set.capacity == 0
        elastic.close()
        assert working_set.capacity == 2


def test_a_load_that_runs_is_called_off_and_a_wave_of_changes_stays_within_the_plan(drafts):
    """Back and forth while a draft loads; at every step pool and drafts together hold no more than was planned."""
    elastic, pool, working_set = together(drafts)
    plan = pool.stats.total * BLOCK + 2 * SLOT
    with working_set:
        for turn in range(6):
            table = pool.fill(20)
            drafts[0].gate.clear()

            def lent(turn: int = turn) -> bool:
                elastic.step(True, 1)
                held = sum(state.slot is not None for state in working_set.states().values()) * SLOT
                assert pool.stats.total * BLOCK + held <= plan
                drafts[0].gate.set() if turn % 2 else working_set.idle(0.01)
                return elastic.lent > 0

            until(lent)
            pool.books.release(table)
            for _ in range(3):
                elastic.step(True, 0)
            assert (elastic.lent, pool.stats.total) == (0, 20)
        drafts[0].gate.set()
        assert working_set.idle(WAIT)
        assert all(draft.loaded for draft in drafts)
