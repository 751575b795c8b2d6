"""How a weight matrix becomes ONNX nodes: the file's own blocks where ONNX Runtime has a form for them.

Forms (com.microsoft.MatMulNBits, blocks of 32 along the input, activations rounded to 8 bits per block):
- symmetric 4 bits (Q4_0): w = d (q - 8), with the default zero point, exact.
- symmetric 8 bits (Q8_0): w = d (q - 128), with the default zero point, exact.
- with a shift (Q4_1): w = d q + m = d (q - 8) + (m + 8 d): a 4-bit product, plus (m + 8 d) times the sum of each block
  of the input, in float32. Exact in the weights; centring q keeps the rounding of activations from being multiplied by
  a large mean. Zero points z are such a shift: d (q - z) = d (q - 8) + d (8 - z).
- everything else: 8 bits, symmetric, rounded to nearest per block ("int8"), or plain float32 where asked for.

Groups of 64 and 128 become blocks of 32 that say the same. ONNX Runtime has larger blocks too, but its products of
those depend on the number of rows in the last bits (seen with version 1.32 on x86), and so would the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.models.base import FloatArray
from edgespec.models.onnx.writer import MICROSOFT, GraphBuilder, GraphWriter
from edgespec.models.weights.opening import WeightFile
from edgespec.models.weights.quantised import QuantisedTensor

BLOCK = 32
_INT8_ACTIVATIONS = 4  # accuracy_level of MatMulNBits


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix as MatMulNBits takes it: w = scale * (q - 2^(bits-1)) + shift.

    q: uint8 [rows, cols/32, 32], one per byte.
    """

    bits: int
    q: npt.NDArray[np.uint8]
    scale: FloatArray
    shift: FloatArray | None

    @property
    def form(self) -> tuple[int, bool]:
        """Matrices of the same form can be merged into one product."""
        return self.bits, self.shift is not None


def quantise_int8(matrix: FloatArray) -> Blocks:
    """8-bit symmetric blocks, rounded to nearest. matrix: float32 [rows, cols], cols divisible by 32."""
    blocks = matrix.reshape(matrix.shape[0], -1, BLOCK)
    scale = np.abs(blocks).max(axis=-1) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    q = np.rint(blocks * inverse[..., None]).astype(np.int16) + 128
    return Blocks(8, q.astype(np.uint8), scale, None)


def load_blocks(weights: WeightFile, name: str, weight_format: str) -> Blocks | None:
    """The matrix `name` in the form that `weight_format` ("exact", "int8", "float32") asks for; None means float32."""
    if weight_format == "float32" or weights.shape(name)[1] % BLOCK:
        return None
    own = weights.quantised(name) if weight_format == "exact" else None
    return quantise_int8(weights.read(name)) if own is None else _own_blocks(own)


def _own_blocks(own: QuantisedTensor) -> Blocks:
    """The same numbers as MatMulNBits takes them."""
    q, scale, centre = own.values(), own.scale.astype(np.float32), np.float32(0 if own.bits == 8 else 8)
    if own.bits == 8:
        q = q.view(np.uint8) ^ np.uint8(128)  # two's complement + 128
    shift: FloatArray | None = None
    if own.zero is not None:
        shift = scale * (centre - own.zero.astype(np.float32))
    elif own.shift is not None:
        shift = own.shift.astype(np.float32) + scale * centre
    repeat = own.group // BLOCK
    if repeat > 1:
        scale = np.repeat(scale, repeat, axis=1)
        shift = None if shift is None else np.repeat(shift, repeat, axis=1)
    return Blocks(own.bits, q.reshape(len(q), -1, BLOCK), scale, shift)


def block_product(
    writer: GraphBuilder, x: str, weight: str, scale: str, shape: tuple[int, int], out: str, *, bits: int = 8
) -> str:
    """out = x @ matrix^T for a matrix of `shape` [rows, cols] whose numbers and scales are the named constants."""
    return writer.node(
        "MatMulNBits",
        [x, weight, scale],
        out,
        domain=MICROSOFT,
        K=shape[1],
        N=shape[0],
        bits=bits,
        block_size=BLOCK,
        accuracy_level=_INT8_ACTIVATIONS,
    )


