"""The layout of quantised matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edgespec.errors import ModelError
from edgespec.kernels.weights import QuantisedTorch
from edgespec.models.weights.gguf_types import dequantize
from tests.kernels.cases import quantised


@pytest.mark.parametrize(("kind", "head"), [("Q4_0", 2), ("Q4_1", 4), ("Q8_0", 2)])
def test_blocks_of_gguf_are_this_layout(kind: str, head: int) -> None:
    """A block's scales split off, the rest is q: nothing is reordered."""
    rng = np.random.default_rng(3)
    rows, columns, size = 7, 96, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    raw = rng.integers(0, 256, (rows, columns // 32, size), dtype=np.uint8)
    raw[..., :head] = rng.normal(size=(rows, columns // 32, head // 2)).astype(np.float16).view(np.uint8)
    parts: dict[str, Any] = {"scale": raw[..., :2].copy().view(np.float16)[..., 0]}
    parts["q"] = raw[..., head:].reshape(rows, -1)
    if kind == "Q4_1":
        parts["shift"] = raw[..., 2:4].copy().view(np.float16)[..., 0]
    if kind == "Q8_0":
        parts["q"] = parts["q"].view(np.int8)
    weight = QuantisedTorch.from_arrays(bits=8 if kind == "Q8_0" else 4, group=32, **parts)
    assert weight.shape == (rows, columns)
    expected = dequantize(kind, raw.reshape(-1)).reshape(rows, columns)
    assert np.array_equal(weight.dequantise().numpy(), expected)


def test_nibbles_of_a_group_are_its_halves() -> None:
    q = torch.arange(64, dtype=torch.uint8)[None]
    weight = QuantisedTorch(4, 128, q, torch.ones(1, 1).half(), zero=torch.full((1, 1), 3, dtype=torch.uint8))
    low, high = weight.dequantise()[0].split(64)
    assert low.tolist() == [(i & 15) - 3 for i in range(64)]
    assert high.tolist() == [(i >> 4) - 3 for i in range(64)]


@pytest.mark.parametrize("mode", ["symmetric", "zeros", "shift"])
def test_rows_are_parts_of_one_matrix(mode: Any) -> None:
    one, two = quantised(1, 5, 128, mode=mode), quantised(2, 3, 128, mode=mode)
    both = one.unset(8, torch.device("cpu"))
    for rows, part in ((both.rows(0, 5), one), (both.rows(5, 8), two)):
        for into, tensor in zip(rows.tensors(), part.tensors(), strict=True):
            into.copy_(tensor)
    assert both.shape == (8, 128)
    assert both.mode == mode
    assert both.nbytes == one.nbytes + two.nbytes
    assert torch.equal(both.dequantise(), torch.cat((one.dequantise(), two.dequantise())))
    assert torch.equal(both.rows(5, 8).dequantise(), two.dequantise())
    assert both.rows(5, 8).q.data_ptr() == both.q[5:].data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "4 or 8 bits"),
        ({"group": 16}, "32, 64 or 128"),
        ({"q": torch.zeros(4, 64, dtype=torch.int8)}, "uint8"),
        ({"q": torch.zeros(4, 40, dtype=torch.uint8)}, "whole groups"),
        ({"scale": torch.zeros(4, 3).half()}, "scale must be"),
        ({"scale": torch.zeros(4, 4).double()}, "float16 or float32"),
        ({"zero": torch.zeros(4, 4).half()}, "zero must be"),
        ({"shift": torch.zeros(4, 4)}, "shift must be"),
        ({"zero": torch.zeros(4, 4, dtype=torch.uint8), "shift": torch.zeros(4, 4).half()}, "not both"),
        ({"q": None}, "needs q and scale"),
    ],
)
def test_what_is_not_this_layout_is_refused(change: dict[str, Any], message: str) -> None:
    good = {"bits": 4, "group": 32, "q": torch.zeros(4, 64, dtype=torch.uint8), "scale": torch.zeros(4, 4).half()}
    QuantisedTorch.from_arrays(**good)
    with pytest.raises(ModelError, match=message):
        QuantisedTorch.from_arrays(**{**good, **change})
