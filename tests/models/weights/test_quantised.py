"""Quantised matrices: the layout byte by byte, the meaning of each mode, and how small the error is."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.models.weights.quantised import Layout, QuantisedTensor, joined, pack_halves, quantise, unpack_halves

MODES = [(4, "symmetric"), (4, "zeros"), (4, "shift"), (8, "symmetric"), (8, "shift")]


def matrix(seed: int = 0, rows: int = 48, columns: int = 384) -> np.ndarray:
    """Weights with heavier tails than a normal distribution, as trained ones have."""
    return (np.random.default_rng(seed).standard_t(5, (rows, columns)) * 0.04).astype(np.float32)


def squared_error(tensor: QuantisedTensor, numbers: np.ndarray) -> float:
    return float(((tensor.dequantise() - numbers).astype(np.float64) ** 2).sum())


def test_a_group_has_its_first_half_in_the_low_halves() -> None:
    values = np.arange(32, dtype=np.uint8).reshape(1, 1, 32) % 16
    packed = pack_halves(values)
    assert packed.shape == (1, 1, 16)
    assert [int(b) & 15 for b in packed[0, 0]] == list(range(16))
    assert [int(b) >> 4 for b in packed[0, 0]] == list(range(16))
    values[0, 0, 3], values[0, 0, 19] = 9, 2
    assert pack_halves(values)[0, 0, 3] == 9 | 2 << 4
    np.testing.assert_array_equal(unpack_halves(pack_halves(values)), values)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_what_a_number_means(group: int) -> None:
    rng = np.random.default_rng(1)
    q4 = rng.integers(0, 16, (4, 2, group)).astype(np.uint8)
    q8 = rng.integers(-128, 128, (4, 2 * group)).astype(np.int8)
    scale, shift = (rng.standard_normal((4, 2)).astype(np.float16) for _ in range(2))
    zero = rng.integers(0, 17, (4, 2)).astype(np.uint8)
    packed = pack_halves(q4).reshape(4, -1)
    s, m, z = (a.astype(np.float32)[..., None] for a in (scale, shift, zero))
    for tensor, expected in (
        (QuantisedTensor(4, group, packed, scale), s * (q4.astype(np.float32) - 8)),
        (QuantisedTensor(4, group, packed, scale, zero=zero), s * (q4.astype(np.float32) - z)),
        (QuantisedTensor(4, group, packed, scale, shift=shift), s * q4.astype(np.float32) + m),
        (QuantisedTensor(8, group, q8, scale), s * q8.reshape(4, 2, group).astype(np.float32)),
        (QuantisedTensor(8, group, q8, scale, shift=shift), s * q8.reshape(4, 2, group).astype(np.float32) + m),
    ):
        assert tensor.shape == (4, 2 * group)
        np.testing.assert_array_equal(tensor.dequantise(), expected.reshape(4, -1))
        assert tensor.nbytes == tensor.layout.nbytes(tensor.shape)
        np.testing.assert_array_equal(tensor.rows(1, 3).dequantise(), expected.reshape(4, -1)[1:3])
        np.testing.assert_array_equal(joined([tensor.rows(0, 1), tensor.rows(1, 4)]).dequantise(), tensor.dequantise())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("bits", "mode"), MODES)
def test_the_error_is_less_than_that_of_plain_rounding(bits: int, mode: str, group: int) -> None:
    numbers = matrix()
    made = quantise(numbers, bits, group, mode)
    assert made.layout == Layout(bits, group, mode)
    assert made.scale.dtype == np.float16
    blocks = numbers.reshape(48, -1, group)
    if mode == "symmetric":
        scale = np.abs(blocks).max(-1, keepdims=True) / (7 if bits == 4 else 127)
        plain = np.rint(blocks / scale) * scale
    else:
        low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
        scale = (high - low) / (2**bits - 1)
        if mode == "zeros":
            zero = np.rint(-low / scale)
            plain = (np.clip(np.rint(blocks / scale) + zero, 0, 15) - zero) * scale
        else:
            plain = np.rint((blocks - low) / scale) * scale + low
    rounding = float(((plain - blocks).astype(np.float64) ** 2).sum())
    # Clipping and fitting help 4 bits; with 8 bits nothing is clipped, and float16 scales must cost next to nothing.
    bound = {(4, "symmetric"): 0.85, (4, "zeros"): 0.99, (4, "shift"): 0.93}.get((bits, mode), 1.01)
    assert squared_error(made, numbers) < bound * rounding


@pytest.mark.parametrize(("bits", "mode"), MODES)
def test_numbers_on_a_grid_come_back(bits: int, mode: str) -> None:
    """Where a scale exists that loses nothing, it is found: whatever is quantised once can be quantised again."""
    low, high = (-8, 7) if bits == 4 else (-128 if mode == "shift" else -127, 127)
    q = np.random.default_rng(3).integers(low, high + 1, (8, 4, 32)).astype(np.float32)
    q[..., 0], q[..., 1] = low, high
    numbers = (q * np.float32(2.0**-6)).reshape(8, -1)
    np.testing.assert_allclose(quantise(numbers, bits, 32, mode).dequantise(), numbers, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("bits", "mode"), MODES)
def test_zeros_constants_and_single_numbers(bits: int, mode: str) -> None:
    numbers = np.zeros((4, 64), np.float32)
    numbers[1] = 0.25
    numbers[2, 5] = -3.0
    numbers[3, :32] = -1e-9
    restored = quantise(numbers, bits, 32, mode).dequantise()
    assert np.isfinite(restored).all()
    assert not restored[0].any()
    np.testing.assert_allclose(restored[1], 0.25, rtol=2e-3)
    np.testing.assert_allclose(restored[2, 5], -3.0, rtol=2e-3)
    assert np.abs(np.delete(restored[2], 5)).max() < 0.02
    assert np.abs(restored[3]).max() < 1e-6


def test_layouts_that_do_not_exist_are_refused() -> None:
    numbers = matrix(columns=96)
    for bits, group, mode in ((3, 32, "symmetric"), (4, 64, "symmetric"), (8, 32, "zeros"), (4, 31, "shift")):
        with pytest.raises(ValueError, match=f"{bits} bits in groups of {group}"):
            quantise(numbers, bits, group, mode)
    with pytest.raises(ValueError, match="too large"):
        quantise(np.full((1, 32), 1e9, np.float32), 4, 32)
