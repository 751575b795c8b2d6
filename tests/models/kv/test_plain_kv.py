"""The plain KV pool by itself: which copy belongs to which block, and in which order locks are taken."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from edgespec.errors import ModelError
from edgespec.models.base import Part
from edgespec.models.batching import PartError, one_after_another
from edgespec.models.kv.blocks import NoRoom
from edgespec.models.kv.plain import PlainPool, PlainSequence
from edgespec.models.kv.sequence import SequenceCache

SIZE = 64  # positions of a block, of a byte each


class ListCache(SequenceCache):
    """A cache whose keys and values are the tokens themselves."""

    def __init__(self) -> None:
        super().__init__(None, 8 * SIZE, 1)
        self.held: list[int] = []

    def crop(self, length: int) -> int:
        del self.held[length:]
        return super().crop(length)

    def write(self, ids: list[int]) -> None:
        self.reserve(self.length + len(ids))
        self.held += ids
        self.length += len(ids)


class PlainList(PlainSequence, ListCache):
    def read(self, begin: int, end: int) -> list[int]:
        return self.held[begin:end]

    def append(self, piece: list[int], count: int) -> None:
        self.held += piece[:count]
        self.length += count


def make_pool(blocks: int, more: int = 0, lock: Any = None) -> PlainPool:
    pool = PlainPool(
        PlainList,
        lock or threading.Lock(),
        blocks * SIZE,
        position_bytes=1,
        sequences=8,
        context=8 * SIZE,
        most_bytes=(blocks + more) * SIZE,
    )
    pool.grow(more * SIZE)
    return pool


def test_a_copy_stays_with_its_block_through_compaction() -> None:
    """Blocks of finished texts are evicted and moved to numbers of others: what is taken over is always the prompt."""
    hits = 0
    for seed in range(200):
        rng = random.Random(seed)
        pool = make_pool(10, 6)
        texts = [[rng.randrange(1000) for _ in range(rng.choice([1, 2, 3, 4]) * SIZE)] for _ in range(6)]
        running: list[tuple[Any, list[int]]] = []
        for step in range(60):
            if rng.random() < 0.5 and len(running) < 4:
                text = rng.choice(texts)
                match = pool.match([*text, 1])
                if pool.room(len(text) + 1, match):
                    cache = pool.new_cache(len(text) + 1, match)
                    assert cache.held == text[: cache.length]
                    hits += cache.length
                    cache.write(text[cache.length :])
                    running.append((cache, text))
            elif running:
                cache, text = running.pop(rng.randrange(len(running)))
                cache.release(text)
            if step == 30:
                pool.shrink(6 * SIZE)
            assert set(pool._kept) <= set(pool._blocks.cached())
    assert hits > 200 * SIZE


def test_the_decoder_is_locked_before_the_pool_wherever_memory_moves() -> None:
    class Noting:
        """The decoder's lock; notes whether the pool's was free when it was taken."""

        def __init__(self) -> None:
            self.free: list[bool] = []

        def __enter__(self) -> None:
            self.free.append(not pool._lock.locked())

        def __exit__(self, *error: object) -> None:
            pass

    lock = Noting()
    pool = make_pool(4, lock=lock)
    cache = pool.new_cache(SIZE)
    cache.release()
    pool.shrink(SIZE)
    pool.close()
    assert lock.free == [True] * 4


class Runner:
    """A decoder whose forwards only write."""

    def forward(self, tokens: list[int], cache: Any, **_options: Any) -> Any:
        cache.write(list(tokens))


def run(*parts: Part) -> None:
    one_after_another(Runner(), parts, lambda part: None)  # type: ignore[arg-type]


def test_a_part_without_memory_is_named_and_nothing_has_run() -> None:
    pool = make_pool(3)
    fine, short = pool.new_cache(2 * SIZE), pool.new_cache(SIZE)
    parts = [Part([5] * 70, fine), Part([6] * 65, short)]
    with pytest.raises(PartError, match="beyond the promise") as caught:
        run(*parts)
    assert caught.value.part == 1
    assert isinstance(caught.value.error, NoRoom)
    assert (fine.length, short.length) == (0, 0)
    run(parts[0])
    short.release()
    with pytest.raises(PartError, match="released") as caught:
        run(*parts)
    assert isinstance(caught.value.error, ModelError)
    assert fine.length == 70


def test_what_no_cache_is_to_blame_for_is_raised_as_it_is() -> None:
    class Broken(ListCache):
        def reserve(self, length: int) -> None:
            raise MemoryError("the device is full")

    with pytest.raises(MemoryError):
        run(Part([5], Broken()), Part([5], ListCache()))
