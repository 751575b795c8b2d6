"""What is planned for the CUDA engine holds what it takes: models of odd sizes, contexts around the edges of slabs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.models.cuda import footprint as footprint_module
from edgespec.models.cuda import kv
from edgespec.models.cuda.decoder import CudaDecoder, staging_bytes
from edgespec.models.cuda.footprint import CudaFootprint
from edgespec.models.cuda.slots import RING_BUFFERS, RING_BYTES
from edgespec.models.cuda.staging import BUFFERS
from edgespec.models.footprint import CUDA_CONTEXT, CUDA_PROCESS, footprint
from edgespec.models.weights.opening import open_weights
from tests.support.packed import converted
from tests.support.tiny import write_tiny

ODD: dict[str, dict[str, Any]] = {
    "narrow": {"architecture": "llama", "hidden_size": 24, "intermediate_size": 56, "head_dim": 6},
    "one head": {"architecture": "qwen2", "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 301},
    "deep": {"architecture": "qwen3", "num_hidden_layers": 5, "head_dim": 18, "tie_word_embeddings": True},
    "int4": {"architecture": "llama", "hidden_size": 96, "intermediate_size": 160, "bits": 4},
    "int8": {"architecture": "qwen2", "hidden_size": 64, "intermediate_size": 96, "bits": 8},
}
CONTEXTS = (1, 64, 65, 500)


@pytest.fixture(scope="module", params=ODD)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, changes = tmp_path_factory.mktemp("odd"), dict(ODD[request.param])
    bits = changes.pop("bits", 0)
    written = write_tiny(folder / "model", changes.pop("architecture"), max_position_embeddings=600, **changes)
    if bits:
        converted(written, folder / "packed", bits)
    return folder / "packed" if bits else written


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "SLAB_POSITIONS", 192)


def held_storages() -> dict[int, int]:
    """Bytes of all memory that tensors of this process hold, by where it lies."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]  # quietly
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def load(folder: Path, positions: int, weight_format: str) -> tuple[CudaDecoder, CudaFootprint]:
    exact = weight_format == "exact"
    with open_weights(folder) as weights:
        dtype = "float16" if exact else "float32"
        decoder = CudaDecoder(weights, device="cpu", dtype=dtype, positions=positions, keep_blocks=exact)
        size = footprint(weights, "cuda", weight_format, unified=True)
    assert isinstance(size, CudaFootprint)
    return decoder, size


@pytest.mark.parametrize(
    ("positions", "weight_format"), [*((positions, "exact") for positions in CONTEXTS), (500, "float32")]
)
def test_a_target_takes_no_more_than_was_planned(model: Path, positions: int, weight_format: str) -> None:
    before = held_storages()
    decoder, size = load(model, positions, weight_format)
    cache = decoder.new_cache(positions)
    assert decoder.forward([1] * positions, cache, hidden=True).hidden is not None
    kept = decoder.new_cache(positions)  # what a step left, which somebody still holds when the next one runs
    cache.release()
    first = decoder.forward([1] * min(positions, 16), kept)
    kept.crop(0)
    decoder.forward([2] * min(positions, 16), kept)
    assert decoder.model.nbytes <= size.weights
    assert decoder.position_bytes == size.position
    assert decoder.pool.nbytes == size.cache(positions)
    taken = sum(nbytes for place, nbytes in held_storages().items() if place not in before)
    parts = size.beside(positions)
    assert taken <= size.weights + size.cache(positions) + sum(parts.values())
    # The same without what is assumed, what only a load needs, and what only a prompt needs while it runs.
    stays = size._steps(positions) + BUFFERS * staging_bytes(positions)
    assert decoder.model.nbytes + decoder.pool.nbytes < taken <= size.weights + size.cache(positions) + stays
    exact = size._steps(positions) - footprint_module._SMALL - decoder.steps._logits.nbytes  # a copy: see `first`
    assert exact == decoder.steps.nbytes + decoder.model.cos.nbytes + decoder.model.sin.nbytes
    buffers = sum(buffer.nbytes for buffer in decoder.staging._ring._buffers)
    assert size.pinned(positions) == buffers + RING_BUFFERS * RING_BYTES
    del first


@pytest.mark.parametrize("positions", [1, 500])
def test_a_draft_takes_no_more_than_its_slot(model: Path, positions: int) -> None:
    before = held_storages()
    decoder, size = load(model, positions, "exact")
    real = decoder.spec.vocab_size - 3
    for options in ({}, {"temperature": 0.7, "uniforms": [0.5]}):
        cache = decoder.new_cache(positions)
        assert decoder.guess([1], cache, 1, real=real, **options) is not None
        cache.reserve(positions)
        cache.release()
    taken = sum(nbytes for place, nbytes in held_storages().items() if place not in before)
    assert 0 < taken <= size.slot(positions)
    named = size.weights + size.cache(positions) + size._steps(positions) + size._prompt(positions) + size._graphs()
    laws = decoder._loops[real]._laws
    assert laws is not None
    assert size.slot(positions) - named >= laws.nbytes + BUFFERS * staging_bytes(positions)


@pytest.mark.parametrize("positions", [*CONTEXTS, 127, 128, 129, 192, 193, 4096, 8192, 32768])
@pytest.mark.parametrize("most", [192, 2048])
def test_slabs_hold_the_longest_text_and_little_more(
    positions: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "SLAB_POSITIONS", most)
    held, blocks = kv.held_positions(positions), kv.slab_blocks(positions)
    assert blocks * kv.BLOCK <= most
    assert held % (blocks * kv.BLOCK) == 0
    slabs = held // (blocks * kv.BLOCK)
    assert positions + kv.BLOCK <= held  # the scratch block is one of them
    assert held - positions < (slabs + 1) * kv.BLOCK + kv.BLOCK


def test_half_precision_is_planned_as_such(model: Path) -> None:
    with open_weights(model) as weights:
        half, whole = (footprint(weights, "cuda", form) for form in ("exact", "float32"))
        assert footprint(weights, "cpu", "exact").position == whole.position == 2 * half.position


def test_what_cuda_takes_lies_where_the_memory_is(model: Path) -> None:
    with open_weights(model) as weights:
        own, shared = (footprint(weights, "cuda", "exact", unified=unified) for unified in (False, True))
    assert own.before() == {"CUDA context (assumed)": CUDA_CONTEXT}
    assert shared.before() == {"CUDA, torch and Python (assumed)": CUDA_PROCESS}
    assert set(shared.beside(64)) - set(own.beside(64)) == {"pinned buffers"}
    assert shared.beside(64)["pinned buffers"] == own.pinned(64) > 0
    assert shared.slot(64) > own.slot(64)
