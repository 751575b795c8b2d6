"""Products of a few rows with a quantised or plain matrix: y = x W^T, with bias, residual or SwiGLU at the end.

Two kernels share one finish. `_dot` brings a tile of the matrix to x's type and multiplies it on the tensor cores,
16 rows of x at a time, so a row's result has the same bits whether it comes alone or with others; long prompts use it
with more rows a tile. `_vector` is for a single row: it works on the numbers as they are stored, scales sums of
groups only, and needs no shared memory.

A matrix with few rows is cut along K into splits; each writes float32 partial sums, which `_finish` adds in order. The
number of splits depends on the matrix alone, never on x. Layouts of the weights: `edgespec.kernels.weights`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgespec.kernels import tuning
from edgespec.kernels.types import INTERPRETED, dot_type, pad_of
from edgespec.kernels.unpack import lowered, raised_bytes, raised_nibbles
from edgespec.kernels.weights import QuantisedTorch

FLOAT_GROUP = 64  # plain matrices are cut like quantised ones, so that one loop serves both
MODES = {"symmetric": 0, "zeros": 1, "shift": 2}
FINISH_BLOCK = 256
WIDE_ROWS = 64  # rows of x in a tile of a long prompt
NARROW_ROWS = 16


@triton.jit
def _tile_sums(
    x, q, scale, zero, rows, row_ok, m, first, last, M, K,
    BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, WEIGHT_TYPE: tl.constexpr, DOT_TYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """W x^T over steps first..last: float32 [BLOCK_N, BLOCK_M] for matrix rows `rows` and rows `m` of x.

    A step takes GROUPS groups. `q` has HALF elements a group: bytes of two numbers, numbers, or plain weights.
    """
    HALF: tl.constexpr = GROUP // 2 if BITS == 4 else GROUP
    WIDTH: tl.constexpr = GROUPS * HALF
    count = tl.cdiv(K, GROUP)
    flat = tl.arange(0, WIDTH)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, last):
        column_group = step * GROUPS + flat // HALF
        column = column_group * GROUP + flat % HALF
        x_at = x + m[None, :].to(tl.int64) * K + column[:, None]
        if BITS > 8:
            inside = column < K
            low_x = tl.load(x_at, mask=inside[:, None] & (m < M)[None, :], other=0.0)
            low = tl.load(
                q + rows[:, None].to(tl.int64) * K + column[None, :], mask=row_ok[:, None] & inside[None, :], other=0.0
            )
            sums = tl.dot(low.to(DOT_TYPE), low_x.to(DOT_TYPE), sums, input_precision="ieee")
        else:
            group = step * GROUPS + tl.arange(0, GROUPS)
            ok = row_ok[:, None] & (group < count)[None, :]
            inner = group[:, None] * HALF + tl.arange(0, HALF)[None, :]
            at = rows[:, None, None].to(tl.int64) * (count * HALF) + inner[None, :, :]
            stored = tl.load(q + at, mask=ok[:, :, None], other=0)
            scale_at = rows[:, None].to(tl.int64) * count + group[None, :]
            factor = tl.load(scale + scale_at, mask=ok, other=0.0).to(WEIGHT_TYPE)[:, :, None]
            offset = factor
            if MODE != 0:
                offset = tl.load(zero + scale_at, mask=ok, other=0).to(WEIGHT_TYPE)[:, :, None]
            x_ok = (column_group < count)[:, None] & (m < M)[None, :]
            low_x = tl.load(x_at, mask=x_ok, other=0.0).to(DOT_TYPE)
            if BITS == 4:
                low, high = raised_nibbles(stored, WEIGHT_TYPE, PTX)
            else:
                low = raised_bytes(stored, WEIGHT_TYPE, PTX)
            low = lowered(low, offset, BITS, MODE, WEIGHT_TYPE) * factor
            if MODE == 2:
                low = low + offset
            low = tl.reshape(low.to(DOT_TYPE), (BLOCK_N, WIDTH))
            sums = tl.dot(low, low_x, sums, input_precision="ieee")
            if BITS == 4:
                high_x = tl.load(x_at + HALF, mask=x_ok, other=0.0).to(DOT_TYPE)
                high = lowered(high, offset, BITS, MODE, WEIGHT_TYPE) * factor
                if MODE == 2:
                    high = high + offset
                high = tl.reshape(high.to(DOT_TYPE), (BLOCK_N, WIDTH))
                sums = tl.dot(high, high_x, sums, input_precision="ieee")
    return sums


@triton.jit
def _ended(
    sums, up, at, column, ok, bias, residual, N, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr
):
    """Sums with bias, SwiGLU and residual; `column`, `at`, `ok`: tiles of sums' shape (columns, offsets, masks)."""
    if BIAS:
        sums += tl.load(bias + column, mask=ok, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            up += tl.load(bias + N + column, mask=ok, other=0.0).to(tl.float32)
        sums = sums / (1.0 + tl.exp(-sums)) * up
    if RESIDUAL:
        sums += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["M"])  # one binary for all widths
