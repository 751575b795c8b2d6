"""Stored integers to floats in a few instructions.

A number is laid into the low bits of the mantissa of a power of two (1024 in float16, 2^23 in float32), and the power
is subtracted together with the zero point: exact, where a conversion takes a slow instruction. The compiled form of the
first step is PTX that takes four bytes at a time: two masks, then one byte permutation for two float16 or one float32.
The interpreter has no PTX and takes the plain form.
"""

from __future__ import annotations

import triton
import triton.language as tl

# prmt picks the result's bytes, lowest first, by the digits of its last operand from the right: 0-3 are bytes of the
# first operand, 4-7 of the second.
_HALF_PAIRS = "prmt.b32 ${0}, {1}, 0x64646464, 0x4140; prmt.b32 ${2}, {1}, 0x64646464, 0x4342;"
_SINGLES = (
    "prmt.b32 ${0}, {4}, 0x4B000000, 0x7440; prmt.b32 ${1}, {4}, 0x4B000000, 0x7441;"
    "prmt.b32 ${2}, {4}, 0x4B000000, 0x7442; prmt.b32 ${3}, {4}, 0x4B000000, 0x7443;"
)
_NIBBLES = "and.b32 low, ${0}, 0x0F0F0F0F; shr.u32 high, ${0}, 4; and.b32 high, high, 0x0F0F0F0F;"


def _block(*lines: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 low, high; " + " ".join(lines) + " }")


NIBBLES_HALF = _block(_NIBBLES.format(4), _HALF_PAIRS.format(0, "low", 1), _HALF_PAIRS.format(2, "high", 3))
NIBBLES_SINGLE = _block(_NIBBLES.format(8), _SINGLES.format(0, 1, 2, 3, "low"), _SINGLES.format(4, 5, 6, 7, "high"))
BYTES_HALF = _block("xor.b32 low, $2, 0x80808080;", _HALF_PAIRS.format(0, "low", 1))
BYTES_SINGLE = _block("xor.b32 low, $4, 0x80808080;", _SINGLES.format(0, 1, 2, 3, "low"))


@triton.jit
def raised_nibbles(stored, TYPE: tl.constexpr, PTX: tl.constexpr):
    """(low, high) halves of bytes as TYPE (float16 or float32), each plus the power of two."""
    if PTX:
        if TYPE == tl.float16:
            low, high = tl.inline_asm_elementwise(
                NIBBLES_HALF, "=r,=r,=r,=r,r", [stored], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                NIBBLES_SINGLE,
                "=r,=r,=r,=r,=r,=r,=r,=r,r",
                [stored],
                dtype=(tl.float32, tl.float32),
                is_pure=True,
                pack=4,
            )
    else:
        low, high = raised_plainly(stored & 15, TYPE), raised_plainly(stored >> 4, TYPE)
    return low, high


@triton.jit
def raised_bytes(stored, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Signed bytes + 128 as TYPE (float16 or float32), plus the power of two."""
    if PTX:
        if TYPE == tl.float16:
            raised = tl.inline_asm_elementwise(BYTES_HALF, "=r,=r,r", [stored], dtype=tl.float16, is_pure=True, pack=4)
        else:
            raised = tl.inline_asm_elementwise(
                BYTES_SINGLE, "=r,=r,=r,=r,r", [stored], dtype=tl.float32, is_pure=True, pack=4
            )
    else:
        raised = raised_plainly(stored.to(tl.uint8, bitcast=True) ^ 128, TYPE)
    return raised


@triton.jit
def raised_plainly(code, TYPE: tl.constexpr):
    """uint8 codes as TYPE plus the power of two."""
    if TYPE == tl.float16:
        raised = (code.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        raised = (code.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
    return raised


@triton.jit
def lowered(raised, zero, BITS: tl.constexpr, MODE: tl.constexpr, TYPE: tl.constexpr):
    """Raised codes less the power and the zero point: numbers as the layout means them. zero: a tile, in mode 1."""
    CENTRE: tl.constexpr = 128.0 if BITS == 8 else (8.0 if MODE == 0 else 0.0)
    POWER: tl.constexpr = 1024.0 if TYPE == tl.float16 else 8388608.0
    if MODE == 1:
        numbers = raised - (zero + (POWER + CENTRE))
    else:
        numbers = raised - (POWER + CENTRE)
    return numbers
