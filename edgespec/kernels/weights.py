"""Quantised matrices as torch tensors, in the layout that checkpoints, slots and kernels share.

A matrix of shape (N, K) = (out, in) is cut along K into groups of G values, each with one scale:

    bits 4: `q` uint8 [N, K/2]. Byte i of a group holds its value i in the low nibble and its value i + G/2 in the
            high one, the order of GGUF's blocks for G = 32.
    bits 8: `q` int8 [N, K].
    symmetric: value = scale * (q - 8) for 4 bits, scale * q for 8 bits.
    zeros:     value = scale * (q - zero), `zero` uint8 [N, K/G].
    shift:     value = scale * q + shift, `shift` [N, K/G] (GGUF's Q4_1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from edgespec.errors import ModelError

ZeroMode = Literal["symmetric", "zeros", "shift"]
GROUPS = (32, 64, 128)
_SCALES = (torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class QuantisedTorch:
    """A quantised matrix (N, K): `q`, float16 or float32 `scale` [N, K/G], and what its zero mode needs.

    Contiguous tensors of one device. `zero` is there in mode "zeros" only, `shift` (of scale's dtype) in "shift" only.
    """

    bits: int
    group: int
    q: Tensor
    scale: Tensor
    zero: Tensor | None = None
    shift: Tensor | None = None

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_arrays(
        cls,
        *,
        bits: int,
        group: int,
        q: Any,
        scale: Any,
        zero: Any = None,
        shift: Any = None,
        device: torch.device | str = "cpu",
    ) -> QuantisedTorch:
        """From numpy arrays or torch tensors of the layout above, moved to `device` (on the CPU without a copy).

        Raises ModelError for shapes, types or bits that are not of this layout.
        """
        fields = (None if part is None else torch.as_tensor(part) for part in (q, scale, zero, shift))
        placed = [None if part is None else part.to(device).contiguous() for part in fields]
        if placed[0] is None or placed[1] is None:
            raise ModelError("a quantised matrix needs q and scale.")
        return cls(bits, group, placed[0], placed[1], placed[2], placed[3])

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): rows of the result, and values in a row."""
        rows, width = self.q.shape
        return rows, width * 8 // self.bits

    @property
    def mode(self) -> ZeroMode:
        """How q becomes a value."""
        if self.zero is not None:
            return "zeros"
        return "symmetric" if self.shift is None else "shift"

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """The tensors that are there, in the order q, scale, zero, shift."""
        return [tensor for tensor in (self.q, self.scale, self.zero, self.shift) if tensor is not None]

    def to(self, device: torch.device | str) -> QuantisedTorch:
        """The same matrix on `device`."""
        return self._mapped(lambda tensor: tensor.to(device))

    def rows(self, begin: int, end: int) -> QuantisedTorch:
        """Rows `begin` to `end`, as views."""
        return self._mapped(lambda tensor: tensor[begin:end])

    def unset(self, rows: int, device: torch.device) -> QuantisedTorch:
        """A matrix of so many rows and this layout, whose numbers are still to be written."""
        return self._mapped(lambda tensor: torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=device))

    def gather(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The rows of ids int64 [n], dequantised: [n, K]; an embedding's look-up."""
        return self._mapped(lambda tensor: tensor[ids]).dequantise(dtype)

    def values(self) -> Tensor:
        """q as integers in the order of the columns: uint8 [N, K] for 4 bits, int8 for 8."""
        if self.bits == 8:
            return self.q
        rows, columns = self.shape
        packed = self.q.view(rows, columns // self.group, self.group // 2)
        return torch.cat((packed & 15, packed >> 4), dim=-1).view(rows, columns)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [N, K] as `dtype`, computed in float32 (float64 in float64)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows, columns = self.shape
        result = self.values().view(rows, columns // self.group, self.group).to(wide)  # a copy, changed in place
        if self.zero is not None:
            result -= self.zero.to(wide)[..., None]
        elif self.shift is None and self.bits == 4:
            result -= 8
        result *= self.scale.to(wide)[..., None]
        if self.shift is not None:
            result += self.shift.to(wide)[..., None]
        return result.view(rows, columns).to(dtype)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> QuantisedTorch:
        """The same layout with every tensor changed."""
        zero, shift = (None if part is None else change(part) for part in (self.zero, self.shift))
        return QuantisedTorch(self.bits, self.group, change(self.q), change(self.scale), zero, shift)


def _check(weight: QuantisedTorch) -> None:
    """ModelError unless the fields are of the layout in the module's docstring."""
    if weight.bits not in (4, 8):
        raise ModelError(f"quantised weights have 4 or 8 bits, not {weight.bits}.")
    if weight.group not in GROUPS:
        raise ModelError(f"quantised weights have groups of 32, 64 or 128, not {weight.group}.")
    wanted = torch.uint8 if weight.bits == 4 else torch.int8
    if weight.q.dtype != wanted or weight.q.ndim != 2:
        raise ModelError(f"q must be {wanted} [N, K], not {weight.q.dtype} {list(weight.q.shape)}.")
    rows, columns = weight.shape
    if columns == 0 or columns % weight.group:
        raise ModelError(f"{columns} columns are not whole groups of {weight.group}.")
    if weight.zero is not None and weight.shift is not None:
        raise ModelError("quantised weights have zero points or shifts, not both.")
    if weight.scale.dtype not in _SCALES:
        raise ModelError(f"scale must be float16 or float32, not {weight.scale.dtype}.")
    for name, dtype in (("scale", weight.scale.dtype), ("zero", torch.uint8), ("shift", weight.scale.dtype)):
        part: Tensor | None = getattr(weight, name)
        if part is None:
            continue
        if tuple(part.shape) != (rows, columns // weight.group) or part.dtype != dtype:
            raise ModelError(
                f"{name} must be {dtype} {[rows, columns // weight.group]}, not {part.dtype} {list(part.shape)}."
            )
        if part.device != weight.q.device or not part.is_contiguous():
            raise ModelError(f"{name} must be contiguous and on q's device.")
    if not weight.q.is_contiguous():
        raise ModelError("q must be contiguous.")