class LinearBuilder:
    """Adds linear layers to a graph.

    Matrices that share an input are merged into one product where their forms agree.
    """

    def __init__(self, writer: GraphWriter, weights: WeightFile, weight_format: str) -> None:
        self._writer = writer
        self._weights = weights
        self._format = weight_format
        self._sums: dict[str, str] = {}

    def add(self, x: str, names: Sequence[str], out: str) -> str:
        """out = concat over names of x @ name.weight^T + name.bias, along the last axis."""
        parts = [load_blocks(self._weights, f"{name}.weight", self._format) for name in names]
        forms = {None if part is None else part.form for part in parts}
        if len(forms) == 1:
            product = self._product(x, names, parts, f"{out}/product")
        else:
            singles = [
                self._product(x, [n], [p], f"{out}/product{i}")
                for i, (n, p) in enumerate(zip(names, parts, strict=True))
            ]
            product = self._writer.node("Concat", singles, f"{out}/concat", axis=-1)
        bias = self._bias(names)
        if bias is None:
            return product
        return self._writer.node("Add", [product, self._writer.constant(f"{out}/bias", bias)], f"{out}/biased")

    def _bias(self, names: Sequence[str]) -> FloatArray | None:
        have = set(self._weights.names())
        if not any(f"{name}.bias" in have for name in names):
            return None
        rows = {name: self._weights.shape(f"{name}.weight")[0] for name in names}
        zeros = {name: np.zeros(count, np.float32) for name, count in rows.items()}
        return np.concatenate([self._weights.read(f"{n}.bias") if f"{n}.bias" in have else zeros[n] for n in names])

    def _product(self, x: str, names: Sequence[str], parts: Sequence[Blocks | None], out: str) -> str:
        blocks = [part for part in parts if part is not None]
        if blocks:
            return self.product(x, _stacked(blocks), out)
        matrix = np.concatenate([self._weights.read(f"{name}.weight") for name in names])
        return self._writer.node("MatMul", [x, self._writer.constant(f"{out}/weight", matrix.T)], out)

    def product(self, x: str, blocks: Blocks, out: str, *, weight_name: str | None = None) -> str:
        """out = x @ matrix^T for the matrix in `blocks`; `weight_name`: a constant that holds `blocks.q` already."""
        writer = self._writer
        rows, count, _ = blocks.q.shape
        q = blocks.q if blocks.bits == 8 else blocks.q[..., 0::2] | (blocks.q[..., 1::2] << 4)
        weight = writer.constant(weight_name or f"{out}/q", q)
        scale = writer.constant(f"{out}/scale", blocks.scale.reshape(-1))
        made = out if blocks.shift is None else f"{out}/scaled"
        scaled = block_product(writer, x, weight, scale, (rows, count * BLOCK), made, bits=blocks.bits)
        if blocks.shift is None:
            return scaled
        shift = writer.constant(f"{out}/shift", blocks.shift.T)
        shifted = writer.node("MatMul", [self._block_sums(x, count * BLOCK), shift], f"{out}/shifted")
        return writer.node("Add", [scaled, shifted], out)

    def _block_sums(self, x: str, width: int) -> str:
        """[..., width] -> [..., width / 32]. A product with a 0/1 matrix: one node, and as fast as a reduction."""
        if x not in self._sums:
            ones = np.kron(np.eye(width // BLOCK, dtype=np.float32), np.ones((BLOCK, 1), np.float32))
            summing = self._writer.constant(f"block_sums/{width}", ones)
            self._sums[x] = self._writer.node("MatMul", [x, summing], f"{x}/block_sums")
        return self._sums[x]


def _stacked(parts: Sequence[Blocks]) -> Blocks:
    """Matrices of one form, one below the other."""
    shifts = [part.shift for part in parts if part.shift is not None]
    q, scale = np.concatenate([part.q for part in parts]), np.concatenate([part.scale for part in parts])
    return Blocks(parts[0].bits, q, scale, np.concatenate(shifts) if shifts else None)
