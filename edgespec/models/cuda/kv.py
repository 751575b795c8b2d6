"""Keys and values on the device: blocks in slabs, and a table per sequence that says where its blocks are.

A captured graph holds addresses, so nothing that it reads may move. Growing therefore appends a slab and copies
nothing; a sequence's table names its blocks by their distance from the first slab, which kernels add to one base
address. So one graph serves every sequence, at every length.

Blocks may move, from slabs that shall go back into those that stay, between two steps (`Tables.compact`): graphs find
them again, since tables are tensors too.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from edgespec.errors import ModelError
from edgespec.kernels import ops
from edgespec.kernels.paged import ALIGNED
from edgespec.models.cuda.staging import Staging
from edgespec.models.kv.sequence import SequenceCache
from edgespec.models.spec import ModelSpec

BLOCK = 64  # positions
SLAB_POSITIONS = 2048  # the most that memory is taken for at once: a fragmented Jetson refuses large allocations
MOVES = 64  # of a launch
MOVES_BYTES = MOVES * 4 * 8
Moves = Sequence[tuple[int, int]]  # (block, the one that takes its place)
_serials = itertools.count()
_log = logging.getLogger(__name__)


def slab_blocks(positions: int, block: int = BLOCK) -> int:
    """Blocks of a slab: as many as may be; fewer where so the longest sequence and the scratch block fill them all."""
    most, wanted = max(1, SLAB_POSITIONS // block), -(-positions // block) + 1
    return -(-wanted // -(-wanted // most))


def held_positions(positions: int) -> int:
    """How many positions a pool takes memory for when one sequence of that many, the longest, fills it."""
    blocks = slab_blocks(positions)
    return -(-(-(-positions // BLOCK) + 1) // blocks) * blocks * BLOCK


def table_shape(rows: int, positions: int, block: int = BLOCK) -> tuple[int, int, int]:
    """Of `Tables`, int64."""
    return rows + 1, 2, -(-positions // block) + 1


class PagedPool:
    """All blocks of one decoder, handed out to its caches.

    A slab is one tensor [2 (keys, values), layers, blocks, kv_heads, BLOCK, head_dim]; all slabs have the same shape,
    so a block's distance from the first slab's is the same for every layer, and for keys and values.

    Blocks are taken and given back from any thread, also by the collector, in the middle of taking one: what comes back
    waits in `_returned`, which needs no lock. Which blocks a cache has stands in one list, in its hands or there, and
    nowhere else: so `compact` may rename them in it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block: int = BLOCK,
        positions: int = SLAB_POSITIONS,
    ) -> None:
        """positions: of the longest sequence, see `slab_blocks`."""
        self.block = block
        self._shape = (
            2,
            spec.num_layers,
            slab_blocks(positions, block),
            spec.num_kv_heads,
            block,
            spec.head_dim,
        )
        self._device = device
        self._dtype = dtype
        self._slabs: list[Tensor] = []
        self._free: list[int] = []  # a heap: the lowest are taken first, so that the last slabs empty
        self._returned: deque[Sequence[int]] = deque()
        self._caches: list[weakref.ref[PagedCache]] = []  # also some that are gone
        self._lock = threading.Lock()
        # Where rows write that are there only to fill a shape up; nobody reads it.
        self.scratch = self.take()

    @property
    def slabs(self) -> Sequence[Tensor]:
        return self._slabs

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def keys(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's keys, per slab [blocks, kv_heads, block, head_dim]."""
        return tuple(slab[0, layer] for slab in self._slabs)

    def values(self, layer: int) -> tuple[Tensor, ...]:
        return tuple(slab[1, layer] for slab in self._slabs)

    def distance(self, block: int) -> int:
        """Elements from the first slab's first block to this one, in keys and values of every layer."""
        slab, place = divmod(block, self._shape[2])
        first, other = self._slabs[0], self._slabs[slab]
        apart = other.data_ptr() - first.data_ptr()
        step, wrong = divmod(apart, first.element_size())
        if wrong or step % ALIGNED:
            raise ModelError(f"two slabs of the KV cache do not lie a multiple of {ALIGNED} elements apart")
        return step + place * first.stride(2)

    def take(self) -> int:
        """A free block; a slab is appended if there is none. Raises what the device raises when memory is out."""
        with self._lock:
            self._collect()
            if not self._free:
                first = len(self._slabs) * self._shape[2]
                # Zeros: a masked position has weight 0, and 0 times a leftover NaN is NaN.
                self._slabs.append(torch.zeros(self._shape, device=self._device, dtype=self._dtype))
                for block in range(first, first + self._shape[2]):
                    heapq.heappush(self._free, block)
            return heapq.heappop(self._free)

    def add(self, cache: PagedCache) -> None:
        """Its blocks may be moved from now on."""
        with self._lock:
            self._caches = [known for known in self._caches if known() is not None]
            self._caches.append(weakref.ref(cache))

    def give_back(self, blocks: Sequence[int]) -> None:
        self._returned.append(blocks)

    def compact(self, carry: Callable[[Moves], None]) -> int:
        """Move blocks out of as many of the last slabs as can be emptied; returns how many moved. See `trim`.

        carry: copies blocks into free ones (the order does not matter) in all layers, and tells tables. What it raises
        is passed on, and every block is where it was. Blocks that no cache names stay: the scratch block, one that is
        being taken or given back right now. The caller holds the decoder's lock, so that no step is prepared meanwhile.
        """
        with self._lock:
            self._collect()
            held = [cache.blocks for known in self._caches if (cache := known()) is not None]
            moves = self._plan({block for blocks in held for block in blocks})
            if moves:
                carry(moves)
                self._rename(held, moves)
            return len(moves)

    def _plan(self, movable: set[int]) -> Moves:
        count, free = self._shape[2], set(self._free)
        used = [block for block in range(len(self._slabs) * count) if block not in free]
        fixed = max((block for block in used if block not in movable), default=-1)
        kept = max(-(-len(used) // count), fixed // count + 1) * count  # blocks of slabs that stay
        return list(zip((block for block in used if block >= kept), sorted(block for block in free if block < kept)))

    def _rename(self, held: Sequence[list[int]], moves: Moves) -> None:
        """The moves were made. If this ends early, each block is in its old or its new place: both hold the same."""
        names = dict(moves)
        try:
            for blocks in held:
                for place, block in enumerate(blocks):  # one by one: another thread may append meanwhile
                    if block in names:
                        blocks[place] = names[block]
        finally:
            now = {block for blocks in held for block in blocks}
            either = {block for move in moves for block in move}
            self._free = sorted((either | set(self._free)) - now)  # which is a heap

    def trim(self, spare: int = 0) -> int:
        """Drop the last slabs, all but `spare` of those of which no block is in use; returns their bytes.

        Nothing moves, so tables and graphs stay right. No step may be prepared meanwhile; one that was launched is over
        before the device gives its memory to another.
        """
        with self._lock:
            self._collect()
            count, free = self._shape[2], set(self._free)
            kept = len(self._slabs)
            while kept and free.issuperset(range((kept - 1) * count, kept * count)):
                kept -= 1
            kept = min(kept + spare, len(self._slabs))
            dropped = sum(slab.nbytes for slab in self._slabs[kept:])
            if dropped:
                del self._slabs[kept:]
                self._free = [block for block in self._free if block < kept * count]
                heapq.heapify(self._free)
            return dropped

    def _collect(self) -> None:
        while self._returned:
            for block in self._returned.popleft():
                heapq.heappush(self._free, block)

    def close(self) -> None:
        with self._lock:
            self._slabs.clear()
            self._free.clear()
            self._returned.clear()


class PagedCache(SequenceCache):
    """One sequence: its length, and the blocks that hold it. Cropping keeps them: the text goes on there."""

    def __init__(self, owner: object, pool: PagedPool, capacity: int, position_bytes: int) -> None:
        super().__init__(owner, capacity, position_bytes)
        self.blocks: list[int] = []
        self.serial = next(_serials)  # an object's id comes back after its end, this does not
        self.changed = 0  # counts changes of `blocks`, so that a copy on the device knows when it is stale
        self._blocks_of = pool
        pool.add(self)

    def reserve(self, length: int) -> None:
        """Make positions below `length` writable. What fails leaves the cache as it was."""
        super().reserve(length)
        needed = -(-length // self._blocks_of.block) - len(self.blocks)
        if needed <= 0:
            return
        taken: list[int] = []
        try:
            for _ in range(needed):
                taken += [self._blocks_of.take()]
        except BaseException:
            self._blocks_of.give_back(taken)
            raise
        self.blocks += taken
        self.changed += 1

    def release(self, ids: Sequence[int] = ()) -> None:
        """Give all blocks back; nothing of `ids` stays known (see `PooledKV`)."""
        blocks, self.blocks, self.length = self.blocks, [], 0
        self.changed += 1
        self._blocks_of.give_back(blocks)

    def __del__(self) -> None:
        if self.blocks:  # whatever thread collects it may hold any lock
            PagedCache.release(self)


class Tables:
    """Where the blocks of the sequences lie that ran last, on the device: a row per sequence, see `PagedLayer`.

    blocks, distances: int64 [rows, blocks of the longest sequence + 1]; what is no block of the sequence is the scratch
    block. A sequence keeps its row while it is in use, so a step usually copies nothing but lengths and tokens.
    """

    def __init__(self, rows: int, positions: int, pool: PagedPool, device: torch.device, staging: Staging) -> None:
        self._pool = pool
        self._staging = staging
        self.empty = rows  # the row that names nothing but the scratch block
        self._both = torch.full(
            table_shape(rows, positions, pool.block), pool.scratch, device=device, dtype=torch.int64
        )
        self.blocks, self.distances = self._both.unbind(1)
        self.distances.fill_(pool.distance(pool.scratch))
        self._held: list[tuple[int, int] | None] = [None] * rows  # (serial of a cache, its `changed`)
        self._used: list[int] = list(range(rows))  # rows, the one that was not used for longest first

    @property
    def nbytes(self) -> int:
        return self._both.nbytes

    def place(self, caches: Sequence[PagedCache]) -> list[int]:
        """The row of each cache; copies what the device does not know yet."""
        wanted = {cache.serial for cache in caches}
        rows = []
        for cache in caches:
            row = self._row_of(cache, wanted)
            if self._held[row] != (cache.serial, cache.changed):
                self._write(row, cache)
            self._used.remove(row)
            self._used.append(row)
            rows.append(row)
        return rows

    def compact(self) -> bool:
        """Move blocks together (see `PagedPool.compact`), on the device, in few launches and without waiting.

        Steps that were launched before read the old places, later ones the new. The caller holds the decoder's lock.
        False, after a warning, if it failed: then every block is where it was.
        """
        held, self._held = self._held, [None] * len(self._held)  # however this ends, old rows are written anew
        try:
            with torch.inference_mode():
                self._pool.compact(self.carry)
        except Exception as error:  # drivers, Triton and torch raise whatever they like here
            _log.warning("keys and values stay where they are, in more memory than they need: %s", error)
            return False
        self._held = held
        return True

    def carry(self, moves: Moves) -> None:
        """Copy blocks, and rename them in all rows."""
        place = self._pool.distance
        for begin in range(0, len(moves), MOVES):
            some = [(old, new, place(old), place(new)) for old, new in moves[begin : begin + MOVES]]
            on_device = self._staging.placed(np.array(some, np.int64))
            ops.move_blocks(self._pool.slabs, on_device)
            ops.remap(self._both, on_device)

    def _write(self, row: int, cache: PagedCache) -> None:
        self._held[row] = None
        pool, count = self._pool, len(cache.blocks)
        values = np.empty(self._both.shape[1:], np.int64)
        values[0], values[1] = pool.scratch, pool.distance(pool.scratch)
        values[0, :count] = cache.blocks
        values[1, :count] = [pool.distance(block) for block in cache.blocks]
        self._staging.write(self._both[row], values)
        self._held[row] = (cache.serial, cache.changed)

    def _row_of(self, cache: PagedCache, wanted: set[int]) -> int:
        for row, held in enumerate(self._held):
            if held is not None and held[0] == cache.serial:
                return row
        for row in self._used:
            held = self._held[row]
            if held is None or held[0] not in wanted:
                return row
        raise ValueError(f"{len(wanted)} sequences at once, where there are tables for {len(self._held)}")
