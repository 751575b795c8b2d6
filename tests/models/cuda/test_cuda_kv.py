"""Blocks of the CUDA engine, taken and given back by several threads and by the collector."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from edgespec.models.cuda import kv
from edgespec.models.cuda.kv import PagedPool
from edgespec.models.weights.opening import open_weights
from tests.models.cuda.common import TOKENS, load


@pytest.fixture
def pool(folders: list[Path]) -> PagedPool:
    with open_weights(folders[0]) as weights:
        return PagedPool(weights.spec, torch.device("cpu"), torch.float32, block=2, positions=6)


def blocks_of(pool: PagedPool) -> int:
    return sum(slab.shape[2] for slab in pool.slabs)


def test_what_the_collector_gives_back_while_a_slab_is_made_is_not_lost(
    pool: PagedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [pool.take() for _ in range(blocks_of(pool) - 1)]
    zeros = torch.zeros

    def collecting(*args: object, **options: object) -> torch.Tensor:
        pool.give_back(taken[:2])  # a cache that nobody has any more, in the middle of `take`
        return zeros(*args, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "zeros", collecting)
    more = [pool.take()]
    monkeypatch.undo()
    slabs = len(pool.slabs)
    more += [pool.take() for _ in range(blocks_of(pool) - 1 - len(taken) + 2 - 1)]
    assert sorted([pool.scratch, *taken[2:], *more]) == list(range(blocks_of(pool)))
    assert len(pool.slabs) == slabs


def test_no_block_is_taken_twice_by_threads_that_take_at_once(pool: PagedPool) -> None:
    taken: list[list[int]] = [[] for _ in range(4)]
    begin = threading.Barrier(4)

    def take(mine: list[int]) -> None:
        begin.wait()
        for turn in range(200):
            mine.append(pool.take())
            if turn % 3 == 2:
                pool.give_back([mine.pop()])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(before)
    held = [pool.scratch, *(block for mine in taken for block in mine)]
    assert len(held) == len(set(held))
    assert len(pool.slabs) == len({slab.data_ptr() for slab in pool.slabs})
    free = len({pool.take() for _ in range(blocks_of(pool) - len(held))})
    assert free == blocks_of(pool) - len(held)


# Slabs that come back


def test_the_last_slabs_are_dropped_when_nothing_is_in_use_there(pool: PagedPool) -> None:
    count = blocks_of(pool)
    taken = [pool.take() for _ in range(3 * count - 1)]
    assert len(pool.slabs) == 3
    before, nbytes = pool.slabs[0].data_ptr(), pool.slabs[0].nbytes
    assert pool.trim() == 0
    pool.give_back([block for block in taken if block >= count])
    assert pool.trim(spare=1) == nbytes
    assert pool.trim() == nbytes == pool.nbytes
    assert pool.slabs[0].data_ptr() == before
    pool.give_back([taken[0]])
    assert pool.trim() == 0  # others of that slab are in use
    assert pool.take() == taken[0]
    assert pool.take() == count  # a new slab, with the number of the old one
    assert sorted({pool.take() for _ in range(count - 1)}) == list(range(count + 1, 2 * count))


def test_the_lowest_blocks_are_taken_first(pool: PagedPool) -> None:
    taken = [pool.take() for _ in range(6)]
    pool.give_back([taken[4], taken[1], taken[3]])
    assert [pool.take() for _ in range(3)] == [taken[1], taken[3], taken[4]]


def test_memory_of_texts_that_are_over_goes_back(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What still runs reads the same keys and values as before, and the pool says what the device holds."""
    monkeypatch.setattr(kv, "SLAB_POSITIONS", 128)
    decoder, plain = load(folders[0]), load(folders[0], graphs=False)
    slab = decoder.pool.nbytes
    pool = decoder.new_pool(decoder.position_bytes * 64 * 30, sequences=6, context=512)
    assert pool.nbytes == slab
    one, twin = pool.new_cache(60), plain.new_cache(60)
    decoder.forward(TOKENS[:20], one)
    plain.forward(TOKENS[:20], twin)
    others = [pool.new_cache(240) for _ in range(3)]
    for cache in others:
        decoder.forward(TOKENS * 4, cache, logits=0)
    assert pool.nbytes == decoder.pool.nbytes > 3 * slab
    for cache in others:
        cache.release()
    assert decoder.pool.nbytes <= 2 * slab  # one is spared
    for token in TOKENS[20:24]:
        rows, wanted = decoder.forward([token], one).logits, plain.forward([token], twin).logits
        assert np.allclose(np.array(rows), np.array(wanted), rtol=1e-4, atol=1e-4)
    longer = pool.new_cache(240)
    decoder.forward(TOKENS * 4, longer, logits=0)
    longer.release((TOKENS * 4)[:240])
    assert pool.stats.cached
    assert pool.nbytes == decoder.pool.nbytes + pool.stats.cached * pool.block_bytes
    pool.grow(pool.block_bytes)
    assert decoder.pool.nbytes == 2 * slab
    assert pool.shrink(pool.block_bytes)
    assert decoder.pool.nbytes == slab
    alone = decoder.new_cache(240)
    decoder.forward(TOKENS * 4, alone, logits=0)
    grown = decoder.pool.nbytes
    del alone
    decoder.trim()
    assert slab == decoder.pool.nbytes < grown


def test_a_sequence_that_is_collected_takes_no_lock(folders: list[Path]) -> None:
    """It may be collected by a thread that holds them all, in the middle of a forward."""
    decoder = load(folders[0])
    pool = decoder.new_pool(decoder.position_bytes * 64 * 4, sequences=2, context=64)
    cache = pool.new_cache(20)
    decoder.forward(TOKENS[:9], cache)
    held: list[object] = [cache]
    del cache

    def drop() -> None:
        with decoder._lock:
            held.clear()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert pool.new_cache(20)
    assert pool.stats.used <= 1
