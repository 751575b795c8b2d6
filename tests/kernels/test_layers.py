"""Normalisation, rotation with its writes, and attention, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgespec.kernels import ops, reference
from tests.kernels.cases import HALVES, close, normal, tuned

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("width", [7, 64, 130])
@pytest.mark.parametrize("added", [False, True])
def test_rms_norm(dtype: torch.dtype, width: int, added: bool, device: torch.device) -> None:
    x, weight = normal(1, 5, width, dtype=dtype, device=device), normal(2, width, dtype=dtype, device=device)
    residual = normal(3, 5, width, dtype=dtype, device=device) if added else None
    normed, summed = ops.rms_norm(x, weight, 1e-5, residual)
    close(summed, x.double() if residual is None else x.double() + residual.double())
    close(normed, reference.rms_norm(summed.double(), weight.double(), 1e-5)[0])


def test_the_norm_of_tiny_numbers_needs_epsilon(device: torch.device) -> None:
    x = torch.full((2, 48), 1e-4, device=device)
    weight = torch.ones(48, device=device)
    close(ops.rms_norm(x, weight, 1e-6)[0], reference.rms_norm(x.double(), weight.double(), 1e-6)[0])


def rotary(seed: int, capacity: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = normal(seed, capacity, width // 2).double() * 3
    return angles.cos().float().to(device), angles.sin().float().to(device)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "normed"), [(6, 2, 16, False), (3, 3, 24, True), (4, 1, 64, True)]
)
def test_rotary_and_write(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, normed: bool, device: torch.device
) -> None:
    capacity, positions = 19, torch.tensor([18, 0, -1, 7, 8], device=device)
    qkv = normal(1, 5, (heads + 2 * kv_heads) * width, dtype=dtype, device=device)
    cos, sin = rotary(2, capacity, width, device)
    weights = [normal(seed, width, dtype=dtype, device=device) for seed in (3, 4)]
    norms = (weights[0], weights[1], 1e-5) if normed else None
    wide_norms = (weights[0].double(), weights[1].double(), 1e-5) if normed else None
    buffers = [torch.full((kv_heads, capacity, width), NAN, dtype=dtype, device=device) for _ in range(2)]
    expected = [torch.full_like(buffer, NAN, dtype=torch.float64) for buffer in buffers]
    q = ops.rotary_and_write(qkv, cos, sin, positions, *buffers, heads, kv_heads, norms=norms)
    exact = reference.rotary_and_write(
        qkv.double(), cos.double(), sin.double(), positions, *expected, heads, kv_heads, norms=wide_norms
    )
    close(q, exact)
    written = positions[positions >= 0]
    for buffer, wanted in zip(buffers, expected):
        close(buffer[:, written], wanted[:, written])
        assert torch.equal(buffer.isnan(), wanted.isnan()), "a place was written that is not the row's"


def attention_case(
    seed: int, rows: int, heads: int, kv_heads: int, width: int, held: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, keys, values, positions): the rows are the last of `held` positions; everything behind is NaN."""
    keys = normal(seed, kv_heads, held + 9, width, dtype=dtype, device=device)
    values = normal(seed + 1, kv_heads, held + 9, width, dtype=dtype, device=device)
    keys[:, held:] = values[:, held:] = NAN
    q = normal(seed + 2, rows, heads, width, dtype=dtype, device=device) * 2
    return q, keys, values, torch.arange(held - rows, held, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "width", "held", "window"),
    [
        (1, 4, 4, 16, 1, None), (1, 6, 2, 24, 33, None), (5, 6, 2, 64, 130, None), (16, 3, 1, 32, 64, None),
        (3, 14, 2, 16, 65, None), (4, 2, 1, 16, 130, 20), (1, 2, 1, 32, 100, 1), (16, 2, 2, 16, 97, 33),
        (2, 4, 2, 16, 40, 500),
    ],
)  # fmt: skip
def test_attention(
    rows: int, heads: int, kv_heads: int, width: int, held: int, window: int | None, dtype: torch.dtype,
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tuned(monkeypatch, {"attention": {"chunk": 32, "block": 16}})
    q, keys, values, positions = attention_case(held, rows, heads, kv_heads, width, held, dtype, device)
    span = held if rows == 3 else keys.shape[1]
    exact = reference.attention(q.double(), keys.double(), values.double(), positions, span, window)
    close(ops.attention(q, keys, values, positions, span, window), exact)


def test_rows_of_padding_give_zeros(device: torch.device) -> None:
    q, keys, values, positions = attention_case(1, 3, 2, 1, 16, 20, torch.float32, device)
    positions[1] = -1
    result = ops.attention(q, keys, values, positions, 25)
    exact = reference.attention(q.double(), keys.double(), values.double(), positions, 25)
    assert torch.equal(result[1], torch.zeros_like(result[1]))
    close(result[[0, 2]], exact[[0, 2]])


@pytest.mark.parametrize("window", [None, 21])
def test_attention_has_the_same_bits_at_every_width_and_span(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, {"attention": {"chunk": 32, "block": 16}})
    q, keys, values, positions = attention_case(5, 9, 6, 2, 32, 101, torch.float16, device)
    together = ops.attention(q, keys, values, positions, 110, window)
    for row in (0, 4, 8):
        one = slice(row, row + 1)
        alone = ops.attention(q[one], keys, values, positions[one], int(positions[row]) + 1, window)
        assert torch.equal(alone, together[one])


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    q, keys, values, positions = attention_case(3, 2, 2, 2, 16, 50, torch.float32, device)
    q *= 100
    exact = reference.attention(q.double(), keys.double(), values.double(), positions, 50)
    assert torch.isfinite(exact).all()
    result = ops.attention(q, keys, values, positions, 50)
    assert torch.allclose(result.double(), exact, atol=1e-3)  # the scores themselves are rounded, at about 1000


def test_buffers_may_be_slices_of_all_layers(device: torch.device) -> None:
    buffers = normal(1, 2, 3, 2, 40, 16, device=device)  # keys and values, layers, heads, positions, width
    q, positions = normal(2, 2, 4, 16, device=device), torch.tensor([30, 31], device=device)
    keys, values = buffers[0, 1], buffers[1, 1]
    exact = reference.attention(q.double(), keys.double(), values.double(), positions, 40)
    close(ops.attention(q, keys, values, positions, 40), exact)


def test_shapes_that_do_not_fit_are_refused() -> None:
    keys, positions = torch.zeros(2, 8, 16), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="does not fit keys"):
        ops.attention(torch.zeros(1, 3, 16), keys, keys, positions, 8)
    with pytest.raises(ValueError, match="span of 9"):
        ops.attention(torch.zeros(1, 2, 16), keys, keys, positions, 9)
    tables = torch.zeros(8, 8)
    with pytest.raises(ValueError, match="do not fit 4 and 2 heads"):
        ops.rotary_and_write(torch.zeros(1, 96), tables, tables, positions, keys, keys, 4, 2)
    with pytest.raises(ValueError, match="do not reach"):
        ops.rotary_and_write(torch.zeros(1, 128), tables[:7], tables[:7], positions, keys, keys, 4, 2)
