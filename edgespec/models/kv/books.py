"""What every KV pool does alike: its books, and the questions that they answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from edgespec.errors import MemoryBudgetError, ModelError
from edgespec.models.kv.blocks import NO_MATCH, BlockPool, Match, NoRoom, PoolStats


class PoolBooks:
    """The part of a `KVPool` that only counts. Raises MemoryBudgetError if `nbytes` are less than one block.

    most_bytes: as far as it may grow. most_entries: of all tables, None = any.
    """

    def __init__(
        self,
        nbytes: int,
        most_bytes: int | None,
        *,
        block_size: int,
        block_bytes: int,
        sequences: int,
        context: int,
        most_entries: int | None = None,
    ) -> None:
        if nbytes < block_bytes:
            raise MemoryBudgetError(
                f"{nbytes} bytes of KV memory are less than one block: {block_size} tokens, {block_bytes} bytes"
            )
        self.block_size, self.block_bytes = block_size, block_bytes
        self.sequences, self.context = sequences, context
        self.most_blocks = max(nbytes, most_bytes or 0) // block_bytes
        self._blocks = BlockPool(nbytes // block_bytes, block_size, most_entries)
        self._least_blocks = self._blocks.total  # `grow` adds what may be taken away again
        self._lock = threading.Lock()
        self._closed = False

    @property
    def stats(self) -> PoolStats:
        return self._blocks.stats

    @property
    def most_tokens(self) -> int:
        return min(self.context, min(self._least_blocks, self._blocks.total) * self.block_size)

    def match(self, ids: Sequence[int]) -> Match:
        with self._lock:
            self._collect()
            return self._blocks.match(ids[: self.context])

    def room(self, tokens: int, match: Match = NO_MATCH) -> bool:
        with self._lock:
            self._collect()
            return len(self._blocks.tables) < self.sequences and self._fits(tokens, match)

    def grow(self, nbytes: int) -> int:
        with self._lock:
            self._check_open()
            count = max(0, min(nbytes // self.block_bytes, self.most_blocks - self._blocks.total))
            self._blocks.grow(count)
            return count * self.block_bytes

    def can_shrink(self, nbytes: int) -> bool:
        with self._lock:
            self._collect()
            return self._blocks.can_shrink(self._smaller(nbytes))

    def _smaller(self, nbytes: int) -> int:
        """Blocks that are left after `nbytes` were given back."""
        return self._blocks.total - -(-nbytes // self.block_bytes)

    def _fits(self, tokens: int, match: Match) -> bool:
        found = self._blocks.match(match.ids).found
        return not self._blocks.missing(min(tokens, self.context), found)

    def _check_sequences(self) -> None:
        if len(self._blocks.tables) >= self.sequences:
            raise NoRoom(f"{self.sequences} sequences run already, which is all there is room for")

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("the KV pool is closed.")

    def _collect(self) -> None:
        """Give back what sequences left that were dropped without a word. Under the lock."""
