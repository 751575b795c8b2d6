"""Blocks of keys and values that are moved together while their texts run."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.kernels import paged
from edgespec.models.base import Part
from edgespec.models.cuda import kv
from edgespec.models.cuda.kv import PagedCache, PagedPool, Tables
from edgespec.models.cuda.pools import PagedKVPool
from edgespec.models.reference.decoder import TorchDecoder
from edgespec.models.weights.opening import open_weights
from tests.models.cuda.common import TOKENS, load

PER_SLAB = 2  # blocks
NAN = float("nan")


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "SLAB_POSITIONS", PER_SLAB * kv.BLOCK)


class Text:
    """A text of the engine, beside the same one of the float32 reference."""

    def __init__(self, wanted: TorchDecoder, cache: Any, seed: int) -> None:
        self.cache, self.twin = cache, wanted.new_cache()
        self.next = [int(token) for token in np.random.default_rng(seed).integers(0, 280, 50)]
        self.ids: list[int] = []


class Stage:
    """A decoder whose pool has texts in every second place of its slabs: 12 blocks were taken in turns by six texts,
    of which two still run."""

    def __init__(self, folder: Path, graphs: bool = True) -> None:
        self.decoder = load(folder, graphs)
        self.decoder.prepare_steps([1, 2])
        self.decoder.prepare_batch(4)
        with open_weights(folder) as weights:
            self.wanted = TorchDecoder(weights)
        nbytes = self.decoder.position_bytes * kv.BLOCK * 20
        self.pool: Any = self.decoder.new_pool(nbytes, sequences=8, context=250)
        assert isinstance(self.pool, PagedKVPool)
        self.texts = [Text(self.wanted, self.pool.new_cache(190), seed) for seed in range(6)]
        self.run()
        for text in self.texts:
            text.next = text.next + TOKENS[:20]
        self.run()
        for place in (4, 2, 1, 0):
            self.texts.pop(place).cache.release()
        assert len(self.decoder.pool.slabs) == 7

    def run(self, rounds: int = 1) -> None:
        """Every text goes on, in one batch, with the token that the reference chooses."""
        for _ in range(rounds):
            outputs = self.decoder.forward_batch([Part(text.next, text.cache, 1) for text in self.texts])
            for text, output in zip(self.texts, outputs):
                rows = self.wanted.forward(text.next, text.twin, logits=1).logits
                assert np.allclose(np.array(output.logits), rows, rtol=1e-4, atol=1e-4)
                text.ids += text.next
                text.next = [int(rows[0].argmax())]

    def check(self) -> None:
        """Every block has one owner or is free, and what is free may hold anything from now on."""
        check_books(self.decoder.pool, [text.cache for text in self.texts])
        with torch.inference_mode():
            for block in self.decoder.pool._free:
                slab, place = divmod(block, PER_SLAB)
                self.decoder.pool.slabs[slab][:, :, place] = NAN

    def compact(self) -> bool:
        with self.decoder._lock:
            return self.decoder.steps.tables.compact()


def check_books(pool: PagedPool, caches: Sequence[PagedCache]) -> None:
    pool._collect()
    held = [pool.scratch, *(block for cache in caches for block in cache.blocks)]
    assert sorted([*held, *pool._free]) == list(range(sum(slab.shape[2] for slab in pool.slabs)))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("way", ["memory is short", "the pool shrinks"])
def test_texts_go_on_in_fewer_slabs(folders: list[Path], graphs: bool, way: str) -> None:
    stage = Stage(folders[0], graphs)
    slab = stage.decoder.pool.nbytes // 7
    if way == "memory is short":
        stage.decoder.trim()
    else:
        assert stage.pool.shrink(stage.pool.block_bytes * 5) == stage.pool.block_bytes * 5
    assert stage.decoder.pool.nbytes == 3 * slab  # two blocks each, and the scratch block
    stage.check()
    stage.run(60)  # they grow by a block each
    stage.check()
    late = Text(stage.wanted, stage.pool.new_cache(60), 9)
    stage.texts.append(late)
    stage.run(3)
    stage.decoder.trim()
    stage.check()
    stage.run(3)


def test_what_is_left_of_a_text_that_moved_serves_the_next_one(folders: list[Path]) -> None:
    stage = Stage(folders[0])
    stage.decoder.trim()
    stage.run(3)
    old = stage.texts.pop()
    old.cache.release(old.ids)
    match = stage.pool.match([*old.ids, 5])
    assert match.tokens == len(old.ids)
    new = Text(stage.wanted, stage.pool.new_cache(190, match), 0)
    stage.wanted.forward(old.ids, new.twin, logits=0)
    new.next = [5]
    stage.texts.append(new)
    stage.check()
    stage.run(2)


def test_graphs_and_rows_of_tables_stay(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured again, and no row is written by the host, for blocks that moved."""
    stage = Stage(folders[0])
    stage.run()
    capture: Any = stage.decoder.graphs._capture
    before = [list(text.cache.blocks) for text in stage.texts], capture.made
    monkeypatch.setattr(Tables, "_write", lambda *_: pytest.fail("a row was written"))
    assert stage.compact()
    stage.check()
    stage.run(3)
    after = [text.cache.blocks for text in stage.texts], capture.made
    assert after[0] != before[0]
    assert after[1] == before[1]


