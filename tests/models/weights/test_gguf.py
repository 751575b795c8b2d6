"""GGUF files: exact dequantisation, the header parser, and damage of every kind."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.errors import ModelError
from edgespec.models.weights.gguf_file import GGUFFile
from edgespec.models.weights.gguf_types import KINDS, dequantize
from edgespec.models.weights.opening import open_weights
from tests.support.damage import byte_flips, survives
from tests.support.tiny import tiny_config, tiny_tensors
from tests.support.tiny_gguf import gguf_name, write_tiny_gguf

# Where the float16 scales of a block lie; random bytes there would mostly be NaN, infinite or huge.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def read_all(path: Path) -> dict[str, np.ndarray]:
    with open_weights(path) as weights:
        return {name: weights.read(name) for name in weights.names()}


@pytest.mark.parametrize("name", sorted(SCALES))
def test_quantised_blocks_equal_the_reference_bit_for_bit(name: str) -> None:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (500, KINDS[name].nbytes), np.uint8)
    for column in SCALES[name]:
        scales = (rng.standard_normal(500) * 10.0 ** rng.integers(-6, 3, 500)).astype(np.float16)
        blocks[:, column : column + 2] = scales.view(np.uint8).reshape(-1, 2)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).reshape(-1)
    result = dequantize(name, blocks.reshape(-1))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))


def test_float_kinds_are_exact() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    np.testing.assert_array_equal(dequantize("F32", values.view(np.uint8)), values)
    half = values.astype(np.float16)
    np.testing.assert_array_equal(dequantize("F16", half.view(np.uint8)), half.astype(np.float32))
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(
        dequantize("BF16", raw.view(np.uint8)), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.BF16)
    )
    double = values.astype(np.float64) * (1 + 1e-12)
    np.testing.assert_array_equal(dequantize("F64", double.view(np.uint8)), double.astype(np.float32))


def test_block_sizes_equal_the_reference() -> None:
    for kind in KINDS.values():
        assert (kind.block, kind.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]


def test_header_equals_the_reference_reader(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen2", quant="Q8_0", metadata={"general.name": "tiny", "a.b": 0.1})
    file, reference = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            value = file.metadata[key]
            expected = field.contents()
            assert np.float32(value) == np.float32(expected) if isinstance(value, float) else value == expected, key
    assert file.metadata["a.b"] == 0.1  # not 0.10000000149
    assert {t.name for t in reference.tensors} == file.tensors.keys()
    for tensor in reference.tensors:
        entry = file.tensors[tensor.name]
        assert (entry.offset, entry.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert entry.shape == tuple(int(d) for d in reversed(tensor.shape))
    file.close()


def test_header_larger_than_the_first_read(tmp_path: Path) -> None:
    text = "x" * 700_001
    metadata: dict[str, Any] = {f"key.{index}": text + str(index) for index in range(5)}
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    file = GGUFFile(path)
    assert all(file.metadata[key] == value for key, value in metadata.items())
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 280
    file.close()


def test_vocabulary_that_crosses_a_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    words = [f"word {index} " + "y" * (index % 61) for index in range(50_000)]
    writer.add_array("words", words)
    writer.add_array("numbers", list(range(-5, 100_000)))
    writer.add_array("flags", [True, False, True])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.metadata["words"] == words
    assert file.metadata["numbers"] == list(range(-5, 100_000))
    assert file.metadata["flags"] == [True, False, True]
    file.close()


def test_reads_may_end_anywhere_in_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import edgespec.models.weights.gguf_file as module

    path = write_tiny_gguf(tmp_path / "m.gguf")
    expected = GGUFFile(path)
    for first_read in range(1500, 1800):  # in the vocabulary, and at its double and its quadruple
        monkeypatch.setattr(module, "_FIRST_READ", first_read)
        file = GGUFFile(path)
        assert file.metadata == expected.metadata
        assert file.header_digest == expected.header_digest
        file.close()
    expected.close()


def test_unpermuted_rows_equal_transformers_reading_of_gguf() -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    from tests.support.tiny_gguf import permute

    rows = np.arange(32 * 3, dtype=np.float32).reshape(32, 3)
    processor = LlamaTensorProcessor({})
    np.testing.assert_array_equal(processor._reverse_permute_weights(permute(rows, 4), 4, 4), rows)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_f32_files_give_back_the_weights(tmp_path: Path, architecture: str) -> None:
    changes: dict[str, Any] = {"tie_word_embeddings": architecture == "qwen3"}  # B130
    tensors = read_all(write_tiny_gguf(tmp_path / "m.gguf", architecture, **changes))
    expected = tiny_tensors(tiny_config(architecture, **changes))
    assert tensors.keys() == expected.keys()
    for name, array in tensors.items():
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_files_equal_the_reference(tmp_path: Path, quant: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen2", quant=quant)
    reference = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    with open_weights(path) as weights:
        assert weights.kind("model.layers.0.mlp.up_proj.weight") == quant
        assert weights.kind("model.norm.weight") == "F32"
        for name in weights.names():
            expected = reference[gguf_name(name)].astype(np.float32).reshape(weights.shape(name))
            np.testing.assert_array_equal(weights.read(name), expected)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quant_tensors_are_read(tmp_path: Path, kind: str) -> None:
    config = tiny_config(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_hidden_layers=1
    )
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (288, KINDS[kind].nbytes), np.uint8)
    for column in SCALES[kind]:
        raw[:, column : column + 2] = rng.random(288).astype(np.float16).view(np.uint8).reshape(-1, 2)
    changes = {key: config[key] for key in ("hidden_size", "head_dim", "num_hidden_layers")}
    tensors = tiny_tensors(config) | {"lm_head.weight": raw}
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors, raw_kind=kind, **changes)
    with open_weights(path) as weights:
        assert weights.kind("lm_head.weight") == kind
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(weights.read("lm_head.weight"), expected)
        assert weights.quantised("lm_head.weight") is None


# Damage


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", quant="Q4_1").read_bytes()


def refused(path: Path, content: bytes | bytearray) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_all(path)
    message = str(caught.value)
    assert path.name in message
    return message


def test_truncated_anywhere_is_refused(tmp_path: Path, tiny: bytes) -> None:
    # B019: every length, in steps, and the last byte.
    lengths = {0, 1, 3, 4, 8, 24, len(tiny) - 1} | {int(len(tiny) * share) for share in (0.1, 0.5, 0.9, 0.999)}
    for length in sorted(lengths | set(range(0, len(tiny), 997))):
        message = refused(tmp_path / "m.gguf", tiny[:length])
        if length > 20_000:
            assert "tensor " in message
            assert "fetch it again" in message


def test_zero_filled_tails_are_refused_by_tensor(tmp_path: Path, tiny: bytes) -> None:
    for share in (0.0, 0.1, 0.5, 0.9, 0.99, 0.999):
        kept = int(len(tiny) * share)
        message = refused(tmp_path / "m.gguf", tiny[:kept] + bytes(len(tiny) - kept))
        if share > 0.5:
            assert "tensor " in message


def test_changed_shape_is_refused(tmp_path: Path, tiny: bytes) -> None:
    data = bytearray(tiny)
    place = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4
    assert struct.unpack_from("<QQ", data, place) == (32, 64)
    struct.pack_into("<QQ", data, place, 64, 32)
    assert "blk.0.ffn_up.weight" in refused(tmp_path / "m.gguf", data)
    struct.pack_into("<QQ", data, place, 33, 64)
    assert "not a multiple" in refused(tmp_path / "m.gguf", data)
    struct.pack_into("<QQ", data, place, 32, 0)
    assert "impossible shape" in refused(tmp_path / "m.gguf", data)
    struct.pack_into("<QQ", data, place, 32, 1 << 39)
    assert "ffn_up.weight does not fit" in refused(tmp_path / "m.gguf", data)


def test_impossible_counts_allocate_nothing(tmp_path: Path, tiny: bytes) -> None:
    def changed(place: int, value: int) -> bytes:
        return tiny[:place] + struct.pack("<Q", value) + tiny[place + 8 :]

    huge = [1 << 63, (1 << 64) - 1, 1 << 40, 1 << 33]
    key = tiny.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
    for value in huge:
        assert "claims" in refused(tmp_path / "m.gguf", changed(8, value))  # tensors
        assert "claims" in refused(tmp_path / "m.gguf", changed(16, value))  # keys
        refused(tmp_path / "m.gguf", changed(24, value))  # length of the first key
        message = refused(tmp_path / "m.gguf", changed(key + 8, value))  # array length
        assert f"tokenizer.ggml.tokens' claims {value} strings" in message
        assert "tokenizer.ggml.tokens" in refused(tmp_path / "m.gguf", changed(key + 16, value))  # a string in it


def test_duplicates_overlaps_and_odd_values_are_refused(tmp_path: Path, tiny: bytes) -> None:
    path = tmp_path / "m.gguf"
    assert "appears twice" in refused(path, tiny.replace(b"llama.context_length", b"general.architecture"))
    assert "listed twice" in refused(path, tiny.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    data = bytearray(tiny)
    place = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16 + 4
    struct.pack_into("<Q", data, place, 0)
    assert "overlap" in refused(path, data)
    struct.pack_into("<Q", data, place, 8)
    assert "aligned" in refused(path, data)
    struct.pack_into("<I", data, place - 4, 10)
    assert "Q2_K, which is not supported" in refused(path, data)
    struct.pack_into("<I", data, place - 4, 4000)
    assert "number 4000" in refused(path, data)


def test_other_files_are_named_for_what_they_are(tmp_path: Path, tiny: bytes) -> None:
    # B125
    path = tmp_path / "m.gguf"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98362432\n"
    assert "expected 98362432 bytes" in refused(path, pointer)
    assert "empty" in refused(path, b"")
    assert "web page" in refused(path, b"<!DOCTYPE html><html>not found</html>")
    assert "zeros" in refused(path, bytes(5000))
    assert "not a GGUF file" in refused(path, b"PK\x03\x04" + bytes(100))
    assert "version 1 " in refused(path, tiny[:4] + struct.pack("<I", 1) + tiny[8:])
    assert "big-endian" in refused(path, tiny[:4] + struct.pack(">I", 3) + tiny[8:])


def test_another_architecture_is_named(tmp_path: Path, tiny: bytes) -> None:
    # B124
    content = tiny.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"gemma", 1)
    assert "general.architecture is 'gemma'" in refused(tmp_path / "m.gguf", content)


def test_every_tensor_is_used_and_every_parameter_filled(tmp_path: Path, tiny: bytes) -> None:
    # B131
    path = write_tiny_gguf(tmp_path / "m.gguf", extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"blk.0.attn_sinks.weight has no place in a llama model"):
        open_weights(path)
    renamed = tiny.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    assert "model.layers.1.mlp.up_proj.weight is missing" in refused(path, renamed)


def test_rope_factors_are_applied(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    factors = np.array([1, 1.5, 4, 8], np.float32)
    tensors = tiny_tensors(tiny_config())
    write_tiny_gguf(path, tensors=tensors, extra={"rope_freqs.weight": factors})
    with open_weights(path) as weights:
        assert weights.spec.rope.kind == "factors"
        assert weights.spec.rope.factors == (1.0, 1.5, 4.0, 8.0)
        assert "rope_freqs.weight" not in weights.names()
    write_tiny_gguf(path, tensors=tensors, extra={"rope_freqs.weight": factors[:3]})
    with pytest.raises(ModelError, match="rope_freqs"):
        open_weights(path)
    write_tiny_gguf(path, tensors=tensors, extra={"rope_freqs.weight": -factors})
    with pytest.raises(ModelError, match="rotary factors"):
        open_weights(path)


def test_single_byte_corruption_never_escapes_as_a_defect(tmp_path: Path, tiny: bytes) -> None:
    # B019
    path = tmp_path / "m.gguf"
    header = tiny.index(b"output_norm.weight") + 4000
    refusals = survives(path, byte_flips(tiny, 500, seed=1, last=header), lambda: read_all(path))
    assert refusals > 100
    survives(path, byte_flips(tiny, 100, seed=2, first=header), lambda: read_all(path))
