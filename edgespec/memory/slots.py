"""Slots: pieces of memory made once, in which the weights of drafts take turns.

Loading and unloading never asks the system for memory and never gives any back, so nothing fragments and the working
set costs the same after a thousand loads as after one. Only pages that were written are backed; a slot that is taken
out of service while memory is short gives its pages back and keeps its address.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Collection
from contextlib import suppress
from typing import Protocol

_log = logging.getLogger(__name__)


class Kept(Protocol):
    """What a draft leaves in its slot for the next one of its kind."""

    def free(self) -> None:
        """Give its memory back. Idempotent."""


class MemorySlot:
    """One slot. buffer: writable bytes, page-aligned, at the same address as long as the pool lives.

    kept: what the last draft left in other memory (a GPU's), which counts as this slot's; drafts that can take it over
    have an attribute `refills = True`.
    """

    __slots__ = ("_memory", "buffer", "index", "kept")

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.kept: Kept | None = None
        self._memory: mmap.mmap | None = None
        if nbytes:
            # Private: pages of a shared anonymous map stay when they are given up.
            flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
            self._memory = mmap.mmap(-1, nbytes, **flags)
        self.buffer = memoryview(bytearray() if self._memory is None else self._memory)

    def give_up_pages(self) -> None:
        """What was written is lost, and the system has its memory back. Only for a slot that nobody uses."""
        self.let_go()
        if self._memory is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)

    def let_go(self) -> None:
        """Free what is `kept`, whatever its code raises."""
        kept, self.kept = self.kept, None
        try:
            if kept is not None:
                kept.free()
        except Exception:
            _log.exception("slot %d does not give back what it kept", self.index)

    def close(self) -> None:
        """Unmap, unless something still points into the buffer: then the memory goes with the last of those."""
        self.let_go()
        with suppress(BufferError):
            self.buffer.release()
            if self._memory is not None:
                self._memory.close()


class SlotPool:
    """`count` slots of `buffer_bytes` each (0 for drafts that bring their own buffers and only count).

    Not locked: its owner, the working set, calls it under its own lock, apart from `give_up_pages` of a slot it holds.
    Raises OSError or MemoryError if the address space for the slots is not there.
    """

    def __init__(self, count: int, buffer_bytes: int) -> None:
        if count < 0 or buffer_bytes < 0:
            raise ValueError(f"{count} slots of {buffer_bytes} bytes")
        self.buffer_bytes = buffer_bytes
        self.slots = tuple(MemorySlot(index, buffer_bytes) for index in range(count))
        self._free = set(self.slots)
        self._resting: set[MemorySlot] = set()

    @property
    def free(self) -> int:
        """Slots that `take` can give now."""
        return len(self._free)

    @property
    def resting(self) -> int:
        """Slots out of service."""
        return len(self._resting)

    def take(self) -> MemorySlot | None:
        """A free slot, the one with the lowest number (its pages are the likeliest to be backed), or None."""
        if not self._free:
            return None
        slot = min(self._free, key=lambda each: each.index)
        self._free.remove(slot)
        return slot

    def give_back(self, slot: MemorySlot) -> None:
        """The draft that was in `slot` is gone. Its pages stay for the next one."""
        if slot in self._free or slot in self._resting:
            raise ValueError(f"slot {slot.index} was free already")
        self._free.add(slot)

    def reclaim(self, taken: Collection[MemorySlot]) -> None:
        """After an error that may have lost some: free are all in service but those that are really `taken`."""
        self._free = set(self.slots) - self._resting - set(taken)

    def rest(self, slot: MemorySlot) -> None:
        """Take a slot that `take` gave out of service; its pages should have been given up."""
        self._resting.add(slot)

    def wake(self) -> bool:
        """Bring a slot back into service; False if all are."""
        if not self._resting:
            return False
        slot = min(self._resting, key=lambda each: each.index)
        self._resting.remove(slot)
        self._free.add(slot)
        return True

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