@pytest.mark.parametrize("operation", ["move_blocks", "remap"])
@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), KeyboardInterrupt()])
def test_what_fails_in_the_middle_leaves_everything_usable(
    operation: str, good: int, error: BaseException, folders: list[Path], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    stage = Stage(folders[0])
    monkeypatch.setattr(kv, "MOVES", 1)
    real, calls = getattr(paged, operation), iter(range(99))

    def failing(*arguments: Any) -> Any:
        if next(calls) == good:
            raise error
        return real(*arguments)

    before = [list(text.cache.blocks) for text in stage.texts], stage.pool.stats
    with monkeypatch.context() as patch:
        patch.setattr(kv.ops, operation, failing)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                stage.pool.shrink(stage.pool.block_bytes)
        else:
            with caplog.at_level(logging.WARNING, "edgespec.models.cuda.kv"):
                assert stage.pool.shrink(stage.pool.block_bytes) == 0
            assert "out of memory" in caplog.text
    assert next(calls) == good + 1
    assert ([text.cache.blocks for text in stage.texts], stage.pool.stats) == before
    assert len(stage.decoder.pool.slabs) == 7
    stage.check()
    stage.run(2)
    assert stage.pool.shrink(stage.pool.block_bytes) == stage.pool.block_bytes
    assert len(stage.decoder.pool.slabs) == 3
    stage.check()
    stage.run(2)


def test_where_memory_is_short_what_cannot_move_stays_and_the_rest_goes_back(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(folders[0])
    stage.texts.pop()  # dropped without a word; the last slab is empty then
    slabs = len(stage.decoder.pool.slabs)

    def failing(*_: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(kv.ops, "move_blocks", failing)
    stage.decoder.trim()
    assert 3 < len(stage.decoder.pool.slabs) < slabs
    stage.check()
    stage.run(2)


class Interrupted(list[int]):
    """A list of blocks in which the second change does not happen."""

    changes = 0

    def __setitem__(self, place: Any, value: Any) -> None:
        self.changes += 1
        if self.changes == 2:
            raise KeyboardInterrupt
        super().__setitem__(place, value)


def test_an_interruption_while_blocks_are_renamed_loses_none(folders: list[Path]) -> None:
    stage = Stage(folders[0])
    cache = stage.texts[1].cache
    before = list(cache.blocks)
    cache.blocks = Interrupted(before)
    with pytest.raises(KeyboardInterrupt):
        stage.compact()
    assert sum(old != new for old, new in zip(before, cache.blocks)) == 1
    stage.check()
    stage.run(2)
    stage.decoder.trim()
    assert len(stage.decoder.pool.slabs) == 3
    stage.check()
    stage.run(2)


# The pool alone


@pytest.fixture
def pool(folders: list[Path]) -> PagedPool:
    with open_weights(folders[0]) as weights:
        return PagedPool(weights.spec, torch.device("cpu"), torch.float32, block=2, positions=6)


def copying(pool: PagedPool, then: Callable[[], None] = lambda: None) -> Callable[[kv.Moves], None]:
    count = pool.slabs[0].shape[2]

    def carry(moves: kv.Moves) -> None:
        for old, new in moves:
            pool.slabs[new // count][:, :, new % count] = pool.slabs[old // count][:, :, old % count]
        then()

    return carry


def new_cache(pool: PagedPool) -> PagedCache:
    return PagedCache(None, pool, 1000, 1)


def take(pool: PagedPool, blocks: int) -> PagedCache:
    cache = new_cache(pool)
    cache.reserve(blocks * pool.block)
    return cache


@pytest.mark.parametrize("seed", range(20))
def test_as_many_slabs_are_emptied_as_can_be(pool: PagedPool, seed: int) -> None:
    rng, count = random.Random(seed), pool.slabs[0].shape[2]
    caches: list[PagedCache] = []
    marks: dict[int, list[float]] = {}  # what the blocks of a cache hold
    most = 0
    for turn in range(60):
        if rng.random() < 0.75 or not caches:
            cache = rng.choice(caches) if caches and rng.random() < 0.5 else new_cache(pool)
            caches += [cache] if cache not in caches else []
            own = marks.setdefault(cache.serial, [])
            cache.reserve((len(own) + rng.randint(1, 3)) * pool.block)
            for block in cache.blocks[len(own) :]:
                own.append(float(turn * 10 + len(own)))
                pool.slabs[block // count][:, :, block % count] = own[-1]
        else:
            cache = caches.pop(rng.randrange(len(caches)))
            if rng.random() < 0.5:
                cache.release()
            del cache
        if turn % 7 == 6:
            pool.compact(copying(pool))
            pool.trim()
            used = 1 + sum(len(cache.blocks) for cache in caches)
            assert len(pool.slabs) == -(-used // count)
            most = max(most, len(pool.slabs))
            check_books(pool, caches)
        for cache in caches:
            for block, mark in zip(cache.blocks, marks[cache.serial]):
                assert (pool.slabs[block // count][:, :, block % count] == mark).all()
    assert most > 3


def test_nothing_moves_where_no_slab_would_be_emptied(pool: PagedPool) -> None:
    count = pool.slabs[0].shape[2]
    caches = [take(pool, 1) for _ in range(2 * count)]
    assert len(pool.slabs) == 3
    assert pool.compact(lambda _moves: pytest.fail("it was moved")) == 0
    caches[0].release()
    assert pool.compact(copying(pool)) == 1
    pool.close()
    assert pool.compact(lambda _moves: pytest.fail("it was moved")) == 0


def test_a_block_that_nobody_names_keeps_its_place_and_its_slab(pool: PagedPool) -> None:
    """Another thread has taken it and has not noted it yet, or gives it back at this very moment."""
    count = pool.slabs[0].shape[2]
    first = take(pool, 3 * count - 1)
    last = pool.take()
    also = take(pool, count)
    first.release()
    assert last // count == 3
    assert pool.compact(copying(pool)) == 1  # what lies beyond it
    assert pool.trim() > 0
    assert len(pool.slabs) == 4
    pool.give_back([last])
    pool.compact(copying(pool))
    pool.trim()
    assert len(pool.slabs) == -(-(count + 1) // count)
    check_books(pool, [also])


def test_what_is_given_back_and_taken_meanwhile_is_neither_lost_nor_taken_twice(pool: PagedPool) -> None:
    """The collector and threads that hold no lock may come in the middle of a compaction."""
    count = pool.slabs[0].shape[2]
    first = take(pool, 5 * count)
    released, dropped, growing = (take(pool, count + 1) for _ in range(3))
    first.release()
    held = [dropped]
    del dropped

    def meanwhile() -> None:
        released.release()
        held.clear()
        growing.blocks += [mine]

    mine = pool.take()  # by a thread that is just growing its cache
    assert pool.compact(copying(pool, meanwhile)) == 3 * (count + 1)
    assert mine in growing.blocks
    check_books(pool, [growing])
    pool.compact(copying(pool))
    pool.trim()
    check_books(pool, [growing])
    assert len(pool.slabs) == -(-(count + 3) // count)


def test_memory_is_short_again_and_again_while_a_text_is_written(folders: list[Path]) -> None:
    """Compactions of another thread fall between its steps."""
    stage = Stage(folders[0])
    over = threading.Event()

    def trimming() -> None:
        while not over.wait(0.001):
            stage.decoder.trim()

    thread = threading.Thread(target=trimming)
    thread.start()
    try:
        for turn in range(8):
            other = stage.decoder.new_cache(200)
            stage.decoder.forward(TOKENS[: 20 + turn], other, logits=0)
            stage.run()
            del other
    finally:
        over.set()
        thread.join(30)
    stage.check()
    stage.run()
