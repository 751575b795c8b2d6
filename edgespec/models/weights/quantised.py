"""Quantised matrices: groups of numbers along the input that share a scale; one layout in memory, in files, in kernels.

A matrix is [N, K] (out, in); a group is G consecutive numbers of a row, K a multiple of G. `q` holds
- 4 bits: uint8 [N, K/2]; within a group, byte i holds number i in its low half and number i + G/2 in the high one (for
  G = 32 this is GGUF's own order, so its blocks are kept by splitting off their scales);
- 8 bits: int8 [N, K].
What a number means depends on the mode:
- "symmetric": scale * (q - 8) with 4 bits, scale * q with 8;
- "zeros": scale * (q - zero), zero uint8 [N, K/G] (4 bits; up to 16, which GPTQ files can say);
- "shift": scale * q + shift, shift [N, K/G].
Scales are float16 [N, K/G], or float32 where a file's own do not fit float16; shifts are of the scales' type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Mode = Literal["symmetric", "zeros", "shift"]
GROUPS = (32, 64, 128)
FloatArray = npt.NDArray[np.float32]
# How far a group's largest number may be clipped (below 1) or left unreached (above 1) in the search for less error.
_SYMMETRIC_FACTORS = (1.143, 1.067, 1.0, 0.941, 0.889, 0.842)
_RANGE_FACTORS = (1.0, 0.94, 0.88, 0.82)


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of a quantised matrix, known without reading it. scale_bytes: of one scale, and of one shift."""

    bits: int
    group: int
    mode: Mode
    scale_bytes: int = 2

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix [N, K] in this form."""
        rows, columns = shape
        extra = {"symmetric": 0, "zeros": 1, "shift": self.scale_bytes}[self.mode]
        return rows * columns * self.bits // 8 + rows * (columns // self.group) * (self.scale_bytes + extra)

    def __str__(self) -> str:
        wide = ", float32 scales" if self.scale_bytes == 4 else ""
        return f"int{self.bits}, groups of {self.group}, {self.mode}{wide}"


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A quantised matrix; see the module's text for the fields. At most one of zero and shift is there."""

    bits: int
    group: int
    q: npt.NDArray[Any]
    scale: npt.NDArray[Any]
    zero: npt.NDArray[np.uint8] | None = None
    shift: npt.NDArray[Any] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the matrix that this stands for."""
        return self.q.shape[0], self.q.shape[1] * 8 // self.bits

    @property
    def mode(self) -> Mode:
        if self.zero is not None:
            return "zeros"
        return "symmetric" if self.shift is None else "shift"

    @property
    def layout(self) -> Layout:
        return Layout(self.bits, self.group, self.mode, self.scale.dtype.itemsize)

    @property
    def fields(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name, as files and kernels name them: q, scale, and zero or shift."""
        named = {"q": self.q, "scale": self.scale, "zero": self.zero, "shift": self.shift}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.fields.values())

    def rows(self, start: int, stop: int) -> QuantisedTensor:
        """The rows start..stop, as views."""
        return QuantisedTensor(self.bits, self.group, **{n: a[start:stop] for n, a in self.fields.items()})

    def values(self) -> npt.NDArray[Any]:
        """q one number a byte: uint8 (4 bits) or int8 (8 bits) [N, K/G, G]."""
        rows, columns = self.shape
        if self.bits == 8:
            return self.q.reshape(rows, columns // self.group, self.group)
        return unpack_halves(self.q.reshape(rows, columns // self.group, self.group // 2))

    def dequantise(self) -> FloatArray:
        """float32 [N, K], each number by the formula of its mode in float32 arithmetic."""
        numbers = self.values().astype(np.float32)
        scale = self.scale.astype(np.float32)[..., None]
        if self.zero is not None:
            numbers -= self.zero.astype(np.float32)[..., None]
        elif self.shift is None and self.bits == 4:
            numbers -= np.float32(8)
        numbers *= scale
        if self.shift is not None:
            numbers += self.shift.astype(np.float32)[..., None]
        return numbers.reshape(self.shape)


def pack_halves(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """uint8 0..15 [..., G] -> uint8 [..., G/2]: the first half of a group goes to the low halves of its bytes."""
    half = values.shape[-1] // 2
    return values[..., :half] | (values[..., half:] << np.uint8(4))


def unpack_halves(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The inverse of `pack_halves`."""
    half = packed.shape[-1]
    values = np.empty((*packed.shape[:-1], 2 * half), np.uint8)
    np.bitwise_and(packed, 15, out=values[..., :half])
    np.right_shift(packed, 4, out=values[..., half:])
    return values


def joined(pieces: Sequence[QuantisedTensor]) -> QuantisedTensor:
    """Pieces of one layout, one below the other."""
    first = pieces[0]
    arrays = {name: np.concatenate([piece.fields[name] for piece in pieces]) for name in first.fields}
    return QuantisedTensor(first.bits, first.group, **arrays)


def quantise(matrix: FloatArray, bits: int, group: int, mode: Mode = "symmetric") -> QuantisedTensor:
    """The matrix (float32 [N, K], finite) in groups, each with the scale of least squared error among some.

    A scale is tried that clips nothing, and some that clip the largest numbers of the group or leave room beyond them;
    each is then fitted to the integers it gives by least squares and rounded to float16, and the best of them counts.
    Raises ValueError for a layout that does not exist or numbers beyond what float16 scales reach.
    """
    rows, columns = matrix.shape
    if bits not in (4, 8) or group < 2 or group % 2 or columns % group or (mode == "zeros" and bits == 8):
        raise ValueError(f"{columns} columns have no layout of {bits} bits in groups of {group}, {mode}")
    blocks = np.ascontiguousarray(matrix, np.float32).reshape(rows, columns // group, group)
    if np.abs(blocks).max(initial=0.0) > 65504.0 * (2 ** (bits - 1) - 1):
        raise ValueError("the numbers are too large for float16 scales")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if mode == "symmetric":
            return _symmetric(blocks, bits, group)
        return _zeros(blocks, group) if mode == "zeros" else _shift(blocks, bits, group)


def _symmetric(blocks: FloatArray, bits: int, group: int) -> QuantisedTensor:
    # With 4 bits the largest number, whatever its sign, goes to the one end that reaches further: the scale may be < 0.
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    extreme = np.where(blocks.max(-1) >= -blocks.min(-1), blocks.max(-1), blocks.min(-1))
    start = extreme / np.float32(low)
    best, scale = _Best(blocks), np.zeros(extreme.shape, np.float16)
    for factor in _SYMMETRIC_FACTORS if bits == 4 else (1.0,):
        tried = start * np.float32(factor)
        q = _rounded(blocks, tried, low, high)
        fitted = _half_precision(_ratio(_dot(blocks, q), _dot(q, q)))
        won = best.wins(q, fitted)
        scale[won] = fitted[won]
        best.tried[won] = tried[won]
    q = _rounded(blocks, best.tried, low, high)
    if bits == 8:
        return QuantisedTensor(8, group, _flat(q.astype(np.int8)), scale)
    return QuantisedTensor(4, group, _flat(pack_halves((q + 8).astype(np.uint8))), scale)


def _zeros(blocks: FloatArray, group: int) -> QuantisedTensor:
    lowest, highest = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    best, scale = _Best(blocks), np.zeros(lowest.shape, np.float16)
    zero = np.zeros(lowest.shape, np.float32)
    for factor in _RANGE_FACTORS:
        tried = (highest - lowest) * np.float32(factor / 15)
        point = np.clip(np.rint(np.float32(7.5) - _ratio((highest + lowest) / 2, tried)), 0, 15)
        q = _rounded(blocks, tried, -point[..., None], 15 - point[..., None])
        fitted = _half_precision(_ratio(_dot(blocks, q), _dot(q, q)))
        won = best.wins(q, fitted)
        scale[won], zero[won], best.tried[won] = fitted[won], point[won], tried[won]
    q = _rounded(blocks, best.tried, -zero[..., None], 15 - zero[..., None]) + zero[..., None]
    return QuantisedTensor(4, group, _flat(pack_halves(q.astype(np.uint8))), scale, zero=zero.astype(np.uint8))


def _shift(blocks: FloatArray, bits: int, group: int) -> QuantisedTensor:
    low, high = (0, 15) if bits == 4 else (-128, 127)
    lowest, highest = blocks.min(-1), blocks.max(-1)
    span = (highest - lowest) / np.float32(high - low)
    centred = blocks - ((highest + lowest) / 2)[..., None]
    best = _Best(blocks)
    scale, shift = np.zeros(span.shape, np.float16), np.zeros(span.shape, np.float16)
    for factor in _RANGE_FACTORS if bits == 4 else (1.0,):
        tried = span * np.float32(factor)
        q = _steps(centred, tried, low, high)
        mean_q, mean = q.mean(-1), blocks.mean(-1)
        deviation = q - mean_q[..., None]
        fitted = _half_precision(_ratio(_dot(blocks, deviation), _dot(deviation, deviation)))
        moved = _half_precision(mean - fitted.astype(np.float32) * mean_q)
        won = best.wins(q, fitted, moved)
        scale[won], shift[won], best.tried[won] = fitted[won], moved[won], tried[won]
    q = _steps(centred, best.tried, low, high)
    packed = pack_halves(q.astype(np.uint8)) if bits == 4 else q.astype(np.int8)
    return QuantisedTensor(bits, group, _flat(packed), scale, shift=shift)


class _Best:
    """The least squared error of each group so far, and the scale tried whose integers had it."""

    def __init__(self, blocks: FloatArray) -> None:
        self._blocks = blocks
        self._error = np.full(blocks.shape[:-1], np.inf, np.float32)
        self.tried = np.zeros(blocks.shape[:-1], np.float32)

    def wins(
        self, q: FloatArray, scale: npt.NDArray[np.float16], shift: npt.NDArray[np.float16] | None = None
    ) -> npt.NDArray[np.bool_]:
        """Where scale * q + shift has less error than all before; remembers it."""
        difference = q * scale.astype(np.float32)[..., None]
        if shift is not None:
            difference += shift.astype(np.float32)[..., None]
        difference -= self._blocks
        error = _dot(difference, difference)
        won: npt.NDArray[np.bool_] = error < self._error
        self._error[won] = error[won]
        return won


def _rounded(blocks: FloatArray, scale: FloatArray, low: Any, high: Any) -> FloatArray:
    q = blocks * _ratio(np.float32(1), scale)[..., None]
    np.rint(q, out=q)
    return np.clip(q, low, high, out=q)


def _steps(centred: FloatArray, scale: FloatArray, low: int, high: int) -> FloatArray:
    """Integers low..high of numbers around 0."""
    q = centred * _ratio(np.float32(1), scale)[..., None]
    q += np.float32((low + high) / 2)
    np.rint(q, out=q)
    return np.clip(q, low, high, out=q)


def _dot(one: FloatArray, other: FloatArray) -> FloatArray:
    """float32 [..., G] twice -> [...]: the sum of the products of each group."""
    return np.einsum("...k,...k->...", one, other)


def _ratio(one: Any, other: FloatArray) -> FloatArray:
    """one / other, 0 where that is not a number that float32 can hold."""
    return np.nan_to_num(np.asarray(one / other, np.float32), nan=0.0, posinf=0.0, neginf=0.0)


def _half_precision(numbers: FloatArray) -> npt.NDArray[np.float16]:
    return np.clip(numbers, -65504, 65504).astype(np.float16)


def _flat(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values.reshape(values.shape[0], -1))
