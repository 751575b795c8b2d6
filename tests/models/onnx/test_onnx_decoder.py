"""The ONNX engine: bits that do not depend on block length, the graph cache, and damaged caches."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import ConfigError
from edgespec.memory.topology import process_memory
from edgespec.models.onnx import cache as onnx_cache
from edgespec.models.onnx.decoder import OnnxDecoder
from edgespec.models.onnx.linear import quantise_int8
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

PROMPT = [5, 9, 13, 200, 17, 30, 41, 7, 99, 120, 3, 64]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def cpu_flags() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {"F32": write_tiny(folder / "F32", **SHAPE)}
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        made[kind] = write_tiny_gguf(folder / f"{kind}.gguf", "llama", quant=kind, **SHAPE)
    return made


def rows(decoder: OnnxDecoder, tokens: list[int], sizes: list[int]) -> np.ndarray:
    """Logits of all positions, fed in pieces of the given sizes (the last one repeats)."""
    cache, out, at = decoder.new_cache(), [], 0
    while at < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out.append(decoder.forward(tokens[at : at + size], cache).logits.copy())
        at += size
    return np.concatenate(out)


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("weight_format", ["exact", "int8", "float32"])
def test_logits_do_not_depend_on_how_tokens_are_cut(files, kind, weight_format):
    """Invariant 1, stronger than asked for where the processor allows it: the same bits for every block length."""
    with open_weights(files[kind]) as weights:
        decoder = OnnxDecoder(weights, weight_format=weight_format, threads=2)
    tokens = np.random.default_rng(0).integers(3, 270, 200).tolist()
    whole = rows(decoder, tokens, [200])
    for sizes in ([1], [2], [3], [64, 1, 1, 5, 1, 8], [1, 7]):
        pieces = rows(decoder, tokens, sizes)
        if weight_format == "float32":
            np.testing.assert_allclose(pieces, whole, atol=1e-5)
        if "avx512_vnni" in cpu_flags():  # seen there; other kernels may round in another order
            np.testing.assert_array_equal(pieces, whole)


@pytest.mark.parametrize("width", [33, 65, 97, 129])
@pytest.mark.parametrize(
    ("kind", "weight_format"),
    [("F32", "float32"), ("F32", "int8"), ("Q4_0", "exact"), ("Q4_1", "exact"), ("Q8_0", "exact")],
)
def test_the_last_row_of_a_longer_call_is_not_computed_alone_either(files, kind, weight_format, width):
    """Attention takes 32 rows at a time here (two head sizes), which would leave one; also with room for no more."""
    with open_weights(files[kind]) as weights:
        decoder = OnnxDecoder(weights, weight_format=weight_format, threads=2)
    tokens = np.random.default_rng(width).integers(3, 270, width + 5).tolist()
    cut = rows(decoder, tokens, [5, width - 2, 2])
    cache = decoder.new_cache(width + 5)
    first = decoder.forward(tokens[:5], cache).logits.copy()
    output = decoder.forward(tokens[5:], cache, hidden=True)
    assert cache.length == cache.capacity
    assert output.hidden.shape == (width, 64)
    whole = np.concatenate([first, output.logits])
    if weight_format == "float32":
        np.testing.assert_allclose(whole, cut, atol=1e-5)
    if "avx512_vnni" in cpu_flags():
        np.testing.assert_array_equal(whole, cut)


@pytest.mark.parametrize("size", [1, 33])
def test_a_row_computed_alone_would_differ(files, monkeypatch, size):
    """Why the decoder adds a row: without it the checks above fail (float32: other kernels for one row)."""
    if "avx512_vnni" not in cpu_flags():
        pytest.skip("the kernels of this processor were not looked at")
    monkeypatch.setattr("edgespec.models.onnx.binding.with_company", lambda count: count)
    with open_weights(files["F32"]) as weights:
        decoder = OnnxDecoder(weights, weight_format="float32", threads=1)
    tokens = np.random.default_rng(0).integers(3, 270, 200).tolist()
    assert (rows(decoder, tokens, [size]) != rows(decoder, tokens, [200])).any()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_exact_forms_agree_with_the_dequantised_model(files, kind):
    """Only activations are rounded (to 8 bits): logits stay close to float32, much closer than to other weights."""
    with open_weights(files[kind]) as weights:
        exact = rows(OnnxDecoder(weights, weight_format="exact", threads=1), PROMPT, [12])
        truth = rows(OnnxDecoder(weights, weight_format="float32", threads=1), PROMPT, [12])
    spread = truth.std()
    assert np.abs(exact - truth).mean() < 0.05 * spread
    assert (exact.argmax(-1) == truth.argmax(-1)).mean() >= 0.9


def test_int8_rounding_is_to_nearest_and_handles_zero_blocks():
    matrix = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    matrix[2, :32] = 0
    blocks = quantise_int8(matrix)
    restored = (blocks.q.astype(np.float32) - 128) * blocks.scale[..., None]
    assert np.abs(restored.reshape(6, 64) - matrix).max() <= blocks.scale.max() / 2 * 1.001
    assert not restored.reshape(6, 64)[2, :32].any()


def test_hidden_states_are_what_the_head_sees(files):
    with open_weights(files["F32"]) as weights:
        decoder = OnnxDecoder(weights, weight_format="float32", threads=1)
        head = weights.read("lm_head.weight")
    for tokens in (PROMPT, PROMPT[:1], (PROMPT * 3)[:33]):
        output = decoder.forward(tokens, decoder.new_cache(), hidden=True)
        assert output.hidden is not None
        assert output.hidden.shape == (len(tokens), 64)
        np.testing.assert_allclose(output.hidden @ head.T, output.logits, atol=1e-4)
    assert decoder.forward(PROMPT, decoder.new_cache()).hidden is None


def test_logits_of_the_last_rows_only(files):
    with open_weights(files["Q4_1"]) as weights:
        decoder = OnnxDecoder(weights, threads=1)
    every = decoder.forward(PROMPT, decoder.new_cache()).logits.copy()
    for wanted in (0, 1, 3, 12):
        part = decoder.forward(PROMPT, decoder.new_cache(), logits=wanted).logits
        np.testing.assert_array_equal(part, every[len(PROMPT) - wanted :])
    many = np.random.default_rng(0).integers(3, 270, 100).tolist()  # more rows than the kept buffer has
    assert decoder.forward(many, decoder.new_cache()).logits.shape == (100, 288)


def test_cache_memory_follows_its_length(files):
    with open_weights(files["F32"]) as weights:
        decoder = OnnxDecoder(weights, weight_format="float32", threads=1)
    cache = decoder.new_cache()
    assert cache.nbytes == 0
    decoder.forward(PROMPT, cache)
    assert cache.nbytes == 12 * 2 * 2 * 2 * 16 * 4  # positions, k and v, layers, heads, head_dim, float32


def test_a_long_context_costs_no_memory_until_it_is_used(tmp_path):
    """B122: 64 MiB of key and value buffers (8 MiB for each head of a layer), of which 12 positions are written."""
    folder = write_tiny(tmp_path / "long", max_position_embeddings=1 << 17, **SHAPE)
    with open_weights(folder) as weights:
        decoder = OnnxDecoder(weights, weight_format="float32", threads=1)
    decoder.forward(PROMPT, decoder.new_cache(64))
    before = process_memory()
    cache = decoder.new_cache()
    decoder.forward(PROMPT, cache)
    assert cache.capacity == 1 << 17
    assert process_memory() - before < 4 << 20


def test_unknown_format_is_named(files):
    with open_weights(files["F32"]) as weights, pytest.raises(ConfigError, match="'int3' is unknown; use one of exact"):
        OnnxDecoder(weights, weight_format="int3")


def test_the_second_start_converts_nothing(files, tmp_path, monkeypatch):
    with open_weights(files["Q4_1"]) as weights:
        first = rows(OnnxDecoder(weights, threads=1, cache_dir=tmp_path), PROMPT, [12])
        monkeypatch.setattr("edgespec.models.onnx.graph.write_graph", lambda *a: pytest.fail("converted again"))
        second = rows(OnnxDecoder(weights, threads=1, cache_dir=tmp_path), PROMPT, [12])
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("damage", ["cut", "missing", "garbage", "one bit", "no folder", "deep"])
def test_a_damaged_cached_graph_is_made_again(files, tmp_path, damage):
    with open_weights(files["Q4_0"]) as weights:
        first = rows(OnnxDecoder(weights, threads=1, cache_dir=tmp_path), PROMPT, [12])
        (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
        if damage == "cut":
            os.truncate(folder / "weights.bin", 5000)
        elif damage == "missing":
            (folder / "graph.onnx").unlink()
        elif damage == "one bit":
            data = bytearray((folder / "weights.bin").read_bytes())
            data[len(data) // 2] ^= 1
            (folder / "weights.bin").write_bytes(data)
        elif damage == "no folder":
            shutil.rmtree(folder)
            folder.write_text("a file in its place")
        elif damage == "deep":
            (folder / "files.json").write_text("[" * 100_000)
        else:
            size = (folder / "graph.onnx").stat().st_size
            (folder / "graph.onnx").write_bytes(b"\xff" * size)
        second = rows(OnnxDecoder(weights, threads=1, cache_dir=tmp_path), PROMPT, [12])
    np.testing.assert_array_equal(first, second)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".building")] == []  # no scratch left behind


def test_other_weights_or_formats_do_not_share_a_graph(files, tmp_path):
    other = write_tiny_gguf(tmp_path / "other.gguf", "llama", quant="Q4_1", seed=1, **SHAPE)
    keys = set()
    for path in (files["Q4_1"], other):
        with open_weights(path) as weights:
            keys |= {onnx_cache._key(weights, form) for form in ("exact", "int8", "float32")}
    assert len(keys) == 6


def test_several_threads_may_build_the_same_graph(files, tmp_path):
    """B006: no exception, and every decoder computes the same bits."""
    results: list[np.ndarray] = []

    def build() -> None:
        with open_weights(files["Q4_1"]) as weights:
            results.append(rows(OnnxDecoder(weights, threads=1, cache_dir=tmp_path), PROMPT, [12]))

    workers = [threading.Thread(target=build) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert len(results) == 4
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_a_cache_folder_that_cannot_be_written_is_named(files, tmp_path, monkeypatch):
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgespec.models.onnx.graph.write_graph", full)
    with open_weights(files["Q4_1"]) as weights, pytest.raises(ConfigError, match="No space left"):
        OnnxDecoder(weights, cache_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []
    (tmp_path / "file").write_text("")
    with open_weights(files["Q4_1"]) as weights, pytest.raises(ConfigError, match="EDGESPEC_HOME"):
        OnnxDecoder(weights, cache_dir=tmp_path / "file" / "graphs")


def test_two_sequences_side_by_side(files):
    with open_weights(files["Q4_1"]) as weights:
        decoder = OnnxDecoder(weights, threads=1)
    alone = [rows(decoder, tokens, [1]) for tokens in (PROMPT, PROMPT[::-1])]
    caches, mixed = [decoder.new_cache(), decoder.new_cache()], [[], []]
    for pair in zip(PROMPT, PROMPT[::-1], strict=True):
        for which, token in enumerate(pair):
            mixed[which].append(decoder.forward([token], caches[which]).logits.copy())
    for which in (0, 1):
        np.testing.assert_array_equal(np.concatenate(mixed[which]), alone[which])


def test_sizes_are_recorded_last(files, tmp_path):
    """A crash while writing leaves a folder that does not count as complete."""
    with open_weights(files["Q4_1"]) as weights:
        OnnxDecoder(weights, threads=1, cache_dir=tmp_path)
        (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
        files = json.loads((folder / "files.json").read_text())
        assert set(files) == {"graph.onnx", "weights.bin"}
        (folder / "files.json").unlink()
        assert not onnx_cache.intact(folder)
