"""The books of the KV pool, against a memory that is simulated: block contents follow every copy, move and write."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgespec.models.kv.blocks import BlockPool, NoRoom, Table

SIZE = 4
TEXTS = st.lists(st.integers(0, 1), max_size=22)  # two words: texts that begin alike are the rule


def full(pool: BlockPool, ids: list[int]) -> Table:
    """A table for `ids`, all blocks taken."""
    table = pool.admit(len(ids))
    pool.extend(table, pool.blocks_for(len(ids)))
    return table


def test_a_promise_is_kept_whatever_others_ask_for():
    pool = BlockPool(6, SIZE)
    table = pool.admit(16)
    assert (pool.stats.promised, pool.stats.available) == (4, 2)
    with pytest.raises(NoRoom, match="12 tokens need 3 more blocks, of 6 blocks of 4 tokens 2 can be given") as caught:
        pool.admit(12)
    assert (caught.value.needed, caught.value.available, caught.value.total) == (3, 2, 6)
    greedy = pool.admit(4)
    pool.extend(greedy, 2)  # one beyond its promise, while there is one
    with pytest.raises(NoRoom, match="1 beyond the promise"):
        pool.extend(greedy, 1)
    assert len(pool.extend(table, 4)) == 4
    assert pool.stats.free == pool.stats.promised == 0


def test_a_prefix_is_shared_and_outlives_its_text():
    pool = BlockPool(8, SIZE)
    ids = list(range(10))
    first = full(pool, ids)
    assert pool.match(ids).tokens == 0
    pool.publish(first, ids)
    assert pool.match(ids[:9]).tokens == 8
    assert pool.match(ids[:8]).tokens == 7  # the last token is left to be computed: a part of a block
    second = pool.admit(12, pool.match([*ids[:8], 77, 78]).found)
    assert second.blocks == first.blocks[:2]
    assert (pool.stats.used, pool.stats.shared, pool.stats.promised) == (3, 2, 1)
    pool.release(first, ids)
    assert (pool.stats.used, pool.stats.cached, pool.stats.free) == (2, 1, 5)
    match = pool.match([*ids, 5])
    assert match.tokens == 10
    assert match.found.extra == 2
    pool.release(second)
    assert pool.match([*ids, 5]) == match
    everything = pool.admit(8 * SIZE)  # cached blocks are room, and go when they are needed
    pool.extend(everything, 8)
    assert pool.match([*ids, 5]).tokens == 0
    assert pool.stats.evicted == 3


def test_the_end_of_a_text_is_evicted_before_its_beginning():
    pool = BlockPool(3, SIZE)
    ids = list(range(12))
    pool.release(full(pool, ids), ids)
    table = pool.admit(SIZE)
    pool.extend(table, 1)
    assert pool.match([*ids, 0]).tokens == 8


def test_writing_into_a_shared_block_needs_a_copy_and_into_a_known_one_forgets_it():
    pool = BlockPool(5, SIZE)
    ids = list(range(8))
    one = full(pool, ids)
    pool.publish(one, ids)
    other = pool.admit(8, pool.match([*ids, 1]).found)
    move = pool.writable(other, 1)
    assert move is not None
    assert move[0] == one.blocks[1] != move[1] == other.blocks[1]
    assert pool.match([*ids, 1]).tokens == 8  # what was published is as it was
    assert pool.writable(other, 1) is None
    pool.release(other)
    assert pool.writable(one, 0) is None
    assert pool.match([*ids, 1]).tokens == 0  # and what followed it is out of reach


def test_crop_keeps_own_blocks_and_drops_those_that_others_see():
    pool = BlockPool(8, SIZE)
    ids = list(range(16))
    table = pool.admit(24)
    pool.extend(table, 5)
    assert pool.cut(table, 1) == 0
    assert len(table.blocks) == 5
    pool.publish(table, ids)
    assert pool.cut(table, 2) == 3
    assert (len(table.blocks), table.promised) == (2, 4)
    assert pool.match([*ids, 1]).tokens == 16


def test_a_text_that_was_cropped_into_what_it_shared_may_end_there():
    pool = BlockPool(8, SIZE)
    ids = list(range(16))
    table = full(pool, ids)
    pool.publish(table, ids)
    pool.cut(table, 2)
    pool.release(table, ids[:6])
    assert pool.match([*ids, 1]).tokens == 16


def test_a_prefix_that_is_taken_over_is_no_room_any_more():
    pool = BlockPool(4, SIZE)
    ids = list(range(8))
    pool.release(full(pool, ids), ids)
    other = pool.admit(8)
    found = pool.match([*ids, 1]).found
    assert (pool.stats.available, len(found.blocks)) == (2, 2)
    assert pool.missing(12, found) == 1  # both blocks that could be given are those taken over
    with pytest.raises(NoRoom):
        pool.admit(12, found)
    assert pool.missing(8, found) == 0
    pool.admit(8, found)
    pool.extend(other, 2)


def test_what_is_copied_is_not_evicted_for_it():
    pool = BlockPool(2, SIZE)
    for word in (1, 2):
        pool.release(full(pool, [word] * 4), [word] * 4)
    match = pool.match([1, 1, 1, 9])
    assert (match.tokens, match.found.extra) == (3, 3)
    table = pool.admit(4)
    assert pool.extend(table, 1, keep=match.found.tail) != [match.found.tail]
    assert pool.match([1, 1, 1, 9]) == match
    assert pool.match([2, 2, 2, 9]).tokens == 0
    with pytest.raises(NoRoom, match="beside one that is copied"):
        pool.extend(pool.admit(4), 1, keep=match.found.tail)


def test_what_goes_on_to_others_is_not_promised_again():
    pool = BlockPool(4, SIZE)
    ids = list(range(8))
    one = full(pool, ids)
    pool.publish(one, ids)
    other = pool.admit(8, pool.match([*ids, 1]).found)
    third = pool.admit(8)
    pool.cut(other, 0)
    assert (other.promised, pool.stats.promised, pool.stats.available) == (0, 2, 0)
    with pytest.raises(NoRoom):
        pool.extend(other, 1)
    pool.extend(third, 2)
    pool.release(third)
    pool.extend(other, 1)


def test_what_followed_a_block_that_is_written_anew_is_free():
    pool = BlockPool(4, SIZE)
    ids = list(range(12))
    table = full(pool, ids)
    pool.publish(table, ids)
    pool.cut(table, 1)
    assert pool.stats.cached == 2
    assert pool.writable(table, 0) is None
    assert (pool.stats.cached, pool.stats.free) == (0, 3)
    pool.extend(table, 3)


def test_growing_runs_are_kept_apart():
    """A sequence's blocks follow each other as long as that is possible: a run is one mapping a plane."""
    pool = BlockPool(64, SIZE)
    tables = [pool.admit(8 * SIZE) for _ in range(4)]
    for _ in range(8):
        for table in tables:
            pool.extend(table, 1)
    breaks = sum(b != a + 1 for table in tables for a, b in zip(table.blocks, table.blocks[1:]))
    assert breaks <= 2