def _dot(
    x, q, scale, zero, bias, residual, out, partial, M, N, K, steps,
    BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr, DOT_TYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Programs (blocks of M, blocks of N, splits). See `_tile_sums`; partial is float32 [SPLITS, M, N or 2 N]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    per_split = tl.cdiv(steps, SPLITS)
    first = split * per_split
    last = tl.minimum(first + per_split, steps)
    row_ok = rows < N
    sums = _tile_sums(
        x, q, scale, zero, rows, row_ok, m, first, last, M, K,
        BITS, MODE, GROUP, GROUPS, BLOCK_N, BLOCK_M, WEIGHT_TYPE, DOT_TYPE, PTX,
    )  # fmt: skip
    up = sums
    if GATED:
        up = _tile_sums(
            x, q, scale, zero, rows + N, row_ok, m, first, last, M, K,
            BITS, MODE, GROUP, GROUPS, BLOCK_N, BLOCK_M, WEIGHT_TYPE, DOT_TYPE, PTX,
        )  # fmt: skip
    ok = row_ok[:, None] & (m < M)[None, :]
    if SPLITS == 1:
        at = m[None, :].to(tl.int64) * N + rows[:, None]
        column = tl.broadcast_to(rows[:, None], (BLOCK_N, BLOCK_M))
        sums = _ended(sums, up, at, column, ok, bias, residual, N, GATED, BIAS, RESIDUAL)
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=ok)
    else:
        wide = N * 2 if GATED else N
        at = (split * M + m[None, :]).to(tl.int64) * wide + rows[:, None]
        tl.store(partial + at, sums, mask=ok)
        if GATED:
            tl.store(partial + at + N, up, mask=ok)


