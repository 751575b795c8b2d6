"""A KV pool whose sequences have caches of their own: for engines or systems where blocks cannot be mapped.

The books are those of the other pool, so promises hold in the same way; but nothing is shared: what a finished text
left is a copy, block by block, and one that begins alike copies it again.

Locks. The decoder's comes before the pool's: forwards hold it when they reserve, and whatever else takes or gives back
the decoder's memory does so too (on a GPU nothing may be allocated while another thread captures a graph).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from edgespec.errors import ModelError
from edgespec.models.base import KVCache
from edgespec.models.checks import check_room
from edgespec.models.kv.blocks import NO_MATCH, Match, Table
from edgespec.models.kv.books import PoolBooks
from edgespec.models.kv.sequence import SequenceCache

_BLOCK = 64  # positions


class Copied(KVCache, Protocol):
    """A cache whose positions can be copied."""

    def read(self, begin: int, end: int) -> Any:
        """A copy of these positions, in a form of the cache's own."""

    def append(self, piece: Any, count: int) -> None:
        """Append the first `count` positions of what `read` gave."""


class PlainSequence(SequenceCache):
    """What a pool adds to a cache class, as its first base. `join` comes before anything else."""

    def join(self, pool: PlainPool, table: Table) -> None:
        self._pool: PlainPool | None = pool
        self._table = table
        self._left = weakref.finalize(self, pool.left.append, table)
        self._left.atexit = False

    def reserve(self, length: int) -> None:
        """Raises ModelError beyond the capacity or if it was released, NoRoom beyond what was promised."""
        check_room(self, length - self.length)  # before any block is taken
        self._check_pool().reserve(self._table, length)
        super().reserve(length)

    def share(self, ids: Sequence[int]) -> None:
        """Nothing: others can take over what is left when this sequence is over."""
        self._check_pool()

    def release(self, ids: Sequence[int] = ()) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            self._left.detach()
            pool.release(self, self._table, ids[: self.length])
            self.crop(0)

    def _check_pool(self) -> PlainPool:
        if self._pool is None:
            raise ModelError("the KV cache of this sequence was released")
        return self._pool


class PlainPool(PoolBooks):
    """A `KVPool`. make: an empty cache that is a PlainSequence and Copied. lock: the decoder's."""

    def __init__(
        self,
        make: Callable[[], Any],
        lock: AbstractContextManager[Any],
        nbytes: int,
        *,
        position_bytes: int,
        sequences: int,
        context: int,
        most_bytes: int | None = None,
    ) -> None:
        super().__init__(
            nbytes,
            most_bytes,
            block_size=_BLOCK,
            block_bytes=_BLOCK * position_bytes,
            sequences=sequences,
            context=context,
        )
        self.left: deque[Table] = deque()
        self._make = make
        self._kept: dict[int, Any] = {}  # what cached blocks hold
        self._decoder_lock = lock

    @property
    def nbytes(self) -> int:
        """Of the books: a cache of its own takes a little more or less."""
        stats = self.stats
        return (stats.used + stats.cached) * self.block_bytes

    def new_cache(self, tokens: int, match: Match = NO_MATCH) -> Any:
        with self._decoder_lock, self._lock:
            self._check_open()
            self._collect()
            self._check_sequences()
            match = self._blocks.match(match.ids)
            table = self._blocks.admit(min(max(tokens, match.tokens + 1), self.context))
            try:
                cache = self._make()
                for block in match.found.blocks:
                    cache.append(self._kept[block], self.block_size)
                if match.found.tail is not None:
                    cache.append(self._kept[match.found.tail], match.found.extra)
                self._blocks.extend(table, self._blocks.blocks_for(cache.length))
            except BaseException:
                self._blocks.release(table)
                raise
            self._blocks.counted(cache.length)
            self._prune()
            cache.join(self, table)
            return cache

    def reserve(self, table: Table, length: int) -> None:
        with self._lock:
            self._check_open()
            missing = self._blocks.blocks_for(length) - len(table.blocks)
            if missing > 0:
                self._blocks.extend(table, missing)
                self._prune()

    def release(self, cache: Any, table: Table, ids: Sequence[int] = ()) -> None:
        with self._decoder_lock, self._lock:
            if self._closed:
                return
            size, had = self.block_size, list(table.blocks)
            self._blocks.release(table, ids)
            cached = set(self._blocks.cached())
            new = [(index, block) for index, block in enumerate(had) if block in cached]
            try:
                for index, block in new:
                    self._kept[block] = cache.read(index * size, min((index + 1) * size, len(ids)))
            except BaseException:
                self._blocks.evict([block for _index, block in new])
                self._prune()
                raise

    def shrink(self, nbytes: int) -> int:
        with self._decoder_lock, self._lock:
            self._check_open()
            self._collect()
            before, total = self._blocks.total, self._smaller(nbytes)
            moves = None if total == before else self._blocks.plan_shrink(total)
            if moves is None:
                return 0
            self._prune()  # first: a block may move to the number of one that was evicted
            self._blocks.shrink(total, moves)
            names = dict(moves)
            self._kept = {names.get(old, old): kept for old, kept in self._kept.items()}
            return (before - total) * self.block_bytes

    def close(self) -> None:
        with self._decoder_lock, self._lock:
            self._closed = True
            self._kept.clear()
            self.left.clear()

    def _collect(self) -> None:
        while self.left:
            self._blocks.release(self.left.popleft())

    def _prune(self) -> None:
        """Drop the copies of blocks that were evicted."""
        if self._kept:
            for block in set(self._kept).difference(self._blocks.cached()):
                del self._kept[block]