def test_mappings_are_limited():
    pool = BlockPool(10, SIZE, most_entries=6)
    pool.admit(16)
    with pytest.raises(NoRoom, match="4 \\+ 3 blocks of running texts would pass the 6 that can be mapped"):
        pool.admit(12)
    assert pool.stats.sequences == 1


def test_shrinking_keeps_promises():
    pool = BlockPool(10, SIZE)
    table = pool.admit(5 * SIZE)
    pool.extend(table, 2)
    assert pool.plan_shrink(4) is None
    assert pool.plan_shrink(0) is None
    moves = pool.plan_shrink(5)
    assert moves is not None
    pool.shrink(5, moves)
    assert pool.stats.available == 0
    pool.extend(table, 3)
    assert sorted(table.blocks) == [0, 1, 2, 3, 4]


class Books(RuleBasedStateMachine):
    """Sequences with contents. `memory`: what each block holds by position; a table must always read its own text."""

    @initialize(blocks=st.integers(2, 12))
    def begin(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.memory: dict[int, list[int | None]] = {block: [None] * SIZE for block in range(40)}
        self.running: list[tuple[Table, list[int]]] = []
        self.kept: dict[int, int] = {}  # table -> positions it may still be asked for

    def pick(self, which: int) -> tuple[Table, list[int]]:
        return self.running[which % len(self.running)]

    @rule(ids=TEXTS, more=st.integers(1, 9))
    def admit(self, ids: list[int], more: int) -> None:
        match = self.pool.match(ids)
        limit, before = len(ids) + more, self.pool.stats
        if self.pool.missing(limit, match.found):
            with pytest.raises(NoRoom):
                self.pool.admit(limit, match.found)
            assert self.pool.stats == before
            return
        table = self.pool.admit(limit, match.found)
        text = ids[: len(match.found.blocks) * SIZE]
        if match.found.tail is not None:
            try:
                [new] = self.pool.extend(table, 1, keep=match.found.tail)
            except NoRoom:
                pass
            else:
                self.memory[new][: match.found.extra] = self.memory[match.found.tail][: match.found.extra]
                text = ids[: match.tokens]
        self.running.append((table, text))
        self.kept[id(table)] = limit
        self.fill(table, text, ids[len(text) :])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), words=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def write(self, which: int, words: list[int]) -> None:
        self.fill(*self.pick(which), words)

    def fill(self, table: Table, text: list[int], words: list[int]) -> None:
        """As `reserve` and a forward do."""
        words = words[: self.kept[id(table)] - len(text)]
        if not words:
            return
        first = len(text) // SIZE
        may_fail = first < len(table.blocks) and not self.pool.own(table.blocks[first])
        may_fail |= table.limit > len(table.blocks) + table.promised  # it was cropped into what it shared
        try:
            if first < len(table.blocks):
                move = self.pool.writable(table, first)
                if move is not None:
                    self.memory[move[1]] = list(self.memory[move[0]])
            missing = self.pool.blocks_for(len(text) + len(words)) - len(table.blocks)
            if missing > 0:
                self.pool.extend(table, missing)
        except NoRoom:
            assert may_fail, "a promise was broken"
            return
        for word in words:
            block = table.blocks[len(text) // SIZE]
            assert self.pool.own(block)
            self.memory[block][len(text) % SIZE] = word
            text.append(word)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), count=st.integers(1, 10))
    def crop(self, which: int, count: int) -> None:
        table, text = self.pick(which)
        del text[max(len(text) - count, 0) :]
        self.pool.cut(table, self.pool.blocks_for(len(text)))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def publish(self, which: int) -> None:
        table, text = self.pick(which)
        self.pool.publish(table, text)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), known=st.booleans())
    def release(self, which: int, known: bool) -> None:
        table, text = self.running.pop(which % len(self.running))
        self.pool.release(table, text if known else ())
        with pytest.raises(ValueError):
            self.pool.release(table)

    @rule(blocks=st.integers(1, 5))
    def grow(self, blocks: int) -> None:
        if self.pool.total + blocks <= len(self.memory):
            self.pool.grow(blocks)

    @rule(blocks=st.integers(1, 8), backwards=st.booleans())
    def shrink(self, blocks: int, backwards: bool) -> None:
        total = self.pool.total - blocks
        moves = self.pool.plan_shrink(total)
        assert (moves is not None) == self.pool.can_shrink(total)
        if moves is None:
            return
        for old, new in reversed(moves) if backwards else moves:
            self.memory[new] = list(self.memory[old])
        self.pool.shrink(total, moves)
        for block in range(total, len(self.memory)):
            self.memory[block] = [None] * SIZE

    @invariant()
    def texts_are_whole(self) -> None:
        for table, text in self.running:
            read = [word for block in table.blocks for word in self.memory[block]]
            assert read[: len(text)] == text
            beyond = table.blocks[self.pool.blocks_for(len(text)) :]
            assert all(self.pool.own(block) for block in beyond)  # a forward may write one position too many

    @invariant()
    def counts_add_up(self) -> None:
        stats = self.pool.stats
        assert stats.total == self.pool.total == stats.free + stats.cached + stats.used
        tables = [table for table, _text in self.running]
        assert stats.promised == sum(table.promised for table in tables)
        assert 0 <= stats.promised <= stats.free + stats.cached
        used = [block for table in tables for block in table.blocks]
        assert stats.used == len(set(used))
        assert stats.shared == len(used) - len(set(used))
        assert all(0 <= block < stats.total for block in used)
        assert not set(used) & set(self.pool.cached())
        assert all(len(table.blocks) == len(set(table.blocks)) for table in tables)

    @invariant()
    def what_is_matched_is_there(self) -> None:
        for probe in ([0] * 9, [1] * 9, [0, 1] * 6):
            match = self.pool.match(probe)
            blocks = (*match.found.blocks, *([match.found.tail] if match.found.tail is not None else []))
            read = [word for block in blocks for word in self.memory[block]]
            assert read[: match.tokens] == probe[: match.tokens]


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
