"""The tensor types of GGUF files: block layouts, and their exact meaning as float32.

A quantised row is a run of blocks; each block packs a fixed number of weights with one or more scales. The decoders
here take blocks as uint8 [n, block bytes] and return float32 [n, block size]; they follow ggml's reference arithmetic
operation by operation, so results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.models.weights.quantised import FloatArray, unpack_halves

ByteArray = npt.NDArray[np.uint8]

_NIBBLES = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
_BITS = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)


@dataclass(frozen=True, slots=True)
class Kind:
    """One tensor type: `block` weights are stored in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int
    decode: Callable[[ByteArray], FloatArray]

    def size(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape`, whose last dimension is a multiple of `block`."""
        count = 1
        for dimension in shape:
            count *= dimension
        return count // self.block * self.nbytes


def dequantize(kind: str, raw: ByteArray) -> FloatArray:
    """float32 [n] for the bytes of whole blocks, uint8 [m * block bytes]."""
    spec = KINDS[kind]
    return spec.decode(raw.reshape(-1, spec.nbytes)).reshape(-1)


def half(columns: ByteArray) -> FloatArray:
    """uint8 [n, 2] holding float16 -> float32 [n, 1]."""
    return np.ascontiguousarray(columns).view(np.float16).astype(np.float32)


def _f64(blocks: ByteArray) -> FloatArray:
    return blocks.view(np.float64).astype(np.float32)


def _f32(blocks: ByteArray) -> FloatArray:
    return blocks.view(np.float32)


def _f16(blocks: ByteArray) -> FloatArray:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: ByteArray) -> FloatArray:
    return (blocks.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(blocks: ByteArray) -> FloatArray:
    return half(blocks[:, :2]) * (unpack_halves(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: ByteArray) -> FloatArray:
    return half(blocks[:, :2]) * unpack_halves(blocks[:, 4:]).astype(np.float32) + half(blocks[:, 2:4])


def _five_bits(high: ByteArray, low: ByteArray) -> ByteArray:
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return unpack_halves(low) | (fifth << np.uint8(4))


def _q5_0(blocks: ByteArray) -> FloatArray:
    q = _five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.float32)
    return half(blocks[:, :2]) * (q - np.float32(16))


def _q5_1(blocks: ByteArray) -> FloatArray:
    q = _five_bits(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32)
    return half(blocks[:, :2]) * q + half(blocks[:, 2:4])


def _q8_0(blocks: ByteArray) -> FloatArray:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * half(blocks[:, :2])


def _k_scales(blocks: ByteArray) -> tuple[FloatArray, FloatArray]:
    """Scales and minima, float32 [n, 8, 1] each, of Q4_K and Q5_K: 6-bit numbers in 12 bytes, times two float16."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low & 0x3F, (rest & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minimum = np.concatenate([high & 0x3F, (rest >> 4) | ((high >> 2) & 0x30)], axis=1)
    return (
        (half(blocks[:, :2]) * scale.astype(np.float32))[:, :, None],
        (half(blocks[:, 2:4]) * minimum.astype(np.float32))[:, :, None],
    )


def _q4_k(blocks: ByteArray) -> FloatArray:
    scale, minimum = _k_scales(blocks)
    q = (blocks[:, 16:].reshape(-1, 4, 1, 32) >> _NIBBLES) & np.uint8(15)
    return (scale * q.reshape(-1, 8, 32).astype(np.float32) - minimum).reshape(-1, 256)


def _q5_k(blocks: ByteArray) -> FloatArray:
    scale, minimum = _k_scales(blocks)
    low = ((blocks[:, 48:].reshape(-1, 4, 1, 32) >> _NIBBLES) & np.uint8(15)).reshape(-1, 8, 32)
    fifth = ((blocks[:, 16:48].reshape(-1, 1, 1, 32) >> _BITS) & np.uint8(1)).reshape(-1, 8, 32)
    q = low | (fifth << np.uint8(4))
    return (scale * q.astype(np.float32) - minimum).reshape(-1, 256)


def _q6_k(blocks: ByteArray) -> FloatArray:
    low = ((blocks[:, :128].reshape(-1, 2, 1, 64) >> _NIBBLES) & np.uint8(15)).reshape(-1, 8, 32)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _PAIRS) & np.uint8(3)).reshape(-1, 8, 32)
    q = (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scale = half(blocks[:, 208:210]) * scales
    return (scale[:, :, None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("F32", 1, 4, _f32),
        Kind("F16", 1, 2, _f16),
        Kind("BF16", 1, 2, _bf16),
        Kind("F64", 1, 8, _f64),
        Kind("Q4_0", 32, 18, _q4_0),
        Kind("Q4_1", 32, 20, _q4_1),
        Kind("Q5_0", 32, 22, _q5_0),
        Kind("Q5_1", 32, 24, _q5_1),
        Kind("Q8_0", 32, 34, _q8_0),
        Kind("Q4_K", 256, 144, _q4_k),
        Kind("Q5_K", 256, 176, _q5_k),
        Kind("Q6_K", 256, 210, _q6_k),
    )
}

# Numbers as they stand in files. Types without a decoder are listed so that the refusal can name them.
GGUF_TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
