"""KV pools whose memory fails: half a mapping, half a compaction, no files at all, a forked process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import ModelError
from edgespec.models.base import Part
from edgespec.models.batching import PartError
from edgespec.models.kv.blocks import NoRoom
from edgespec.models.kv.plain import PlainPool
from edgespec.models.onnx import mapped_memory
from edgespec.models.onnx.decoder import OnnxDecoder
from edgespec.models.weights.opening import open_weights
from tests.support.pools import BLOCK, CONTEXT, SHAPE, alone, ids_of, needs_maps, run, same
from tests.support.tiny import write_tiny


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxDecoder]:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny", **SHAPE)
    with open_weights(folder) as weights:
        made = OnnxDecoder(weights, weight_format="float32", threads=1)
    yield made
    made.close()


@needs_maps
@pytest.mark.parametrize("call", ["mmap", "fallocate"])
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC])
def test_a_mapping_that_fails_half_way_leaves_the_sequence_as_it_was(decoder, monkeypatch, call, number):
    pool = decoder.new_pool(8 * BLOCK, sequences=2, context=CONTEXT)
    ids = ids_of(0, 200)
    wanted = alone(decoder, ids)
    cache = pool.new_cache(200)
    run(decoder, cache, ids[:60])
    before = pool.stats
    for good in range(7):  # 8 planes
        with failing(monkeypatch, call, good, number), pytest.raises(NoRoom, match=os.strerror(number)):
            decoder.forward(ids[60:70], cache)
        assert (cache.length, pool.stats) == (60, before)
    same(decoder, run(decoder, cache, ids[60:]), wanted[60:])
    pool.close()


@needs_maps
def test_in_a_batch_the_one_without_memory_is_named_and_the_others_can_run(tmp_path, monkeypatch):
    with open_weights(write_tiny(tmp_path / "tiny", **SHAPE)) as weights:
        decoder = OnnxDecoder(weights, weight_format="float32", threads=1)
    decoder.prepare_batch(4)
    pool = decoder.new_pool(12 * BLOCK, sequences=3, context=CONTEXT)
    ids = ids_of(0, 200)
    wanted = alone(decoder, ids)
    caches = [pool.new_cache(200) for _ in range(3)]
    for cache, count in zip(caches, (60, 64, 60)):  # the second one needs a block next
        run(decoder, cache, ids[:count])
    parts = [Part([ids[cache.length]], cache) for cache in caches]
    with failing(monkeypatch, "mmap", 3, errno.ENOMEM), pytest.raises(PartError) as caught:
        decoder.forward_batch(parts)
    assert caught.value.part == 1
    assert isinstance(caught.value.error, NoRoom)
    assert str(caught.value) == str(caught.value.error)
    assert [cache.length for cache in caches] == [60, 64, 60]
    outputs = decoder.forward_batch([parts[0], parts[2]])
    for output in outputs:
        same(decoder, output.logits, wanted[60:61])
    decoder.close()


@needs_maps
@pytest.mark.parametrize("call", ["mmap", "fallocate", "pwrite"])
def test_a_compaction_that_fails_changes_nothing(decoder, monkeypatch, call):
    pool = decoder.new_pool(8 * BLOCK, sequences=2, context=CONTEXT)
    ids = ids_of(0, 200)
    wanted = alone(decoder, ids)
    first, cache = pool.new_cache(120), pool.new_cache(200)
    run(decoder, first, ids[:120])
    run(decoder, cache, ids[:150])
    first.release()
    table = list(cache.table.blocks)
    assert max(table) >= 4
    for good in (0, 3, 9, 11):
        with failing(monkeypatch, call, good, errno.ENOMEM):
            assert pool.shrink(4 * BLOCK) == (0 if good < failures(call, table) else 4 * BLOCK)
        if pool.stats.total == 4:
            break
        assert cache.table.blocks == table
        assert pool.stats.total == 8
        same(decoder, decoder.forward(ids[150:151], cache).logits, wanted[150:151])
        cache.crop(150)
    same(decoder, run(decoder, cache, ids[150:]), wanted[150:])
    pool.close()


def failures(call: str, table: list[int]) -> int:
    """How many of these calls a compaction to 4 blocks makes."""
    moves = sum(block >= 4 for block in table)
    return 8 * moves if call != "fallocate" else 8


@needs_maps
def test_a_sequence_whose_addresses_are_lost_is_never_touched_again(decoder, monkeypatch):
    """Neither the blocks nor pages of its own can be mapped: the text fails, the process and its neighbours do not."""
    pool = decoder.new_pool(8 * BLOCK, sequences=2, context=CONTEXT)
    ids = ids_of(0, 200)
    wanted = alone(decoder, ids)
    lost, fine = pool.new_cache(200), pool.new_cache(200)
    run(decoder, lost, ids[:60])
    run(decoder, fine, ids[:60])
    with failing(monkeypatch, "mmap", 3, errno.ENOMEM, count=1000), pytest.raises(NoRoom):
        decoder.forward(ids[60:70], lost)
    with pytest.raises(ModelError, match="was lost"):
        decoder.forward([5], lost)
    same(decoder, run(decoder, fine, ids[60:]), wanted[60:])
    lost.release(ids[:60])
    again = pool.new_cache(200, pool.match(ids))
    assert again.length == 60
    same(decoder, run(decoder, again, ids[60:]), wanted[60:])
    pool.close()


class failing:
    """From call `good` on, `count` calls of a function of the C library fail with `number`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, good: int, number: int, count: int = 1) -> None:
        self._patch, self._call, self._number = monkeypatch, call, number
        self._fails = range(good, good + count)
        self._real = getattr(mapped_memory._libc, call)

    def __enter__(self) -> None:
        import ctypes

        calls = iter(range(10**6))

        def fake(*arguments: Any) -> Any:
            if next(calls) not in self._fails:
                return self._real(*arguments)
            if self._call == "mmap":  # older kernels take the old mapping away before they notice
                _unmap(arguments[0], arguments[1])
            ctypes.set_errno(self._number)
            return mapped_memory._FAILED if self._call == "mmap" else -1

        self._patch.setattr(mapped_memory._libc, self._call, fake)

    def __exit__(self, *error: object) -> None:
        self._patch.setattr(mapped_memory._libc, self._call, self._real)