@triton.jit
def _row_sums(
    x, q, scale, zero, rows, row_ok, first, last, K,
    BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """W x over steps first..last for one row x: float32 [BLOCK_N]. Scales multiply the sums of groups."""
    HALF: tl.constexpr = GROUP // 2 if BITS == 4 else GROUP
    count = K // GROUP
    sums = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    for step in range(first, last):
        group = step * GROUPS + tl.arange(0, GROUPS)
        ok = row_ok[:, None] & (group < count)[None, :]
        lane = tl.arange(0, HALF)
        at = rows[:, None, None].to(tl.int64) * (count * HALF) + (group[:, None] * HALF + lane[None, :])[None, :, :]
        stored = tl.load(q + at, mask=ok[:, :, None], other=0)
        scale_at = rows[:, None].to(tl.int64) * count + group[None, :]
        factor = tl.load(scale + scale_at, mask=ok, other=0.0).to(tl.float32)
        offset = factor
        if MODE != 0:
            offset = tl.load(zero + scale_at, mask=ok, other=0).to(tl.float32)
        x_at = x + group[:, None] * GROUP + lane[None, :]
        x_ok = (group < count)[:, None]
        low_x = tl.load(x_at, mask=x_ok, other=0.0).to(tl.float32)
        if BITS == 4:
            low, high = raised_nibbles(stored, tl.float32, PTX)
        else:
            low = raised_bytes(stored, tl.float32, PTX)
        products = lowered(low, offset[:, :, None], BITS, MODE, tl.float32) * low_x[None, :, :]
        added_x = low_x
        if BITS == 4:
            high_x = tl.load(x_at + HALF, mask=x_ok, other=0.0).to(tl.float32)
            products += lowered(high, offset[:, :, None], BITS, MODE, tl.float32) * high_x[None, :, :]
            added_x += high_x
        sums += tl.sum(products, axis=2) * factor
        if MODE == 2:
            sums += offset * tl.sum(added_x, axis=1)[None, :]
    return tl.sum(sums, axis=1)


@triton.jit
def _vector(
    x, q, scale, zero, bias, residual, out, partial, N, K, steps,
    BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """`_dot` for a single row: programs (blocks of N, splits); partial is float32 [SPLITS, N or 2 N]."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    per_split = tl.cdiv(steps, SPLITS)
    first = split * per_split
    last = tl.minimum(first + per_split, steps)
    ok = rows < N
    sums = _row_sums(x, q, scale, zero, rows, ok, first, last, K, BITS, MODE, GROUP, GROUPS, BLOCK_N, PTX)
    up = sums
    if GATED:
        up = _row_sums(x, q, scale, zero, rows + N, ok, first, last, K, BITS, MODE, GROUP, GROUPS, BLOCK_N, PTX)
    if SPLITS == 1:
        sums = _ended(sums, up, rows, rows, ok, bias, residual, N, GATED, BIAS, RESIDUAL)
        tl.store(out + rows, sums.to(out.dtype.element_ty), mask=ok)
    else:
        wide = N * 2 if GATED else N
        tl.store(partial + split * wide + rows, sums, mask=ok)
        if GATED:
            tl.store(partial + split * wide + N + rows, up, mask=ok)


@triton.jit(do_not_specialize=["M"])
def _finish(
    partial, bias, residual, out, M, N,
    GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add partial sums in the order of the splits, then the end. Programs (rows of x, blocks of N)."""
    m = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < N
    wide = N * 2 if GATED else N
    sums = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        at = partial + (split * M + m).to(tl.int64) * wide + column
        sums += tl.load(at, mask=ok, other=0.0)
        if GATED:
            up += tl.load(at + N, mask=ok, other=0.0)
    at = m.to(tl.int64) * N + column
    sums = _ended(sums, up, at, column, ok, bias, residual, N, GATED, BIAS, RESIDUAL)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=ok)


def linear(
    x: Tensor,
    weight: QuantisedTorch | Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    same_bits: bool = True,
    prompt: bool = False,
) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias and residual; gated: silu(first half) * second half, [M, N/2].

    same_bits: a row's result is the same for every M. Without it a single row of x may take the vector kernel. prompt:
    more than 16 rows take tiles of 64, which are cut otherwise.
    """
    x = x.contiguous()
    columns = weight.shape[0]
    outputs = columns // 2 if gated else columns
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    if x.shape[0] == 1 and not same_bits and isinstance(weight, QuantisedTorch):
        _launch_vector(x, weight, bias, residual, out, gated)
    else:
        _launch_dot(x, weight, bias, residual, out, gated, narrow=not prompt or x.shape[0] <= NARROW_ROWS)
    return out


def _launch_dot(
    x: Tensor,
    weight: QuantisedTorch | Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool,
    *,
    narrow: bool,
) -> None:
    (rows, inner), outputs = x.shape, out.shape[1]
    q, scale, zero, bits, group, mode = _parts(weight)
    config = tuning.of(x.device).dot if narrow else tuning.of(x.device).wide
    block_m = NARROW_ROWS if narrow else WIDE_ROWS
    block_n = config.block_n
    groups = max(1, config.block_k // group)
    steps = triton.cdiv(triton.cdiv(inner, group), groups)
    blocks = triton.cdiv(outputs, block_n)
    splits = tuning.splits(blocks, steps, config.programs) if narrow else 1
    partial = _workspace(x, splits, rows, outputs, gated)
    # A float16 product of scale and number is exact enough; bfloat16 would round the scale itself.
    half = x.dtype == torch.float16 and (scale is q or scale.dtype == torch.float16)
    _dot[(triton.cdiv(rows, block_m), blocks, splits)](
        x, q, scale, zero, pad_of(bias, x), pad_of(residual, x), out, partial, rows, outputs, inner, steps,
        BITS=bits, MODE=mode, GROUP=group, GROUPS=groups, GATED=gated, BIAS=bias is not None,
        RESIDUAL=residual is not None, SPLITS=splits, BLOCK_N=block_n, BLOCK_M=block_m,
        WEIGHT_TYPE=tl.float16 if half else tl.float32, DOT_TYPE=dot_type(x.dtype), PTX=not INTERPRETED,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    _end(partial, bias, residual, out, gated, splits)


def _launch_vector(
    x: Tensor, weight: QuantisedTorch, bias: Tensor | None, residual: Tensor | None, out: Tensor, gated: bool
) -> None:
    inner, outputs = x.shape[1], out.shape[1]
    q, scale, zero, bits, group, mode = _parts(weight)
    config = tuning.of(x.device).vector
    groups = max(1, config.block_k // group)
    steps = triton.cdiv(inner // group, groups)
    blocks = triton.cdiv(outputs, config.block_n)
    splits = tuning.splits(blocks, steps, config.programs)
    partial = _workspace(x, splits, 1, outputs, gated)
    _vector[(blocks, splits)](
        x, q, scale, zero, pad_of(bias, x), pad_of(residual, x), out, partial, outputs, inner, steps,
        BITS=bits, MODE=mode, GROUP=group, GROUPS=groups, GATED=gated, BIAS=bias is not None,
        RESIDUAL=residual is not None, SPLITS=splits, BLOCK_N=config.block_n, PTX=not INTERPRETED,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    _end(partial, bias, residual, out, gated, splits)


def _end(partial: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, gated: bool, splits: int) -> None:
    if splits == 1:
        return
    rows, outputs = out.shape
    _finish[(rows, triton.cdiv(outputs, FINISH_BLOCK))](
        partial, pad_of(bias, out), pad_of(residual, out), out, rows, outputs,
        GATED=gated, BIAS=bias is not None, RESIDUAL=residual is not None, SPLITS=splits, BLOCK=FINISH_BLOCK,
    )  # fmt: skip


def _workspace(x: Tensor, splits: int, rows: int, outputs: int, gated: bool) -> Tensor:
    """Room for partial sums; a placeholder if there is one split."""
    if splits == 1:
        return x
    return torch.empty((splits, rows, outputs * (2 if gated else 1)), dtype=torch.float32, device=x.device)


def _parts(weight: QuantisedTorch | Tensor) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    """(q, scale, zero or shift, bits, group, mode); what a weight does not have is q again, never looked at."""
    if isinstance(weight, QuantisedTorch):
        extra = weight.zero if weight.zero is not None else weight.shift
        mode = MODES[weight.mode]
        return weight.q, weight.scale, weight.q if extra is None else extra, weight.bits, weight.group, mode
    plain = weight.contiguous()
    return plain, plain, plain, plain.element_size() * 8, FLOAT_GROUP, 0
