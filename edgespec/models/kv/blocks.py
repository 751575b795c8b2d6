"""Who has which block of keys and values: tables, promises, and what finished texts left for the next ones.

A block is a number here, whose memory somebody else has. It is *used* by one or more tables, or *cached* (no table has
it, but it holds tokens that may be asked for again; the longest untouched goes first), or *free*. A table is promised
the blocks of its whole text when it is admitted and takes them as the text grows. The promise always holds:
promised <= free + cached. So what was admitted never waits and is never thrown out. (Unless it is cropped into what it
shares, below its prompt, which serving never does: a block that went on to others is not promised again.)

No threads: the owner serialises calls. `stats` may be read from any thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgespec.errors import EdgespecError
from edgespec.models.kv.prefixes import NOTHING, Found, PrefixIndex


class NoRoom(EdgespecError):
    """There are not enough blocks now. needed, available, total: blocks."""

    def __init__(self, message: str, needed: int = 0, available: int = 0, total: int = 0) -> None:
        super().__init__(message)
        self.needed, self.available, self.total = needed, available, total


class PoolStats(NamedTuple):
    """Blocks at one moment: total = free + cached + used. The last four count since the pool was made.

    promised: of those free or cached, how many running sequences may still take. shared: how many more blocks would be
    used if nobody shared any. hit_tokens: taken over from texts before. copied: blocks copied because their sharer
    went another way, or in part for one that begins alike. moved: by compaction.
    """

    total: int
    free: int
    cached: int
    promised: int
    used: int
    shared: int
    sequences: int
    hit_tokens: int = 0
    copied: int = 0
    evicted: int = 0
    moved: int = 0

    @property
    def available(self) -> int:
        """Blocks that a new request could be promised."""
        return self.free + self.cached - self.promised

    @property
    def free_share(self) -> float:
        """`available` as a share of all."""
        return self.available / self.total if self.total else 0.0


class Match(NamedTuple):
    """What is known of the beginning of `ids`. tokens: how many of them, always less than all."""

    ids: Sequence[int] = ()
    tokens: int = 0
    found: Found = NOTHING


NO_MATCH = Match()


class Table:
    """A sequence's blocks, in order of position. limit: blocks that it was promised in all; promised: not yet taken."""

    __slots__ = ("__weakref__", "blocks", "limit", "promised")

    def __init__(self, limit: int) -> None:
        self.blocks: list[int] = []
        self.limit = limit
        self.promised = 0


