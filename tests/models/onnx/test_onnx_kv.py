"""KV pools over real memory: the same bits as private caches through growth, sharing, cropping and compaction."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import MemoryBudgetError, ModelError
from edgespec.models.base import Decoder, Part
from edgespec.models.kv.blocks import NoRoom
from edgespec.models.kv.plain import PlainPool
from edgespec.models.onnx import mapped_memory
from edgespec.models.onnx import pools as onnx_pools
from edgespec.models.onnx.decoder import OnnxDecoder
from edgespec.models.onnx.kv import MappedPool, block_size_for
from edgespec.models.weights.opening import open_weights
from tests.support.pools import BLOCK, CONTEXT, SHAPE, SIZE, alone, ids_of, needs_maps, run, same
from tests.support.tiny import write_tiny


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxDecoder]:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny", **SHAPE)
    with open_weights(folder) as weights:
        made = OnnxDecoder(weights, weight_format="float32", threads=1)
    yield made
    made.close()


@pytest.fixture
def batching(tmp_path: Path) -> Iterator[OnnxDecoder]:
    """A decoder that runs batches."""
    with open_weights(write_tiny(tmp_path / "tiny", **SHAPE)) as weights:
        made = OnnxDecoder(weights, weight_format="float32", threads=1)
    made.prepare_batch(2)
    yield made
    made.close()


@pytest.fixture(params=["mapped", "plain", "torch"])
def any_decoder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    """Each kind of pool behind `new_pool`."""
    folder = write_tiny(tmp_path / "tiny", **SHAPE)
    made: Decoder
    with open_weights(folder) as weights:
        if request.param == "torch":
            from edgespec.models.reference.decoder import TorchDecoder

            made = TorchDecoder(weights)
        else:
            if request.param == "mapped" and not mapped_memory.available():
                pytest.skip("no files in memory on this system")
            if request.param == "plain":
                monkeypatch.setattr(mapped_memory, "available", lambda: False)
            made = OnnxDecoder(weights, weight_format="float32", threads=1)
    yield made
    made.close()


def test_growing_and_reusing(any_decoder):
    """Growth by blocks, a prefix taken over by a second text while and after the first one is there, crops."""
    decoder, ids = any_decoder, ids_of(0, 300)
    wanted = alone(decoder, ids)
    pool = decoder.new_pool(20 * BLOCK, sequences=3, context=CONTEXT)
    assert (pool.block_size, pool.block_bytes) == (SIZE, BLOCK)
    one = pool.new_cache(300)
    same(decoder, run(decoder, one, ids), wanted)
    one.share(ids[:200])
    other = pool.new_cache(250, pool.match(ids[:210]))
    mapped = isinstance(pool, MappedPool)
    assert other.length == (192 if mapped else 0)
    same(decoder, run(decoder, other, ids[other.length : 210]), wanted[210 - (18 if mapped else 210) : 210])
    for length in (209, 200, 130, 128, 64, 5, 0):  # into what is shared, at and beside edges of blocks
        other.crop(length)
        same(decoder, run(decoder, other, ids[length : length + 2], (2,)), wanted[length : length + 2])
    run(decoder, other, ids[other.length : 70])
    strange = run(decoder, other, ids_of(9, 30))  # another text over the blocks that it took over
    assert not np.array_equal(strange, wanted[70:100])
    one.crop(100)
    same(decoder, run(decoder, one, ids[100:]), wanted[100:])
    one.release(ids)
    other.release()
    match = pool.match(ids)
    assert match.tokens == 299  # all but the last, the end of it from a block that is not full
    third = pool.new_cache(300, match)
    assert third.length == 299
    same(decoder, run(decoder, third, ids[299:]), wanted[299:])
    pool.close()


def test_compaction_in_the_middle_of_answers(any_decoder):
    decoder = any_decoder
    pool = decoder.new_pool(8 * BLOCK, sequences=4, context=CONTEXT, most_bytes=24 * BLOCK)
    texts = [ids_of(seed, 300) for seed in range(3)]
    wanted = [alone(decoder, ids) for ids in texts]
    assert pool.most_tokens == CONTEXT
    assert pool.grow(17 * BLOCK) == 16 * BLOCK
    caches = [pool.new_cache(300) for _ in texts]
    for cache, ids in zip(caches, texts):
        run(decoder, cache, ids[:150])
    caches[0].release(texts[0][:150])
    assert pool.shrink(15 * BLOCK) == 0  # 2 x 5 blocks are used or promised, of 24
    assert not pool.can_shrink(14 * BLOCK + 1)
    assert pool.can_shrink(BLOCK * 13)
    assert pool.shrink(12 * BLOCK + 1) == 13 * BLOCK
    assert pool.stats.total == 11
    assert pool.nbytes <= 11 * BLOCK
    for cache, ids, rows in list(zip(caches, texts, wanted))[1:]:
        same(decoder, run(decoder, cache, ids[150:]), rows[150:])
    again = pool.match(texts[0][:150])
    for cache in caches[1:]:
        cache.release()
    cache = pool.new_cache(160, again)
    begin = cache.length
    assert begin == 64
    same(decoder, run(decoder, cache, texts[0][begin:150]), wanted[0][begin:150])
    pool.close()


def test_room_is_told_in_numbers_and_what_is_refused_changes_nothing(any_decoder):
    decoder = any_decoder
    with pytest.raises(MemoryBudgetError, match=f"{BLOCK - 1} bytes of KV memory are less than one block: 64 tokens"):
        decoder.new_pool(BLOCK - 1)
    pool = decoder.new_pool(5 * BLOCK, sequences=2, context=CONTEXT)
    assert pool.most_tokens == 5 * SIZE
    cache = pool.new_cache(4 * SIZE)
    before = pool.stats
    assert not pool.room(SIZE + 1)
    with pytest.raises(NoRoom, match="65 tokens need 2 more blocks, of 5 blocks of 64 tokens 1 can be given"):
        pool.new_cache(SIZE + 1)
    assert pool.stats == before
    assert pool.room(SIZE)
    pool.new_cache(SIZE)  # dropped at once
    gc.collect()
    second = pool.new_cache(SIZE)
    with pytest.raises(NoRoom, match="2 sequences run already"):
        pool.new_cache(1)
    with pytest.raises(NoRoom):
        run(decoder, second, ids_of(1, SIZE + 1), (SIZE, 1))
    assert second.length == SIZE
    run(decoder, cache, ids_of(2, 4 * SIZE))  # the promise holds
    for each in (cache, second):
        each.release()
        each.release()
    with pytest.raises(ModelError, match="released"):
        decoder.forward([5], cache)
    assert pool.stats.available == 5
    pool.close()
    pool.close()
    with pytest.raises(ModelError, match="closed"):
        pool.new_cache(1)


def test_closing_the_decoder_closes_its_pools(tmp_path):
    with open_weights(write_tiny(tmp_path / "tiny", **SHAPE)) as weights:
        decoder = OnnxDecoder(weights, weight_format="float32", threads=1)
    pool = decoder.new_pool(5 * BLOCK, context=CONTEXT)
    cache = pool.new_cache(100)
    run(decoder, cache, ids_of(0, 100))
    decoder.close()
    for use in (lambda: decoder.forward([5], cache), lambda: pool.new_cache(10)):
        with pytest.raises(ModelError):
            use()
    cache.release()
    assert pool.nbytes == 0 or isinstance(pool, PlainPool)


@needs_maps
def test_a_batch_of_sequences_of_a_pool(decoder):
    pool = decoder.new_pool(12 * BLOCK, sequences=3, context=CONTEXT)
    ids = ids_of(0, 200)
    wanted = alone(decoder, ids)
    first = pool.new_cache(200)
    run(decoder, first, ids[:130])
    first.share(ids[:130])
    second = pool.new_cache(200, pool.match(ids[:140]))
    outputs = decoder.forward_batch([Part(ids[130:131], first), Part(ids[128:140], second)])
    same(decoder, outputs[0].logits, wanted[130:131])
    same(decoder, outputs[1].logits, wanted[128:140])
    pool.close()


@needs_maps
def test_rows_of_a_lane_are_kept_by_need_and_only_while_its_sequence_runs_alone(batching):
    """They are as wide as the vocabulary: those of sequences that run in batches, or have ended, are nobody's."""
    decoder, row = batching, 288 * 4
    pool = decoder.new_pool(12 * BLOCK, sequences=3, context=CONTEXT)
    first, second = pool.new_cache(200), pool.new_cache(200)
    decoder.forward([5, 9, 13], first, logits=1)
    assert first.outputs.nbytes == row
    decoder.forward([5, 9, 13], first, hidden=True)
    assert first.outputs.nbytes == 4 * (row + 64 * 4)  # one buffer for both graphs' bindings
    kept = decoder.forward(ids_of(0, 40), first).logits
    copy = kept.copy()
    assert first.outputs.nbytes == 40 * row + 4 * 64 * 4
    decoder.forward([5], first)
    assert first.outputs.nbytes == row + 4 * 64 * 4  # what is rarely needed is not kept
    decoder.forward_batch([Part([7], first), Part([7], second)])
    assert (first.outputs.nbytes, second.outputs.nbytes) == (0, 0)
    np.testing.assert_array_equal(kept, copy)
    wanted = decoder.forward([9, 4], first).logits.copy()  # alone again, at other addresses
    first.crop(48)
    same(decoder, decoder.forward([9, 4], first).logits, wanted)
    lane = first.lane
    first.release()
    assert lane.outputs.nbytes == 0
    again = pool.new_cache(200)
    assert again.lane is lane
    same(decoder, run(decoder, again, ids_of(1, 60)), alone(decoder, ids_of(1, 60)))
    pool.close()


