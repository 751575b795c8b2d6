"""Every form in which checkpoints keep matrices, on the CUDA engine, against the float32 reference of the same file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from edgespec.errors import ModelError
from edgespec.kernels.weights import QuantisedTorch
from edgespec.models.build import planned_bytes
from edgespec.models.cuda.copying import Copier
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.slots import refill
from edgespec.models.cuda.weights import load_model
from edgespec.models.reference.decoder import TorchDecoder
from edgespec.models.weights.opening import WeightFile, open_weights
from tests.support.packed import SHAPE, VARIANTS, converted, write_packed
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

TOKENS = np.random.default_rng(0).integers(3, 270, 60).tolist()
UP = "model.layers.1.mlp.up_proj"
Write = Callable[[Path, int], Path]


def packed(folder: Path, seed: int, **options: Any) -> Path:
    return write_packed(folder, seed=seed, **options).folder


def with_a_plain_layer(folder: Path, seed: int) -> Path:
    """A layer that was left out of quantisation is not stacked with one that was not."""
    made = write_packed(folder, seed=seed)
    made.settings(dynamic={"-:.*up_proj.*": {}})
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del made.tensors[f"{UP}.{part}"]
    made.tensors[f"{UP}.weight"] = made.weights[f"{UP}.weight"]
    made.save()
    return folder


def own(folder: Path, seed: int, bits: int, **options: Any) -> Path:
    converted(write_tiny(folder / "source", seed=seed, **SHAPE), folder / "out", bits, **options)
    return folder / "out"


def own_of_packed(folder: Path, seed: int) -> Path:
    write_packed(folder / "source", bits=8, seed=seed)
    converted(folder / "source", folder / "out", 8)
    return folder / "out"


def blocks(folder: Path, seed: int, quant: str, architecture: str = "llama") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_tiny_gguf(folder / "m.gguf", architecture, quant=quant, seed=seed, **SHAPE)


def mixed_blocks(folder: Path, seed: int) -> Path:
    """k and up in 8 bits where their neighbours have 4."""
    tensors: dict[str, np.ndarray] = dict(tiny_tensors(tiny_config("qwen2", **SHAPE), seed))
    kind = gguf.GGMLQuantizationType.Q8_0
    for name in tensors:
        if name.endswith(("k_proj.weight", "up_proj.weight")):
            tensors[name] = gguf.quants.quantize(tensors[name], kind)
    folder.mkdir(parents=True, exist_ok=True)
    return write_tiny_gguf(folder / "m.gguf", "qwen2", quant="Q4_0", tensors=tensors, raw_kind="Q8_0", **SHAPE)


FORMS: dict[str, Write] = {
    **{name: partial(packed, **options) for name, options in VARIANTS.items()},
    "gptq, a plain layer": with_a_plain_layer,
    "int4, zeros": partial(own, bits=4),
    "int4, symmetric, groups of 128": partial(own, bits=4, group=128, mode="symmetric"),
    "int4, shift, groups of 64": partial(own, bits=4, group=64, mode="shift"),
    "int4, all tables": partial(own, bits=4, tables=4),
    "int8": partial(own, bits=8),
    "int8 of gptq": own_of_packed,
    "Q4_0": partial(blocks, quant="Q4_0"),
    "Q4_1": partial(blocks, quant="Q4_1"),
    "Q8_0": partial(blocks, quant="Q8_0"),
    "Q4_0, qwen2": partial(blocks, quant="Q4_0", architecture="qwen2"),
    "Q4_0 and Q8_0": mixed_blocks,
}


@pytest.fixture(params=FORMS)
def write(request: pytest.FixtureRequest) -> Write:
    return FORMS[request.param]


def logits(decoder: Any, cuts: tuple[int, ...] = (30, 1, 5, 1, 16, 7)) -> np.ndarray:
    cache, made, begin = decoder.new_cache(), [], 0
    for count in cuts:
        made.append(np.array(decoder.forward(TOKENS[begin : begin + count], cache).logits))
        begin += count
    return np.concatenate(made)


def matrices(weights: WeightFile, decoder: CudaDecoder) -> list[bool]:
    """Of each matrix, whether it is kept as the file has it."""
    model = decoder.model
    parts = [*model.head.parts, *(part for layer in model.layers for part in layer.gate_up.parts + layer.qkv.parts)]
    return [isinstance(part, QuantisedTorch) for part in parts]


def test_it_runs_as_its_numbers_do(write: Write, tmp_path: Path) -> None:
    with open_weights(write(tmp_path / "model", 0)) as weights:
        decoder = CudaDecoder(weights, device="cpu", positions=64)
        truth = TorchDecoder(weights)
        assert any(matrices(weights, decoder))
    expected = logits(truth)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits(decoder), expected, atol=3e-4)
    np.testing.assert_allclose(decoder.embed([5, 287]), truth.embed([5, 287]), atol=1e-6)
    np.testing.assert_allclose(decoder.head_rows([5, 287]), truth.head_rows([5, 287]), atol=1e-6)


def test_it_takes_what_is_planned(write: Write, tmp_path: Path) -> None:
    with open_weights(write(tmp_path / "model", 0)) as weights:
        planned = planned_bytes(weights, "cuda", "exact")
        device = torch.device("cpu")
        with Copier(device) as copier:
            model = load_model(weights, device, torch.float16, keep_blocks=True, positions=64, sink=copier.place)
    assert 0.8 * planned < model.nbytes <= planned


def test_it_takes_the_place_of_another_of_its_form(write: Write, tmp_path: Path, monkeypatch: Any) -> None:
    """Row by row, piece by piece: the same numbers as in a decoder of its own."""
    monkeypatch.setattr("edgespec.models.cuda.weights.PIECE", 1 << 11)
    with open_weights(write(tmp_path / "one", 0)) as one, open_weights(write(tmp_path / "two", 1)) as two:
        decoder = CudaDecoder(one, device="cpu", positions=64)
        first = logits(decoder)
        refill(decoder, two)
        wanted = logits(CudaDecoder(two, device="cpu", positions=64))
    assert not np.allclose(first, wanted, atol=0.01)
    np.testing.assert_array_equal(logits(decoder), wanted)


def test_another_form_does_not(tmp_path: Path) -> None:
    with (
        open_weights(blocks(tmp_path / "one", 0, "Q4_0")) as one,
        open_weights(blocks(tmp_path / "two", 0, "Q4_1")) as two,
    ):
        decoder = CudaDecoder(one, device="cpu", positions=64)
        with pytest.raises(ModelError, match="cannot take the place"):
            refill(decoder, two)