class BlockPool:
    """blocks: how many there are. block_size: positions of one. most_entries: of all tables together, None = any."""

    def __init__(self, blocks: int, block_size: int, most_entries: int | None = None) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"{blocks} blocks of {block_size} positions")
        self.total = blocks
        self.block_size = block_size
        self._most_entries = most_entries
        self._free = set(range(blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest untouched first
        self._users: dict[int, int] = {}
        self._index = PrefixIndex(block_size)
        self._tables: list[Table] = []
        self._promised = 0
        self._hits = self._copied = self._evicted = self._moved = 0
        self._note()

    # Asking

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, ids: Sequence[int]) -> Match:
        """What is known of `ids` without the last one, whose row is needed."""
        known = ids[:-1]
        found = self._index.find(known)
        return Match(ids, len(found.blocks) * self.block_size + found.extra, found)

    def missing(self, tokens: int, found: Found = NOTHING) -> int:
        """How many blocks too few there are to admit `tokens` positions that begin with what was found."""
        need = max(0, self.blocks_for(tokens) - len(found.blocks))
        waiting = sum(block in self._cached for block in found.blocks)  # in use from then on
        return max(0, need - (self._available - waiting - self._promised))

    @property
    def _available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def tables(self) -> Sequence[Table]:
        return tuple(self._tables)

    # A sequence's life

    def admit(self, tokens: int, found: Found = NOTHING) -> Table:
        """A table that begins with the blocks found and may grow to `tokens` positions. Raises NoRoom."""
        limit, missing = max(self.blocks_for(tokens), len(found.blocks)), self.missing(tokens, found)
        if missing:
            raise self._no_room(f"{tokens} tokens need {limit - len(found.blocks)} more blocks", limit)
        self._check_entries(limit)
        table = Table(limit)
        for block in found.blocks:
            self._use(block, table)
        table.promised = limit - len(found.blocks)
        self._promised += table.promised
        self._tables.append(table)
        self._hits += len(found.blocks) * self.block_size
        self._note()
        return table

    def extend(self, table: Table, count: int, *, keep: int | None = None) -> list[int]:
        """`count` more blocks at the table's end. keep: a cached block that must not be evicted for it.

        Never fails within the promise (unless `keep` is all that is left); beyond it raises NoRoom if others were
        promised what is left. All or nothing.
        """
        beyond = count - table.promised
        if beyond > 0 and beyond > self._available - self._promised:
            raise self._no_room(f"{count} more blocks are asked for, {beyond} beyond the promise", count)
        if keep is not None and keep in self._cached and self._available - 1 < count:
            raise self._no_room(f"{count} more blocks beside one that is copied", count)
        if len(table.blocks) + count > table.limit:
            self._check_entries(len(table.blocks) + count - table.limit)
        taken = []
        for _ in range(count):
            block = self._take(table.blocks[-1] + 1 if table.blocks else None, keep)
            self._use(block, table)
            taken.append(block)
        self._spend(table, count)
        self._note()
        return taken

    def retract(self, table: Table, count: int) -> None:
        """Undo `extend`: its blocks cannot be used after all."""
        for _ in range(count):
            self._drop(table)
        self._note()

    def writable(self, table: Table, index: int) -> tuple[int, int] | None:
        """Make the table's block number `index` its own: (shared block, the new one to copy it to), or None.

        Raises NoRoom if another block is needed and there is none.
        """
        block = table.blocks[index]
        if self._users[block] == 1:
            if block in self._index:
                self._forget(block)
                self._note()
            return None
        if not table.promised and self._available <= self._promised:
            raise self._no_room("a shared block cannot be copied: 1 more block is needed", 1)
        new = self._take(None, None)
        self._users[block] -= 1
        self._users[new] = 1
        table.blocks[index] = new
        self._spend(table, 1)
        self._copied += 1
        self._note()
        return block, new

    def unwritable(self, table: Table, index: int, shared: int) -> None:
        """Undo `writable`: nothing was copied."""
        new = table.blocks[index]
        table.blocks[index] = shared
        self._users[shared] += 1
        self._unuse(new)
        self._repay(table)
        self._note()

    def cut(self, table: Table, keep: int) -> int:
        """The table's text is cropped into its first `keep` blocks: drop what must not be written; returns how many.

        Blocks of its own stay, they will be written again; from the first that others see on, all go.
        """
        blocks = table.blocks
        first = next((i for i in range(keep, len(blocks)) if not self.own(blocks[i])), len(blocks))
        dropped = len(blocks) - first
        for _ in range(dropped):
            self._drop(table)
        if dropped:
            self._note()
        return dropped

    def own(self, block: int) -> bool:
        """Whether a table may write into this block of its."""
        return self._users[block] == 1 and block not in self._index

    def publish(self, table: Table, ids: Sequence[int]) -> None:
        """The table's first blocks hold `ids`: full ones can be matched from now on."""
        full = min(len(ids) // self.block_size, len(table.blocks))
        self._index.add(ids, table.blocks[:full])

    def release(self, table: Table, ids: Sequence[int] = ()) -> None:
        """The sequence is over. What its blocks hold of `ids` (the last one in part) stays known."""
        if table not in self._tables:
            raise ValueError("the table was released before")
        count = min(self.blocks_for(len(ids)), len(table.blocks))
        self._index.add(ids[: count * self.block_size], table.blocks[:count])
        self._tables.remove(table)
        self._promised -= table.promised
        table.promised = 0
        for block in reversed(table.blocks):  # the end of a text is evicted before its beginning
            self._unuse(block)
        table.blocks.clear()
        self._note()

    def counted(self, extra: int, *, copied: int = 0) -> None:
        """Positions taken over by copying a part of a block."""
        self._hits += extra
        self._copied += copied
        self._note()

    # Size

    def grow(self, blocks: int) -> None:
        """There are `blocks` more."""
        self._free.update(range(self.total, self.total + blocks))
        self.total += blocks
        self._note()

    def can_shrink(self, total: int) -> bool:
        """Whether what is used and promised fits into `total` blocks."""
        return 0 < total <= self.total and len(self._users) + self._promised <= total

    def plan_shrink(self, total: int) -> list[tuple[int, int]] | None:
        """The moves (old, new) after which no block from `total` on is needed; None if promises need more than that.

        Evicts cached blocks that have no room any more. Every `new` is free, so any order of the moves is right.
        """
        if not self.can_shrink(total):
            return None
        while len(self._users) + len(self._cached) > total:
            self._evict(next(iter(self._cached)))
        high = sorted(block for block in (*self._users, *self._cached) if block >= total)
        low = sorted(block for block in self._free if block < total)
        self._note()
        return list(zip(high, low))

    def shrink(self, total: int, moves: Iterable[tuple[int, int]]) -> None:
        """The planned moves were made; blocks from `total` on are gone."""
        names = dict(moves)
        for table in self._tables:
            table.blocks[:] = [names.get(block, block) for block in table.blocks]
        for old, new in names.items():
            if old in self._index:
                self._index.rename(old, new)
            if old in self._users:
                self._users[new] = self._users.pop(old)
            self._free.discard(new)
        self._cached = OrderedDict((names.get(block, block), None) for block in self._cached)
        self._free = {block for block in self._free if block < total}
        self.total = total
        self._moved += len(names)
        self._note()

    def evict(self, blocks: Iterable[int]) -> None:
        """Forget what these blocks hold, as far as they are cached."""
        for block in blocks:
            if block in self._cached:
                self._evict(block)
        self._note()

    @property
    def stats(self) -> PoolStats:
        """As of the last change; from any thread."""
        return self._stats

    def cached(self) -> Sequence[int]:
        """The cached blocks, the one to be evicted first in front."""
        return tuple(self._cached)

    # Inside

    def _use(self, block: int, table: Table) -> None:
        self._cached.pop(block, None)
        self._users[block] = self._users.get(block, 0) + 1
        table.blocks.append(block)

    def _unuse(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block]:
            return
        del self._users[block]
        if block in self._index:
            self._cached[block] = None
        else:
            self._free.add(block)

    def _drop(self, table: Table) -> None:
        self._unuse(table.blocks.pop())
        self._repay(table)

    def _spend(self, table: Table, count: int) -> None:
        paid = min(count, table.promised)
        table.promised -= paid
        self._promised -= paid

    def _repay(self, table: Table) -> None:
        """A block went back: it is promised again, unless it went on to others and there is nothing left to promise."""
        if len(table.blocks) + table.promised < table.limit and self._available > self._promised:
            table.promised += 1
            self._promised += 1

    def _take(self, wanted: int | None, keep: int | None) -> int:
        """A free block, if possible the one that continues a run: runs are cheap to map."""
        if not self._free:
            self._evict(next(block for block in self._cached if block != keep))
        block = wanted if wanted in self._free and wanted is not None else self._start()
        self._free.remove(block)
        return block

    def _start(self) -> int:
        """Where a new run begins: in the longest gap, and not where the run before it wants to go on."""
        begin = best = previous = -1
        length = 0
        for block in sorted(self._free):
            if block != previous + 1 or begin < 0:
                begin = block
            if block - begin + 1 > length:
                best, length = begin, block - begin + 1
            previous = block
        growing = {table.blocks[-1] for table in self._tables if table.blocks}
        return best + length // 2 if best - 1 in growing else best

    def _evict(self, block: int) -> None:
        self._evicted += 1
        self._forget(block)

    def _forget(self, block: int) -> None:
        """Its tokens are not known any more, nor those of blocks that followed it."""
        for each in self._index.remove(block):
            if each in self._cached:
                del self._cached[each]
                self._free.add(each)

    def _check_entries(self, more: int) -> None:
        if self._most_entries is None:
            return
        entries = sum(max(table.limit, len(table.blocks)) for table in self._tables)
        if entries + more > self._most_entries:
            raise self._no_room(
                f"{entries} + {more} blocks of running texts would pass the {self._most_entries} that can be mapped",
                more,
            )

    def _no_room(self, what: str, needed: int) -> NoRoom:
        free = self._available - self._promised
        return NoRoom(
            f"the KV memory has no room now: {what}, of {self.total} blocks of {self.block_size} tokens "
            f"{free} can be given ({len(self._users)} in use, {self._promised} promised)",
            needed,
            free,
            self.total,
        )

    def _note(self) -> None:
        entries = sum(len(table.blocks) for table in self._tables)
        used, counts = len(self._users), (self._hits, self._copied, self._evicted, self._moved)
        now = (self.total, len(self._free), len(self._cached), self._promised, used, entries - used)
        self._stats = PoolStats(*now, len(self._tables), *counts)