@needs_maps
def test_a_shared_block_is_memory_once(decoder):
    pool = decoder.new_pool(12 * BLOCK, sequences=4, context=CONTEXT)
    ids = ids_of(0, 200)
    first = pool.new_cache(200)
    run(decoder, first, ids)
    first.share(ids)
    held = pool.nbytes
    caches = [pool.new_cache(200, pool.match(ids[:193])) for _ in range(3)]
    assert pool.nbytes == held == 4 * BLOCK
    assert pool.stats.shared == 9
    buffers = [np.concatenate([b[:, :, :192].ravel() for b in cache.buffers]) for cache in (first, *caches)]
    assert all(np.array_equal(buffers[0], other) for other in buffers[1:])
    pool.close()


@pytest.fixture(params=["mapped", "plain"])
def pools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kind of pool the module's decoder makes."""
    if request.param == "mapped" and not mapped_memory.available():
        pytest.skip("no files in memory on this system")
    if request.param == "plain":
        monkeypatch.setattr(mapped_memory, "available", lambda: False)
    return str(request.param)


def test_random_walk_equals_private_caches(decoder, pools):
    """Everything that a pool can do, in random order, against one private cache a text."""
    rng = random.Random(5)
    pool = decoder.new_pool(14 * BLOCK, sequences=4, context=CONTEXT, most_bytes=20 * BLOCK)
    starts = [ids_of(seed, 130) for seed in range(2)]
    running: list[tuple[Any, Any, list[int]]] = []  # pooled, private, text
    done = dict.fromkeys(("admit", "crop", "release", "shrink"), 0)
    for step in range(250):
        action = rng.choice(["admit", "write", "write", "write", "crop", "share", "release", "size"])
        if action == "admit":
            text = rng.choice(starts)[: rng.randint(20, 130)] + ids_of(step, 5)
            if pool.room(len(text) + 60, pool.match(text)):
                cache, private = pool.new_cache(len(text) + 60, pool.match(text)), decoder.new_cache(CONTEXT)
                if cache.length:
                    decoder.forward(text[: cache.length], private)
                running.append((cache, private, text[: cache.length]))
                done["admit"] += 1
        elif action == "size":
            if rng.random() < 0.5:
                pool.grow(rng.randint(1, 3) * BLOCK)
            else:
                done["shrink"] += pool.shrink(rng.randint(1, 4) * BLOCK) > 0
        elif running:
            cache, private, text = which = rng.choice(running)
            if action == "write":
                more = rng.choice(starts)[len(text) : len(text) + rng.choice([1, 2, 40])] or ids_of(step, 1)
                try:
                    got = decoder.forward(more, cache).logits.copy()
                except NoRoom:
                    continue
                wanted = decoder.forward(more, private).logits
                if pools == "mapped":
                    same(decoder, got, wanted)
                else:  # long pieces in float32 are not the same bits however a text is cut
                    np.testing.assert_allclose(got, wanted, atol=1e-4)
                text += more
            elif action == "crop":
                length = rng.randint(len(text) // 2, len(text))
                del text[length:]
                cache.crop(length)
                private.crop(length)
                done["crop"] += 1
            elif action == "share":
                cache.share(text)
            else:
                running.remove(which)
                cache.release(text)
                done["release"] += 1
    assert all(count > 5 for count in done.values())
    assert pool.stats.moved
    assert pool.stats.hit_tokens
    assert bool(pool.stats.copied) == (pools == "mapped")
    pool.close()


def test_the_longest_request_does_not_depend_on_memory_that_is_lent(decoder, pools):
    """What was accepted because the pool was large for a while could never be admitted later."""
    pool = decoder.new_pool(2 * BLOCK, context=CONTEXT, most_bytes=6 * BLOCK)
    pool.grow(4 * BLOCK)
    assert pool.most_tokens == 2 * SIZE
    pool.shrink(5 * BLOCK)
    assert pool.most_tokens == SIZE
    pool.close()


def test_size_changes_beside_requests_that_come_and_go(decoder, pools):
    """From another thread, as often as it can: texts are what they would be alone, and every promise holds."""
    pool = decoder.new_pool(12 * BLOCK, sequences=3, context=CONTEXT, most_bytes=20 * BLOCK)
    texts = [ids_of(0, 90) + ids_of(seed, 110) for seed in range(4)]
    wanted = [alone(decoder, ids) for ids in texts]
    over, changes, problems = threading.Event(), [0], []

    def change() -> None:
        turn = 0
        try:
            while not over.is_set():
                turn += 1
                changes[0] += bool(pool.grow(turn % 5 * BLOCK) + pool.shrink(turn % 7 * BLOCK))
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    refused = 0
    try:
        for turn in range(25):
            ids, rows = texts[turn % 4], wanted[turn % 4]
            try:
                cache = pool.new_cache(len(ids), pool.match(ids))
            except NoRoom:
                refused += 1
                pool.grow(4 * BLOCK)
                continue
            begin = cache.length
            same(decoder, run(decoder, cache, ids[begin:]), rows[begin:])
            cache.share(ids)
            cache.release(ids)
    finally:
        over.set()
        thread.join(30)
    assert problems == []
    assert changes[0] > 10
    assert refused < 25
    pool.close()


@pytest.mark.parametrize(
    ("row", "positions", "context", "most", "size"),
    [
        (256, 4096, 2048, 64, 64),  # as few positions as pages and the least block allow
        (256, 4097, 2048, 64, 128),
        (256, 10**6, 512, 64, 512),  # not longer than the context, whatever that costs
        (16, 4096, 2048, 64, 256),  # whole pages of narrow rows
        (320, 4096, 2048, 4096, 64),  # 320 = 5 x 64: 64 rows are 5 pages
    ],
)
def test_block_sizes(row, positions, context, most, size, monkeypatch):
    import edgespec.models.onnx.kv as module

    monkeypatch.setattr(module, "PAGE", 4096)
    assert block_size_for(row, positions, context, most) == size


def test_the_plain_pool_drops_copies_that_were_evicted(decoder, monkeypatch):
    monkeypatch.setattr(mapped_memory, "available", lambda: False)
    pool = onnx_pools.new_pool(decoder, decoder._lock, 4 * BLOCK, 2, CONTEXT, None)
    for seed in range(4):
        cache = pool.new_cache(3 * SIZE)
        ids = ids_of(seed, 3 * SIZE)
        run(decoder, cache, ids)
        cache.release(ids)
    assert set(pool._kept) == set(pool._blocks.cached())
    assert pool.nbytes <= 4 * BLOCK
