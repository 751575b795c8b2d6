"""Slots: made once, backed where written, reused, and given up under pressure without losing their address."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

from edgespec.memory.slots import SlotPool
from edgespec.memory.topology import process_memory
from tests.support.loadables import address

MIB = 1 << 20


def test_slots_are_given_lowest_first_and_come_back() -> None:
    pool = SlotPool(3, 8192)
    taken = [pool.take() for _ in range(3)]
    assert [slot.index for slot in taken if slot is not None] == [0, 1, 2]
    assert (pool.take(), pool.free) == (None, 0)
    first = taken[1]
    assert first is not None
    before = address(first.buffer)
    pool.give_back(first)
    assert pool.take() is first
    assert address(first.buffer) == before
    pool.give_back(first)
    with pytest.raises(ValueError, match="slot 1 was free already"):
        pool.give_back(first)
    pool.close()


def test_buffers_are_writable_and_page_aligned() -> None:
    pool = SlotPool(2, 10_000)
    for slot in pool.slots:
        assert len(slot.buffer) == 10_000
        assert address(slot.buffer) % mmap.PAGESIZE == 0
        slot.buffer[:3] = b"abc"
        assert bytes(slot.buffer[:4]) == b"abc\0"
    assert len({address(slot.buffer) for slot in pool.slots}) == 2
    pool.close()


def test_slots_without_buffers() -> None:
    pool = SlotPool(2, 0)
    slot = pool.take()
    assert slot is not None
    assert len(slot.buffer) == 0
    slot.give_up_pages()
    pool.close()
    SlotPool(0, 100).close()
    with pytest.raises(ValueError, match="-1 slots"):
        SlotPool(-1, 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures resident pages")
def test_only_written_pages_are_backed_and_they_can_be_given_up() -> None:
    before = process_memory()
    pool = SlotPool(4, 64 * MIB)
    assert process_memory() - before < 8 * MIB
    slot = pool.take()
    assert slot is not None
    where = address(slot.buffer)
    np.frombuffer(slot.buffer, np.uint8)[:] = 7
    assert process_memory() - before > 60 * MIB
    slot.give_up_pages()
    pool.rest(slot)
    assert process_memory() - before < 8 * MIB
    assert (pool.resting, pool.free) == (1, 3)
    assert pool.wake()
    assert not pool.wake()
    again = pool.take()
    assert again is slot
    assert address(again.buffer) == where
    assert again.buffer[0] == 0
    pool.close()


def test_closing_leaves_memory_that_is_pointed_into() -> None:
    pool = SlotPool(1, 4096)
    kept = np.frombuffer(pool.slots[0].buffer, np.uint8)
    pool.close()
    kept[:] = 5
    assert kept.sum() == 5 * 4096
