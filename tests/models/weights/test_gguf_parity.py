"""A GGUF file runs as the same weights do from safetensors: names, row order of q and k, types, metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.engines import ENGINES, load
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 288, 40)]
SHAPE = {"head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "llama-tied": ("llama", {**SHAPE, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", SHAPE),
    "qwen3": ("qwen3", SHAPE),
}


def rounded(array: np.ndarray, quant: str) -> np.ndarray:
    """What is left of `array` after a trip through `quant`, by the gguf package's own code (not by ours)."""
    kind = gguf.GGMLQuantizationType[quant]
    if array.ndim == 1 or quant == "F32":
        return array
    return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind).astype(np.float32)


def twins(folder: Path, model: str, quant: str) -> tuple[Path, Path]:
    """A GGUF file of type `quant`, and a safetensors folder with the values that the file holds."""
    architecture, changes = MODELS[model]
    plain = write_tiny(folder / "plain", architecture, **changes)
    tensors = tiny_tensors(tiny_config(architecture, **changes))
    save_file({name: rounded(array, quant) for name, array in tensors.items()}, plain / "model.safetensors")
    return write_tiny_gguf(folder / "model.gguf", architecture, quant=quant, **changes), plain


def logits(path: Path, engine: str, weight_format: str = "float32") -> np.ndarray:
    decoder = load(path, engine, weight_format)
    result = np.array(decoder.forward(TOKENS, decoder.new_cache()).logits)
    decoder.close()
    return result


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("quant", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("model", MODELS)
def test_a_gguf_file_equals_its_safetensors_twin(tmp_path: Path, model: str, quant: str, engine: str) -> None:
    file, plain = twins(tmp_path, model, quant)
    assert float(np.abs(logits(file, engine) - logits(plain, engine)).max()) <= 1e-4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("model", ["llama", "llama-tied"])
def test_the_file_s_own_blocks_stay_near_float32(tmp_path: Path, model: str, quant: str, engine: str) -> None:
    """Where an engine computes on the blocks, it may round the activations; weights out of order would be far off."""
    file, plain = twins(tmp_path, model, quant)
    exact, expected = logits(file, engine, "exact"), logits(plain, "torch")
    cosines = (exact * expected).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(expected, axis=1)
    assert float(cosines.min()) > 0.98


def test_the_twins_of_two_types_differ(tmp_path: Path) -> None:
    """Else the comparisons above could not tell one type from another."""
    found = {}
    for quant in ("F32", "Q8_0", "Q4_0", "Q4_1"):
        (tmp_path / quant).mkdir()
        found[quant] = logits(twins(tmp_path / quant, "llama", quant)[0], "torch")
    for one in found:
        for other in found:
            assert one == other or float(np.abs(found[one] - found[other]).max()) > 1e-2
