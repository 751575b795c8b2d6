"""The fingerprint of a model: the same in every file format and quantisation, another for another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.errors import ModelError
from edgespec.models.weights.opening import open_weights
from tests.support.packed import SHAPE, converted, write_packed
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

NORM = "model.layers.1.post_attention_layernorm.weight"


def prints(path: Path) -> tuple[str, str]:
    with open_weights(path) as weights:
        return weights.fingerprint(), weights.model_fingerprint()


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    """Numbers as a checkpoint in bfloat16 has them."""
    return (array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def written(folder: Path, change: Any = None, architecture: str = "llama", **options: Any) -> Path:
    write_tiny(folder, architecture, **{**SHAPE, **options})
    tensors = {n: as_bfloat16(t) for n, t in tiny_tensors(tiny_config(architecture, **{**SHAPE, **options})).items()}
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("bits", "options"), [(4, {}), (4, {"group": 128, "mode": "symmetric"}), (8, {})])
def test_a_conversion_is_the_same_model(tmp_path: Path, architecture: str, bits: int, options: dict[str, Any]) -> None:
    source = written(tmp_path / "source", architecture=architecture)
    converted(source, tmp_path / "out", bits, **options)
    before, after = prints(source), prints(tmp_path / "out")
    assert before[0] != after[0]
    assert before[1] == after[1]


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_gguf_file_and_its_repack(tmp_path: Path, quant: str) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", quant=quant, **SHAPE)
    converted(source, tmp_path / "out", 8 if quant == "Q8_0" else 4)
    before, after = prints(source), prints(tmp_path / "out")
    assert before[0] != after[0]
    assert before[1] == after[1] == prints(write_tiny_gguf(tmp_path / "other.gguf", quant="F32", **SHAPE))[1]


def test_float_formats_and_packings(tmp_path: Path) -> None:
    """float32, the same numbers in float16, and a GPTQ checkpoint with the same norms."""
    full = written(tmp_path / "full")

    def halve(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({name: array.astype(np.float16) for name, array in tensors.items()})

    half = written(tmp_path / "half", halve)
    assert prints(full)[0] != prints(half)[0]
    assert prints(full)[1] == prints(half)[1]
    packed = write_packed(tmp_path / "packed")
    with open_weights(full) as weights:
        norms = {n: weights.read(n).astype(np.float16) for n in weights.names() if n.endswith("norm.weight")}
    packed.tensors |= norms
    packed.save()
    assert prints(packed.folder)[1] == prints(full)[1]


def _a_norm(tensors: dict[str, np.ndarray]) -> None:
    tensors[NORM][7] = as_bfloat16(tensors[NORM][7:8] * 1.01)[0]


def _swapped(tensors: dict[str, np.ndarray]) -> None:
    other = NORM.replace("post_attention", "input")
    tensors[NORM], tensors[other] = tensors[other], tensors[NORM]


@pytest.mark.parametrize("change", [_a_norm, _swapped])
def test_another_model(tmp_path: Path, change: Any) -> None:
    assert prints(written(tmp_path / "one"))[1] != prints(written(tmp_path / "other", change))[1]


def test_another_vocabulary_or_context(tmp_path: Path) -> None:
    one = written(tmp_path / "one")
    assert prints(one)[1] != prints(written(tmp_path / "wide", vocab_size=320))[1]
    model = prints(one)[1]
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 99}))
    assert prints(one)[1] == model


def test_only_the_norms_are_read(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        for name in tensors:
            if not name.endswith("norm.weight"):
                tensors[name][:] = np.nan

    one = written(tmp_path / "one")
    assert prints(written(tmp_path / "other", spoil))[1] == prints(one)[1]

    def spoil_norm(tensors: dict[str, np.ndarray]) -> None:
        tensors[NORM][0] = np.nan

    with pytest.raises(ModelError, match="holds NaN"):
        prints(written(tmp_path / "third", spoil_norm))
