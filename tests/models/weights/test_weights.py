"""WeightFile: the same tensors from any file, quantised blocks, fingerprints, and refusals that name the cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.errors import ModelError
from edgespec.models.weights.opening import WeightFile, open_weights
from edgespec.models.weights.quantised import Layout
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny
from tests.support.tiny_gguf import gguf_name, write_tiny_gguf


def _read_all(weights: WeightFile) -> None:
    for name in weights.names():
        weights.read(name)


@pytest.mark.parametrize(
    ("quant", "layout"),
    [("Q4_0", Layout(4, 32, "symmetric")), ("Q4_1", Layout(4, 32, "shift")), ("Q8_0", Layout(8, 32, "symmetric"))],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_blocks_mean_the_weights(tmp_path: Path, quant: str, layout: Layout, architecture: str) -> None:
    with open_weights(write_tiny_gguf(tmp_path / "m.gguf", architecture, quant=quant)) as weights:
        for name in weights.names():
            made = weights.quantised(name)
            if len(weights.shape(name)) == 1:
                assert made is None
                assert weights.layout(name) is None
                continue
            assert made is not None
            rows, columns = weights.shape(name)
            assert weights.layout(name) == made.layout == layout
            assert made.shape == (rows, columns)
            assert made.scale.dtype == np.float16
            assert made.scale.shape == (rows, columns // 32)
            assert made.q.shape == (rows, columns * layout.bits // 8)
            assert all(array.flags.c_contiguous for array in made.fields.values())
            assert made.nbytes == layout.nbytes((rows, columns))
            np.testing.assert_array_equal(made.dequantise(), weights.read(name))


def test_blocks_of_other_kinds_are_none(tmp_path: Path) -> None:
    for quant in ("F32", "F16", "Q5_0", "Q5_1"):
        with open_weights(write_tiny_gguf(tmp_path / f"{quant}.gguf", quant=quant)) as weights:
            assert all(weights.quantised(name) is None for name in weights.names())
            assert all(not list(weights.quantised_pieces(name, 64)) for name in weights.names())


def test_llama_rows_are_unpermuted_before_and_after_quantisation(tmp_path: Path) -> None:
    """Quantising permuted rows equals permuting quantised rows, so the blocks must equal those of the plain matrix."""
    tensors = tiny_tensors(tiny_config())
    with open_weights(write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1")) as weights:
        for part in ("q_proj", "k_proj", "v_proj"):
            name = f"model.layers.1.self_attn.{part}.weight"
            raw = gguf.quants.quantize(tensors[name], gguf.GGMLQuantizationType.Q4_1)
            expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)
            np.testing.assert_array_equal(weights.read(name), expected)
            own = weights.quantised(name)
            assert own is not None
            np.testing.assert_array_equal(own.dequantise(), expected)


def test_llama_biases_are_unpermuted_too(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True)
    path = write_tiny_gguf(tmp_path / "m.gguf", attention_bias=True)
    with open_weights(path) as weights:
        assert weights.spec.qkv_bias
        assert weights.spec.output_bias
        for name, array in tiny_tensors(config).items():
            np.testing.assert_array_equal(weights.read(name), array)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_and_folder_are_the_same_model(tmp_path: Path, architecture: str) -> None:
    folder = open_weights(write_tiny(tmp_path / "m", architecture))
    file = open_weights(write_tiny_gguf(tmp_path / "m.gguf", architecture))
    assert folder.spec == file.spec
    assert folder.names() == file.names()
    for name in folder.names():
        np.testing.assert_array_equal(folder.read(name), file.read(name))
    assert file.metadata["general.architecture"] == architecture
    assert folder.metadata == {}


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import edgespec.models.weights.opening as module

    path = write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1")
    whole = {n: open_weights(path).read(n) for n in open_weights(path).names()}
    for piece in (1, 32, 96, 1000):
        monkeypatch.setattr(module, "_PIECE", piece)
        with open_weights(path) as weights:
            for name, array in whole.items():
                np.testing.assert_array_equal(weights.read(name), array)


# Tied and untied heads (B130)


def head_files(tmp_path: Path, *, tie: bool, head: np.ndarray | None) -> Path:
    folder = write_tiny(tmp_path / "m", tie_word_embeddings=tie)
    tensors = tiny_tensors(tiny_config(tie_word_embeddings=True))
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_tied_head_needs_no_tensor(tmp_path: Path) -> None:
    for path in (
        head_files(tmp_path, tie=True, head=None),
        write_tiny_gguf(tmp_path / "m.gguf", tie_word_embeddings=True),
    ):
        with open_weights(path) as weights:
            assert weights.spec.tie_embeddings
            assert "lm_head.weight" not in weights.names()


def test_copy_of_the_embedding_counts_as_tied(tmp_path: Path) -> None:
    embedding = tiny_tensors(tiny_config())["model.embed_tokens.weight"]
    with open_weights(head_files(tmp_path, tie=True, head=embedding.copy())) as weights:
        assert weights.spec.tie_embeddings
        assert "lm_head.weight" not in weights.names()


def test_another_head_wins_over_the_flag(tmp_path: Path) -> None:
    head = tiny_tensors(tiny_config(), seed=9)["model.embed_tokens.weight"]
    with open_weights(head_files(tmp_path, tie=True, head=head)) as weights:
        assert not weights.spec.tie_embeddings
        np.testing.assert_array_equal(weights.read("lm_head.weight"), head)


def test_missing_head_is_an_error_if_not_tied(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):  # B131
        open_weights(head_files(tmp_path, tie=False, head=None))


# Files that do not belong together


def test_vocabulary_size_must_equal_the_rows(tmp_path: Path) -> None:
    # B067: both numbers are named.
    folder = write_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight has 288 rows but vocab_size is 300"):
        open_weights(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tiny_tensors(config)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"][:280]}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head.weight has 280 rows but vocab_size is 288"):
        open_weights(folder)


def test_gguf_vocabulary_must_fit_the_rows(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"vocabulary has 300 tokens but tensor token_embd.weight has 288 rows"):
        open_weights(write_tiny_gguf(tmp_path / "m.gguf", tokenizer_size=300))
    wide = tiny_tensors(tiny_config())["model.embed_tokens.weight"][:280]
    tensors = tiny_tensors(tiny_config()) | {"lm_head.weight": wide}
    with pytest.raises(ModelError, match=r"output.weight has 280 rows but vocab_size is 288"):
        open_weights(write_tiny_gguf(tmp_path / "n.gguf", tensors=tensors))


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"num_hidden_layers": 3}, {"intermediate_size": 32}])
def test_weights_of_another_config_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match="tensor model"):
        open_weights(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"model.layers.1.* has no place"):
        open_weights(folder)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    save_file(tiny_tensors(tiny_config()) | buffers, folder / "model.safetensors")
    with open_weights(folder) as weights:
        assert not any("inv_freq" in name for name in weights.names())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    folder = write_tiny(tmp_path / "m")
    tensors = tiny_tensors(tiny_config())
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = value
    save_file(tensors, folder / "model.safetensors")
    with open_weights(folder) as weights, pytest.raises(ModelError, match=r"down_proj.weight holds NaN or infinity"):
        weights.read("model.layers.1.mlp.down_proj.weight")


def test_damaged_scales_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")
    with open_weights(path) as weights:
        (entry,) = weights._tensors["model.layers.0.mlp.gate_proj.weight"].parts
    data = bytearray(path.read_bytes())
    data[entry.offset : entry.offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with open_weights(path) as weights:
        for use in (weights.read, weights.quantised):
            with pytest.raises(ModelError, match=r"blk.0.ffn_gate.weight holds NaN or infinity"):
                use("model.layers.0.mlp.gate_proj.weight")


def test_zero_biases_and_padding_rows_are_not_damage(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "qwen2")
    tensors = tiny_tensors(tiny_config("qwen2"))
    for name in tensors:
        if name.endswith(".bias"):
            tensors[name][:] = 0
    tensors["model.embed_tokens.weight"][250:] = 0
    save_file(tensors, folder / "model.safetensors")
    with open_weights(folder) as weights:
        for name in weights.names():
            np.testing.assert_array_equal(weights.read(name), tensors[name])


# Paths


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "absent", "does not exist"),
        (lambda d: d / "absent.gguf", "does not exist"),
        (lambda d: d, "neither model.safetensors nor a .gguf"),
        (lambda d: _touch(d / "pytorch_model.bin"), "pickled"),
        (lambda d: _touch(d / "notes.txt"), "neither a .gguf nor a .safetensors"),
        (lambda d: _touch(d / "a.gguf", d / "b.gguf").parent, "2 .gguf files"),
        (lambda d: Path("a\0b.gguf"), "a\0b.gguf"),
    ],
)
def test_paths_that_hold_no_model(tmp_path: Path, make: Any, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_weights(make(tmp_path))
    assert words in str(caught.value)


def _touch(*paths: Path) -> Path:
    for path in paths:
        path.write_bytes(b"x")
    return paths[0]


def test_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        open_weights(tmp_path / "m.gguf")


def test_folder_with_one_gguf_file(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    with open_weights(tmp_path) as weights:
        assert weights.path == tmp_path / "m.gguf"


def test_config_is_needed(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: is missing"):
        open_weights(folder)
    (folder / "config.json").write_text("{'vocab_size': 288}")
    with pytest.raises(ModelError, match=r"config.json: is not valid JSON"):
        open_weights(folder)


def test_file_cut_after_opening_is_an_error_not_a_signal(tmp_path: Path) -> None:
    # B119
    for path in (write_tiny_gguf(tmp_path / "m.gguf"), write_tiny(tmp_path / "m") / "model.safetensors"):
        with open_weights(path) as weights:
            os.truncate(path, path.stat().st_size // 2)
            with pytest.raises(ModelError, match="is incomplete, the file ends at byte"):
                _read_all(weights)


def test_reading_from_many_threads_equals_reading_alone(tmp_path: Path) -> None:
    with open_weights(write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1")) as weights:
        expected = {name: weights.read(name) for name in weights.names()}
        with ThreadPoolExecutor(8) as pool:
            for name, array in pool.map(lambda n: (n, weights.read(n)), weights.names() * 20):
                np.testing.assert_array_equal(array, expected[name])


def test_closed_weights_refuse_to_read(tmp_path: Path) -> None:
    weights = open_weights(write_tiny_gguf(tmp_path / "m.gguf"))
    weights.close()
    with pytest.raises(ModelError, match="closed"):
        weights.read("model.norm.weight")
    with pytest.raises(ModelError, match="no tensor nothing"):
        weights.read("nothing")


def test_no_file_stays_open(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    folder, file = write_tiny(tmp_path / "m"), write_tiny_gguf(tmp_path / "m.gguf")
    damaged = tmp_path / "d.gguf"
    damaged.write_bytes(file.read_bytes()[:-1])
    before = open_files()
    for _ in range(3):
        open_weights(folder).close()
        open_weights(file).close()
        with pytest.raises(ModelError):
            open_weights(damaged)
    assert open_files() == before


# Fingerprint


def fingerprint(path: Path) -> str:
    with open_weights(path) as weights:
        return weights.fingerprint()


def test_fingerprint_identifies_content_not_place(tmp_path: Path) -> None:
    one = write_tiny_gguf(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(one.read_bytes())
    assert fingerprint(one) == fingerprint(tmp_path / "b.gguf")
    others = [
        write_tiny_gguf(tmp_path / "c.gguf", seed=1),
        write_tiny_gguf(tmp_path / "d.gguf", quant="Q8_0"),
        write_tiny_gguf(tmp_path / "e.gguf", rope_theta=5000.0),
        write_tiny(tmp_path / "f"),
        write_tiny(tmp_path / "g", rope_theta=5000.0),  # same weights, another config
    ]
    assert len({fingerprint(path) for path in [one, *others]}) == 6


def test_fingerprint_sees_both_ends_of_every_tensor(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", intermediate_size=2048)  # 256 KiB per matrix: only the ends are read
    data = path.read_bytes()
    before = fingerprint(path)
    with open_weights(path) as weights:
        (entry,) = weights._tensors["model.layers.0.mlp.up_proj.weight"].parts
    assert entry.nbytes > 2 * 65536
    assert entry.name == gguf_name("model.layers.0.mlp.up_proj.weight")
    for place in (
        entry.offset,
        entry.offset + 65535,
        entry.offset + entry.nbytes - 65536,
        entry.offset + entry.nbytes - 1,
    ):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert fingerprint(path) != before


def test_reading_weights_imports_no_framework() -> None:
    code = (
        "import sys, edgespec.models.weights.opening, edgespec.models.tokenizer, edgespec.models.tokenizer_gguf,"
        " edgespec.models.tokenizer_hf, edgespec.models.rope;"
        "bad = {'torch', 'transformers', 'gguf', 'safetensors', 'onnxruntime'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_closing_during_reads_is_safe(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    expected = tiny_tensors(tiny_config())["lm_head.weight"]

    def use(weights: WeightFile) -> bool:
        try:
            np.testing.assert_array_equal(weights.read("lm_head.weight"), expected)
        except ModelError as error:
            return "closed" in str(error)
        return True

    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            weights = open_weights(path)
            results = [pool.submit(use, weights) for _ in range(4)]
            weights.close()
            assert all(result.result() for result in results)