def _unmap(address: int, nbytes: int) -> None:
    import ctypes

    munmap = ctypes.CDLL(None).munmap
    munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert munmap(address, nbytes) == 0


@needs_maps
def test_no_files_in_memory_means_a_plain_pool(decoder, monkeypatch, caplog):
    def refused(*_arguments: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refused)
    pool = decoder.new_pool(8 * BLOCK, context=CONTEXT)
    assert isinstance(pool, PlainPool)
    assert "Too many open files" in caplog.text
    pool.close()


@needs_maps
def test_a_forked_process_cannot_harm_the_memory_of_its_parent(tmp_path):
    code = f"""
import os, sys
import tests.support.pools as t
from edgespec.errors import ModelError
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny
from pathlib import Path
with open_weights(write_tiny(Path({str(tmp_path / "tiny")!r}), **t.SHAPE)) as weights:
    decoder = t.OnnxDecoder(weights, weight_format="float32", threads=1)
ids = t.ids_of(0, 200)
wanted = t.alone(decoder, ids)
pool = decoder.new_pool(8 * t.BLOCK, context=t.CONTEXT)
cache = pool.new_cache(200)
t.run(decoder, cache, ids[:100])
child = os.fork()
if child == 0:
    answer = 0
    uses = lambda: cache.reserve(110), lambda: pool.shrink(t.BLOCK), lambda: pool.new_cache(5), lambda: cache.share(ids)
    for use in uses:
        try:
            use()
        except ModelError as error:
            answer += "forked" in str(error)
    cache.release(ids)
    pool.close()
    os._exit(answer)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
t.same(decoder, t.run(decoder, cache, ids[100:]), wanted[100:])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=Path(__file__).parents[2], timeout=60)
    assert done.returncode == 0
