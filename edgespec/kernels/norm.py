"""Root-mean-square normalisation, with the residual added before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgespec.kernels.types import pad_of


@triton.jit
def _rms_norm(x, residual, weight, normed, summed, width, eps, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes a row of `width` <= BLOCK numbers."""
    row = tl.program_id(0).to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    ok = lane < width
    values = tl.load(x + row + lane, mask=ok, other=0.0)
    if RESIDUAL:
        added = values.to(tl.float32) + tl.load(residual + row + lane, mask=ok, other=0.0).to(tl.float32)
        values = added.to(values.dtype)  # what is passed on is rounded, so the norm is of the rounded sum
        tl.store(summed + row + lane, values, mask=ok)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    result = wide * scale * tl.load(weight + lane, mask=ok, other=0.0).to(tl.float32)
    tl.store(normed + row + lane, result.to(normed.dtype.element_ty), mask=ok)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(normed, summed) of x [M, H] (see `reference.rms_norm`); without a residual, summed is x itself."""
    x = x.contiguous()
    rows, width = x.shape
    normed = torch.empty_like(x)
    summed = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x, pad_of(residual, x), weight, normed, summed, width, eps,
        RESIDUAL=residual is not None, BLOCK=block, num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return normed, summed
