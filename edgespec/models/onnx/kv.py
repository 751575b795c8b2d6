"""A KV pool for the CPU engine: sequences whose keys and values are blocks of one file, put together by the MMU.

Each running sequence has a *lane*: addresses for its whole context, shaped and bound as any cache's, over which blocks
are mapped as it grows. Sequences that begin alike map the same blocks. See `models.kv.blocks` for who has which block,
`mapped_memory` for the memory.

Locks. The pool's own guards its books; what takes mappings away while a forward may run in another thread takes the
decoder's before it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from edgespec.errors import ModelError
from edgespec.models.base import FloatArray
from edgespec.models.kv.blocks import NO_MATCH, Match, NoRoom, Table
from edgespec.models.kv.books import PoolBooks
from edgespec.models.kv.sequence import SequenceCache
from edgespec.models.onnx.binding import Outputs
from edgespec.models.onnx.decoder import OnnxCache
from edgespec.models.onnx.mapped_memory import PAGE, BlockFile, Region, most_mappings
from edgespec.models.spec import ModelSpec

if TYPE_CHECKING:
    from edgespec.models.onnx.binding import Binding
    from edgespec.models.onnx.decoder import OnnxDecoder

_log = logging.getLogger(__name__)

_LEAST_BLOCK = 64  # positions


class Lane:
    """The addresses of one sequence. buffers: float32 [1, kv_heads, rows, head_dim] per layer and kind.

    bindings: kept from sequence to sequence, since the addresses stay; the rows that come out are not. Raises OSError.
    """

    def __init__(self, spec: ModelSpec, stride: int) -> None:
        heads = spec.num_kv_heads
        self.region = Region(2 * spec.num_layers * heads, stride)
        floats = self.region.floats().reshape(2 * spec.num_layers, 1, heads, -1, spec.head_dim)
        self.buffers: list[FloatArray] = list(floats)
        self.bindings: dict[bool, Binding] = {}
        self.outputs = Outputs(spec)


class PooledCache(OnnxCache):
    """A sequence of a `MappedPool`."""

    def __init__(self, pool: MappedPool, lane: Lane, table: Table) -> None:
        SequenceCache.__init__(self, pool.owner, pool.context, pool.position_bytes)  # its buffers are the lane's
        self.buffers = lane.buffers
        self.bindings, self.outputs = lane.bindings, lane.outputs
        self.lane: Lane | None = lane
        self.table = table
        self.own = 0  # from this position on, what is mapped may be written
        self.mapped = 0  # positions that have memory of the pool
        self.broken = ""
        self._pool = pool
        self._left = weakref.finalize(self, pool.left.append, (table, lane))
        self._left.atexit = False

    def reserve(self, length: int) -> None:
        """Raises ModelError if it was released or belongs to another process, NoRoom beyond what was promised."""
        super().reserve(length)
        if self.length < self.own or length > self.mapped or os.getpid() != self._pool.pid:
            self._pool.reserve(self, length)

    def crop(self, length: int) -> int:
        dropped = super().crop(length)
        if length < self.own and self.lane is not None:
            self._pool.cut(self)
        return dropped

    def share(self, ids: Sequence[int]) -> None:
        """Others may take over what this one holds of `ids`, its tokens from the first on."""
        self._pool.share(self, ids)

    def release(self, ids: Sequence[int] = ()) -> None:
        """It is over: its blocks go back, those of `ids` stay known until the room is needed. Idempotent."""
        self._pool.release(self, ids)

    def detach(self) -> tuple[Table, Lane] | None:
        """Make this unusable; its table and lane, None if it has been done before."""
        if self.lane is None:
            return None
        lane, self.lane = self.lane, None
        self.buffers, self.bindings = [], {}
        self.length = self.own = 0
        self.mapped = -1
        self._left.detach()
        return self.table, lane


class MappedPool(PoolBooks):
    """A `KVPool` over a file in memory. lock: the decoder's.

    Raises MemoryBudgetError if there is not even one block, OSError if the system has no such files.
    """

    def __init__(
        self,
        owner: OnnxDecoder,
        lock: threading.Lock,
        nbytes: int,
        *,
        sequences: int,
        context: int,
        most_bytes: int | None = None,
    ) -> None:
        spec = owner.spec
        planes, self._row = 2 * spec.num_layers * spec.num_kv_heads, spec.head_dim * 4
        self.position_bytes = planes * self._row
        entries = max(most_mappings() // planes - 2 * sequences, 2)
        positions = max(nbytes, most_bytes or 0) // self.position_bytes
        size = block_size_for(self._row, positions, context, entries // 2)
        super().__init__(
            nbytes,
            most_bytes,
            block_size=size,
            block_bytes=size * self.position_bytes,
            sequences=sequences,
            context=context,
            most_entries=entries,
        )
        self.owner = owner
        self.pid = os.getpid()
        self.left: deque[tuple[Table, Lane]] = deque()  # of caches that were dropped without being released
        self._file = BlockFile(planes, size * self._row, self.most_blocks)
        # A page more for the row that keeps another company.
        self._stride = self._blocks.blocks_for(context) * self._file.piece + PAGE
        self._lanes: list[Lane] = []
        self._caches: weakref.WeakSet[PooledCache] = weakref.WeakSet()
        self._decoder_lock = lock

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    # Sequences

    def new_cache(self, tokens: int, match: Match = NO_MATCH) -> PooledCache:
        with self._lock:
            self._check_open()
            self._collect()
            self._check_sequences()
            match = self._blocks.match(match.ids)  # the pool may have changed since it was made
            table = self._blocks.admit(min(max(tokens, match.tokens + 1), self.context), match.found)
            try:
                lane = self._lanes.pop() if self._lanes else Lane(self.owner.spec, self._stride)
            except (OSError, MemoryError, ValueError) as error:
                self._blocks.release(table)
                raise NoRoom(f"there are no addresses for another sequence ({error})") from error
            cache = PooledCache(self, lane, table)
            self._caches.add(cache)
            try:
                lane.region.map(self._file, 0, table.blocks)
            except OSError as error:
                self._end(cache)
                raise NoRoom(f"blocks cannot be mapped ({error})") from error
            cache.length = cache.own = cache.mapped = len(table.blocks) * self.block_size
            if match.found.tail is not None:
                self._begin_alike(cache, match.found.tail, match.found.extra)
            return cache

    def _begin_alike(self, cache: PooledCache, tail: int, extra: int) -> None:
        """Copy the first `extra` positions of block `tail`, if there is room for it just now."""
        with suppress(NoRoom, OSError):
            self._extend(cache, 1, keep=tail)
            self._file.copy(tail, cache.table.blocks[-1], extra * self._row)
            cache.length += extra
            self._blocks.counted(extra, copied=1)

    def reserve(self, cache: PooledCache, length: int) -> None:
        """Give positions from the cache's length to `length` memory that nobody else sees."""
        self._check_usable(cache)  # without the lock, which a fork may have left taken
        with self._lock:
            self._collect()
            table, first = cache.table, cache.length // self.block_size
            if cache.length < cache.own:
                if first < len(table.blocks):
                    self._unshare(cache, first)
                cache.own = first * self.block_size
            missing = self._blocks.blocks_for(length) - len(table.blocks)
            if missing > 0:
                self._extend(cache, missing)

    def _unshare(self, cache: PooledCache, index: int) -> None:
        move = self._blocks.writable(cache.table, index)
        if move is None:
            return
        old, new = move
        try:
            self._file.ensure([new])
            self._file.copy(old, new, cache.length % self.block_size * self._row)
            self._map(cache, index, [new])
        except OSError as error:
            self._blocks.unwritable(cache.table, index, old)
            self._mend(cache, index, [old])
            raise NoRoom(f"a shared block cannot be copied ({error})") from error

    def _extend(self, cache: PooledCache, count: int, keep: int | None = None) -> None:
        table = cache.table
        at = len(table.blocks)
        taken = self._blocks.extend(table, count, keep=keep)
        try:
            self._file.ensure(taken)
            self._map(cache, at, taken)
        except OSError as error:
            self._blocks.retract(table, count)
            self._blank(cache, at, count)
            raise NoRoom(f"the system has no memory for {count} more blocks ({error})") from error
        cache.mapped = len(table.blocks) * self.block_size

    def cut(self, cache: PooledCache) -> None:
        """The cache was cropped below what it shares."""
        with self._lock:
            table = cache.table
            dropped = self._blocks.cut(table, self._blocks.blocks_for(cache.length))
            cache.mapped = len(table.blocks) * self.block_size
            if dropped:
                self._blank(cache, len(table.blocks), dropped)

    def share(self, cache: PooledCache, ids: Sequence[int]) -> None:
        with self._lock:
            self._check_usable(cache)
            known = ids[: cache.length]
            self._blocks.publish(cache.table, known)
            cache.own = max(cache.own, len(known) // self.block_size * self.block_size)

    def release(self, cache: PooledCache, ids: Sequence[int] = ()) -> None:
        with self._decoder_lock, self._lock:
            if cache.lane is not None:
                self._end(cache, ids[: cache.length])

    def _end(self, cache: PooledCache, ids: Sequence[int] = ()) -> None:
        broken = cache.broken
        ended = cache.detach()
        if ended is not None and not self._closed:
            self._give_back(*ended, ids, usable=not broken)

    def _give_back(self, table: Table, lane: Lane, ids: Sequence[int] = (), *, usable: bool = True) -> None:
        """The blocks of a sequence that is over; its lane only once nothing of them is mapped there."""
        if os.getpid() != self.pid:
            return
        lane.outputs.drop()
        with suppress(OSError):  # the lane is dropped then: its addresses go with its last array
            lane.region.blank(0, self._stride)
            if usable:
                self._lanes.append(lane)
        self._blocks.release(table, ids)

    def _collect(self) -> None:
        while self.left:
            self._give_back(*self.left.popleft())

    # Size

    def shrink(self, nbytes: int) -> int:
        with self._decoder_lock, self._lock:
            self._check_open()
            self._collect()
            before = self._blocks.total
            total = self._smaller(nbytes)
            moves = None if total == before else self._blocks.plan_shrink(total)
            if moves is None or not self._move(dict(moves)):
                return 0
            self._blocks.shrink(total, moves)
            try:
                self._file.punch(range(total, before))
            except OSError as error:
                _log.warning("the memory of %d KV blocks is not given back: %s", before - total, error)
            return (before - total) * self.block_bytes

    def _move(self, names: dict[int, int]) -> bool:
        """Copy blocks and map the copies; False if that failed and everything is as before."""
        done: list[tuple[PooledCache, int]] = []
        try:
            self._file.ensure(sorted(names.values()))
            for old, new in names.items():
                self._file.copy(old, new)
            for cache in list(self._caches):  # both copies hold the same now
                for index, block in enumerate(cache.table.blocks if cache.lane is not None else ()):
                    if block in names:
                        done.append((cache, index))
                        self._map(cache, index, [names[block]])
        except OSError as error:
            _log.warning("the KV memory cannot be compacted: %s", error)
            for cache, index in done:
                self._mend(cache, index, [cache.table.blocks[index]])
            return False
        return True

    def close(self) -> None:
        """Idempotent. Caches that still run cannot be used any more."""
        with self._decoder_lock, self._lock:
            self._closed = True
            lanes = [ended[1] for cache in list(self._caches) if (ended := cache.detach()) is not None]
            for lane in (*lanes, *self._lanes):
                lane.bindings.clear()  # they hold addresses, which go with the lane's arrays
            self._lanes.clear()
            self.left.clear()
            self._file.close()

    # Inside

    def _map(self, cache: PooledCache, at: int, blocks: Sequence[int]) -> None:
        assert cache.lane is not None
        cache.lane.region.map(self._file, at, blocks)

    def _mend(self, cache: PooledCache, at: int, blocks: Sequence[int]) -> None:
        """Map again what was mapped before a failure, or let nobody touch these addresses again."""
        try:
            self._map(cache, at, blocks)
        except OSError as error:
            cache.broken, cache.mapped = str(error), -1

    def _blank(self, cache: PooledCache, at: int, count: int) -> None:
        assert cache.lane is not None
        try:
            cache.lane.region.blank(at * self._file.piece, count * self._file.piece)
        except OSError as error:
            cache.broken, cache.mapped = str(error), -1

    def _check_usable(self, cache: PooledCache) -> None:
        if cache.broken:
            raise ModelError(f"the KV cache of this sequence was lost: {cache.broken}")
        self._check_open()
        if cache.lane is None:
            raise ModelError("the KV cache of this sequence was released")

    def _check_open(self) -> None:
        super()._check_open()
        if os.getpid() != self.pid:
            raise ModelError("the KV memory belongs to the process that this one was forked from; load a model anew.")


def block_size_for(row: int, positions: int, context: int, most: int) -> int:
    """Positions of a block: whole pages of `row` bytes, at least 64, and so many that `positions` are `most` blocks.

    A longer block than the context is of no use.
    """
    unit = next(count for count in range(1, PAGE + 1) if count * row % PAGE == 0)
    size = -(-_LEAST_BLOCK // unit) * unit
    while -(-positions // size) > most and size < context:
        size *= 2
    return size
