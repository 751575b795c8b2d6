"""Conversion: what is written is read again as planned, packed weights keep their numbers, nothing half-made stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from edgespec.errors import ModelError
from edgespec.models.convert import folder as convert_folder
from edgespec.models.convert.conversion import Wanted, plan
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from edgespec.models.weights.quantised import Layout
from edgespec.models.weights.safetensors_file import SafetensorsFile
from tests.support.engines import load
from tests.support.packed import SHAPE, converted, write_packed
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# What is written


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    ("bits", "options", "layout", "bound"),
    [
        (4, {}, Layout(4, 32, "zeros"), 0.1),
        (4, {"group": 128, "mode": "symmetric"}, Layout(4, 128, "symmetric"), 0.13),
        (8, {"group": 64}, Layout(8, 64, "symmetric"), 0.01),
    ],
)
def test_a_float_model(
    tmp_path: Path, architecture: str, bits: int, options: dict[str, Any], layout: Layout, bound: float
) -> None:
    source = write_tiny(tmp_path / "source", architecture, **SHAPE)
    kinds = converted(source, tmp_path / "out", bits, **options)
    with open_weights(source) as before, open_weights(tmp_path / "out") as after:
        assert after.spec == before.spec
        for name in before.names():
            table = name in (EMBEDDING, HEAD)
            if len(before.shape(name)) == 1:
                np.testing.assert_array_equal(after.read(name), before.read(name))
                continue
            assert after.layout(name) == (Layout(8, layout.group, "symmetric") if table else layout)
            own = after.quantised(name)
            assert own is not None
            np.testing.assert_array_equal(own.dequantise(), after.read(name))
            assert 0 < relative(after.read(name), before.read(name)) < (0.01 if table else bound)
    up = kinds["up_proj"]
    assert (up.tensors, up.forms) == (2, {str(layout)})
    assert 0 < up.relative_error < bound
    assert kinds["norm"].relative_error == 0
    assert sum(kind.bytes_before for kind in kinds.values()) == sum(
        4 * array.size for array in tiny_tensors(tiny_config(architecture, **SHAPE)).values()
    )


@pytest.mark.parametrize(("engine", "weight_format"), [("torch", "float32"), ("cpu", "float32"), ("cpu", "exact")])
@pytest.mark.parametrize(("bits", "group", "mode"), [(4, 32, "zeros"), (4, 128, "symmetric"), (8, 64, None)])
def test_both_engines_run_it(tmp_path: Path, engine: str, weight_format: str, bits: int, group: int, mode: Any) -> None:
    """As they run a float32 checkpoint of the very numbers that were written."""
    source = write_tiny(tmp_path / "source", **SHAPE)
    converted(source, tmp_path / "out", bits, group=group, mode=mode)
    with open_weights(tmp_path / "out") as weights:
        save_file({name: weights.read(name) for name in weights.names()}, source / "model.safetensors")
    tokens = np.random.default_rng(0).integers(3, 270, 24).tolist()
    truth, found = load(source, "torch", "float32"), load(tmp_path / "out", engine, weight_format)
    expected = truth.forward(tokens, truth.new_cache()).logits
    logits = found.forward(tokens, found.new_cache()).logits
    if weight_format == "float32":
        np.testing.assert_allclose(logits, expected, atol=2e-4)
    else:
        assert np.abs(logits - expected).mean() < 0.08 * expected.std()
    np.testing.assert_allclose(found.embed([5, 287]), truth.embed([5, 287]), atol=1e-6)
    np.testing.assert_allclose(found.head_rows([5, 287]), truth.head_rows([5, 287]), atol=1e-6)


@pytest.mark.parametrize("tables", [4, 8, 16])
def test_embedding_and_head_as_asked_for(tmp_path: Path, tables: int) -> None:
    source = write_tiny(tmp_path / "source", tie_word_embeddings=True, **SHAPE)
    converted(source, tmp_path / "out", tables=tables)
    with open_weights(tmp_path / "out") as weights:
        assert weights.kind(EMBEDDING) == {4: "int4", 8: "int8", 16: "F16"}[tables]
    for weight_format in ("float32", "exact"):
        decoder = load(tmp_path / "out", "cpu", weight_format)
        assert np.isfinite(decoder.forward([5, 6], decoder.new_cache()).logits).all()


def test_inputs_that_the_group_does_not_divide(tmp_path: Path) -> None:
    """96 takes groups of 32 where 64 are asked for; 40 and 72 take float16."""
    source = write_tiny(tmp_path / "source", hidden_size=96, intermediate_size=72, head_dim=16)
    converted(source, tmp_path / "out", group=64)
    with open_weights(tmp_path / "out") as weights:
        assert weights.layout(UP) == Layout(4, 32, "zeros")
        assert weights.layout("model.layers.0.self_attn.o_proj.weight") == Layout(4, 64, "zeros")
        assert weights.kind("model.layers.0.mlp.down_proj.weight") == "F16"
    source = write_tiny(tmp_path / "other", hidden_size=40, intermediate_size=72, head_dim=10)
    with open_weights(source) as weights, pytest.raises(ModelError, match="cannot be quantised"):
        plan(weights, Wanted(4))


PACKED: dict[str, dict[str, Any]] = {
    "gptq": {},
    "gptq 128": {"group": 128, "symmetric": True},
    "gptq one group": {"group": -1},
    "gptq v2": {"version": "gptq_v2"},
    "gptq 8": {"bits": 8},
    "awq": {"method": "awq", "group": 64},
}


@pytest.mark.parametrize("variant", PACKED)
def test_packed_checkpoints_keep_their_numbers(tmp_path: Path, variant: str) -> None:
    made = write_packed(tmp_path / "source", **PACKED[variant])
    kinds = converted(tmp_path / "source", tmp_path / "out", PACKED[variant].get("bits", 4))
    with open_weights(tmp_path / "out") as weights:
        for name, expected in made.weights.items():
            np.testing.assert_array_equal(weights.read(name), expected)
    assert all(kind.relative_error == 0 for kind in kinds.values())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(("quant", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_gguf_blocks_keep_their_numbers(tmp_path: Path, quant: str, bits: int) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", quant=quant, **SHAPE)
    converted(source, tmp_path / "out", bits)
    tokenizer, original = load_tokenizer(tmp_path / "out"), load_tokenizer(source)
    with open_weights(source) as before, open_weights(tmp_path / "out") as after:
        for name in before.names():
            np.testing.assert_array_equal(after.read(name), before.read(name))
            assert after.layout(name) == before.layout(name)
    assert tokenizer.fingerprint() == original.fingerprint()
    assert (tokenizer.chat_template, tokenizer.eos_ids, tokenizer.adds_bos, tokenizer.named_tokens) == (
        original.chat_template, original.eos_ids, original.adds_bos, original.named_tokens,
    )  # fmt: skip
    converted(tmp_path / "out", tmp_path / "again", bits)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_rotary_factors_of_a_gguf_file_survive(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 16).astype(np.float32)
    source = write_tiny_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}, **SHAPE)
    converted(source, tmp_path / "out")
    with open_weights(tmp_path / "out") as weights:
        assert weights.spec.rope.factors == tuple(factors.tolist())


def test_another_group_rounds_again(tmp_path: Path) -> None:
    made = write_packed(tmp_path / "source")
    kinds = converted(tmp_path / "source", tmp_path / "out", group=64)
    assert 0 < kinds["up_proj"].relative_error < 0.2
    with open_weights(tmp_path / "out") as weights:
        assert weights.layout(UP) == Layout(4, 64, "zeros")
        assert relative(weights.read(UP), made.weights[UP]) == pytest.approx(kinds["up_proj"].relative_error, rel=0.3)


@pytest.mark.parametrize(("bits", "said"), [(4, True), (4, False), (8, False)])
def test_inputs_out_of_order_are_rounded_again(tmp_path: Path, bits: int, said: bool) -> None:
    made = write_packed(tmp_path / "source", shuffled=True, bits=bits)
    made.settings(desc_act=said)
    kinds = converted(tmp_path / "source", tmp_path / "out", 8)
    assert 0 < kinds["up_proj"].relative_error < 0.01
    with open_weights(tmp_path / "out") as weights:
        for name, expected in made.weights.items():
            assert relative(weights.read(name), expected) < 0.01


def test_a_padded_vocabulary_keeps_its_rows(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", vocab_size=320, tokenizer_size=280, **SHAPE)
    tensors = tiny_tensors(tiny_config(vocab_size=320, **SHAPE))
    tensors[EMBEDDING][280:] = tensors[HEAD][280:] = 0
    save_file(tensors, source / "model.safetensors")
    converted(source, tmp_path / "out")
    with open_weights(tmp_path / "out") as weights:
        assert weights.spec.vocab_size == 320
        assert not weights.read(HEAD)[280:].any()


def test_a_head_of_its_own_wins_over_the_flag(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", **SHAPE)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    converted(source, tmp_path / "out")
    with open_weights(tmp_path / "out") as weights:
        assert not weights.spec.tie_embeddings


def test_norms_that_float16_cannot_hold_stay_float32(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", **SHAPE)
    tensors = tiny_tensors(tiny_config(**SHAPE))
    tensors["model.norm.weight"] = np.full(128, 0.5, np.float32)
    tensors["model.layers.0.input_layernorm.weight"] = np.full(128, 1e6, np.float32)
    save_file(tensors, source / "model.safetensors")
    converted(source, tmp_path / "out")
    with open_weights(tmp_path / "out") as weights:
        assert weights.kind("model.norm.weight") == "F16"
        assert weights.kind("model.layers.0.input_layernorm.weight") == "F32"
    tensors[EMBEDDING][4, 4] = 1e6
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ModelError, match=r"embed_tokens.weight has numbers that float16 cannot hold"):
        converted(source, tmp_path / "other", tables=16)


def test_shards_with_an_index_that_other_readers_understand(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", **SHAPE)
    converted(source, tmp_path / "whole")
    converted(source, tmp_path / "out", shard_bytes=60_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert [f.name for f in files] == sorted(set(index["weight_map"].values()))
    with safe_open(tmp_path / "whole/model.safetensors", "np") as whole:
        assert set(whole.keys()) == index["weight_map"].keys()
        for file in files:
            opened = SafetensorsFile(file, types={"F16": 2, "F32": 4, "U8": 1, "I8": 1})
            opened.close()
            assert min(entry.offset for entry in opened.tensors.values()) % 4096 == 0
            with safe_open(file, "np") as part:
                for name in list(part.keys()):
                    assert index["weight_map"][name] == file.name
                    np.testing.assert_array_equal(part.get_tensor(name), whole.get_tensor(name))
    for name in index["weight_map"]:  # what belongs together lies in one file
        stem, _, key = name.rpartition(".")
        if key in ("scale", "zero"):
            assert index["weight_map"][name] == index["weight_map"][f"{stem}.q"]


def test_what_is_kept_beside_the_weights(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", **SHAPE)
    texts = {
        "generation_config.json": '{"eos_token_id": [2, 1]}',
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": "{}",
        "LICENSE": "free",
        "NOTICE.txt": "really",
    }
    for name, text in texts.items():
        (source / name).write_text(text)
    (source / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: other\n")
    (source / "pytorch_model.bin").write_text("pickle")
    (source / "code.py").write_text("print()")
    with open_weights(source) as weights:
        fingerprint, licence = weights.fingerprint(), convert_folder.licence_of(weights)
    assert licence == "apache-2.0"
    converted(source, tmp_path / "out", licence=licence)
    expected = {*texts, "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == expected
    for name in (*texts, "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    record = json.loads((tmp_path / "out/config.json").read_text())["edgespec_quantisation"]
    assert (record["version"], record["bits"], record["group"]) == (1, 4, 32)
    assert record["source"] == {"name": "source", "fingerprint": fingerprint, "stored": ["F32"], "licence": licence}
    with open_weights(tmp_path / "out") as weights:
        assert convert_folder.licence_of(weights) == licence
