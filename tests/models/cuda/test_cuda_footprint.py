"""What is planned for the CUDA engine holds what it takes: models of odd sizes, contexts around the edges of slabs."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.kernels import ops, reference
from edgespec.kernels.tuning import PATH
from edgespec.models.cuda import footprint as footprint_module
from edgespec.models.cuda import kv
from edgespec.models.cuda import weights as cuda_weights
from edgespec.models.cuda.copying import RING_BUFFERS, RING_BYTES, Copier
from edgespec.models.cuda.decoder import CudaDecoder, staging_bytes
from edgespec.models.cuda.footprint import CudaFootprint
from edgespec.models.cuda.staging import BUFFERS
from edgespec.models.cuda.weights import host_bytes, load_model
from edgespec.models.footprint import CUDA_CONTEXT, CUDA_PROCESS, footprint, without_triton
from edgespec.models.weights.opening import open_weights
from tests.support.packed import converted, write_packed
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    assert decoder.kv_bytes == decoder.pool.nbytes == size.cache(positions)  # nothing is to come any more
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
    named = size.weights + size.cache(positions)
    named += sum(part(positions) for part in (size._steps, size._prompt, size._graphs))
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


@pytest.mark.parametrize("positions", [64, 500])
def test_without_triton_more_is_planned(model: Path, positions: int) -> None:
    """What torch works in, of a captured step and of a prompt."""
    with open_weights(model) as weights:
        least, most = (footprint(weights, "cuda", "exact", unified=True, plain=plain) for plain in (False, True))
        known = footprint(weights, "cuda", "exact", unified=True)
    assert known == (most if without_triton() else least)
    parts, more = least.beside(positions), most.beside(positions)
    assert set(parts) - set(more) == {"CUDA graphs (assumed)"}  # nothing is captured then
    assert more["workspace"] > parts["workspace"] + reference.TILE_BYTES
    grown = more["workspace"] - parts["workspace"] - parts["CUDA graphs (assumed)"]
    assert most.slot(positions) - least.slot(positions) == grown


def test_whether_triton_runs_is_asked_where_cuda_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_triton() == (find_spec("triton") is None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for backend in ("torch", "triton"):
        monkeypatch.setattr(ops, "backend", lambda _device, backend=backend: backend)
        assert without_triton() == (backend == "torch")


def test_no_device_has_smaller_parts_of_attention() -> None:
    chunks = [table["attention"]["chunk"] for table in tomllib.loads(PATH.read_text()).values() if "attention" in table]
    assert min(chunks) == footprint_module._CHUNK


@pytest.mark.parametrize("form", ["F32", "Q5_0", "Q8_0", "gptq"])
@pytest.mark.parametrize("keep_blocks", [True, False])
def test_reading_holds_little_of_the_host(
    form: str, keep_blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of a large table, whatever the file; a packed matrix comes whole."""
    monkeypatch.setattr(cuda_weights, "PIECE", 1 << 12)
    large = {"vocab_size": 4096, "tie_word_embeddings": True}
    if form == "gptq":
        path = write_packed(tmp_path / "m", intermediate_size=1024, **large).folder
    else:
        path = write_tiny_gguf(tmp_path / "m.gguf", quant=form, hidden_size=64, head_dim=16, **large)
    with open_weights(path) as weights:
        limit, device = host_bytes(weights, keep_blocks), torch.device("cpu")
        for traced in (False, True):  # the first time imports
            with Copier(device) as copier:
                if traced:
                    tracemalloc.start()
                try:
                    load_model(weights, device, torch.float16, keep_blocks=keep_blocks, positions=8, sink=copier.place)
                    peak = tracemalloc.get_traced_memory()[1]
                finally:
                    tracemalloc.stop()
    assert peak <= limit + (64 << 10)  # Python's own
    if form != "gptq":
        assert limit < 4 * 4096 * 64 / 4  # a quarter of the embedding in float32


def test_reading_is_planned_where_the_host_has_the_same_memory(model: Path) -> None:
    with open_weights(model) as weights:
        shared, apart = (footprint(weights, "cuda", "exact", unified=unified) for unified in (True, False))
        assert isinstance(shared, CudaFootprint)
        assert shared.reading == host_bytes(weights, keep_blocks=True) > 0
    assert shared.slot(64) - apart.slot(64) == shared.reading + BUFFERS * staging_bytes(64)
    assert shared.beside(64)["workspace"] >= shared.reading


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
