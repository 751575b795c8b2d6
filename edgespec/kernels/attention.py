"""Attention of a few queries over static keys and values, split over the context.

The split kernel's programs each take `chunk` positions of one key head, for the queries of all heads that share it;
`_merge` joins the chunks that a row sees, in order (the split softmax of Flash-Decoding). Chunks begin at multiples of
`chunk` whatever the lengths are, and a block of positions that a row does not see changes nothing of it: so a row's
bits depend neither on `span`, nor on how many rows come with it. Lengths are read from `positions` on the device: one
captured graph serves them all, programs without a position to look at end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgespec.kernels import tuning
from edgespec.kernels.types import dot_type

TILE = 16  # rows of a product on the tensor cores


@triton.jit(do_not_specialize=["M", "span", "row_blocks", "window"])
def _chunk(
    q, keys, values, positions, sums, peaks, weights, M, span, key_stride, row_blocks, window, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WINDOWED: tl.constexpr, DOT_TYPE: tl.constexpr,
):  # fmt: skip
    """Programs (chunks, key heads x row blocks). Rows of a tile are (query, head of the group), M * GROUP in all.

    Writes sums float32 [chunks, M * HEADS, WIDTH], peaks and weights [chunks, M * HEADS]: the weighted values, the
    largest score and the sum of exp(score - peak). A chunk that no row of the tile sees is not written.
    """
    chunk = tl.program_id(0)
    kv_head = tl.program_id(1) // row_blocks
    row = (tl.program_id(1) % row_blocks) * ROWS + tl.arange(0, ROWS)
    row_ok = row < M * GROUP
    query = row // GROUP
    head_row = query * HEADS + kv_head * GROUP + row % GROUP
    position = tl.load(positions + query, mask=row_ok, other=-1).to(tl.int32)
    lane = tl.arange(0, PADDED)
    lane_ok = lane < WIDTH
    q_ok = row_ok[:, None] & lane_ok[None, :]
    begin = chunk * CHUNK
    end = tl.minimum(tl.minimum(begin + CHUNK, span), tl.max(position, axis=0) + 1)
    if WINDOWED:  # whole blocks before every row's window are passed over
        earliest = tl.min(tl.where(position >= 0, position, 2147483647), axis=0) - window + 1
        begin += tl.minimum(tl.maximum(earliest - begin, 0), CHUNK) // BLOCK * BLOCK
    if begin < end:
        rows = tl.load(q + head_row[:, None].to(tl.int64) * WIDTH + lane[None, :], mask=q_ok, other=0.0).to(DOT_TYPE)
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, PADDED), tl.float32)
        base = kv_head.to(tl.int64) * key_stride
        for start in range(begin, end, BLOCK):
            place = start + tl.arange(0, BLOCK)
            there = place < end
            kv_at = base + place[:, None].to(tl.int64) * WIDTH + lane[None, :]
            kv_ok = there[:, None] & lane_ok[None, :]
            k = tl.load(keys + kv_at, mask=kv_ok, other=0.0).to(DOT_TYPE)
            scores = tl.dot(rows, tl.trans(k), input_precision="ieee") * scale
            visible = there[None, :] & (place[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (place[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
            highest = tl.maximum(peak, tl.max(scores, axis=1))
            # A row that has seen nothing yet keeps -inf, whose differences would be NaN.
            level = tl.where(highest == float("-inf"), 0.0, highest)
            kept = tl.exp(peak - level)
            part = tl.exp(scores - level[:, None])
            v = tl.load(values + kv_at, mask=kv_ok, other=0.0).to(DOT_TYPE)
            weight = weight * kept + tl.sum(part, axis=1)
            acc = tl.dot(part.to(DOT_TYPE), v, acc * kept[:, None], input_precision="ieee")
            peak = highest
        out_row = chunk.to(tl.int64) * M * HEADS + head_row
        tl.store(sums + out_row[:, None] * WIDTH + lane[None, :], acc, mask=q_ok)
        tl.store(peaks + out_row, peak, mask=row_ok)
        tl.store(weights + out_row, weight, mask=row_ok)


@triton.jit(do_not_specialize=["rows", "span", "window"])
def _merge(
    sums, peaks, weights, positions, out, rows, span, window,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Join the chunks that a row of `_chunk`'s results sees, first to last; others may be unset. Programs (rows)."""
    row = tl.program_id(0)
    position = tl.load(positions + row // HEADS).to(tl.int32)
    lane = tl.arange(0, PADDED)
    ok = lane < WIDTH
    peak = tl.full((1,), float("-inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    acc = tl.zeros((PADDED,), tl.float32)
    last = tl.cdiv(tl.minimum(position + 1, span), CHUNK)
    first = 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // CHUNK
    for chunk in range(first, last):
        at = (chunk * rows + row).to(tl.int64) + tl.arange(0, 1)
        other = tl.load(peaks + at)
        highest = tl.maximum(peak, other)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        kept, gained = tl.exp(peak - level), tl.exp(other - level)
        weight = weight * kept + tl.load(weights + at) * gained
        acc = acc * kept + tl.load(sums + at * WIDTH + lane, mask=ok, other=0.0) * gained
        peak = highest
    acc = tl.where(weight > 0.0, acc / weight, 0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + lane, acc.to(out.dtype.element_ty), mask=ok)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, span: int, window: int | None = None
) -> Tensor:
    """See `reference.attention`. keys and values may be slices of larger buffers along their first dimension."""
    q = q.contiguous()
    rows, heads, width = q.shape
    kv_heads = keys.shape[0]
    config = tuning.of(q.device).attention
    chunks = triton.cdiv(span, config.chunk)
    group = heads // kv_heads
    row_blocks = triton.cdiv(rows * group, TILE)
    sums = torch.empty((chunks, rows * heads, width), dtype=torch.float32, device=q.device)
    peaks, weights = torch.empty((2, chunks, rows * heads), dtype=torch.float32, device=q.device).unbind()
    padded = max(16, triton.next_power_of_2(width))
    _chunk[(chunks, kv_heads * row_blocks)](
        q, keys, values, positions, sums, peaks, weights, rows, span, keys.stride(0), row_blocks, window or 0,
        width**-0.5,
        HEADS=heads, GROUP=group, WIDTH=width, PADDED=padded, CHUNK=config.chunk, BLOCK=config.block, ROWS=TILE,
        WINDOWED=window is not None, DOT_TYPE=dot_type(q.dtype), num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    out = torch.empty((rows, heads * width), dtype=q.dtype, device=q.device)
    _merge[(rows * heads,)](
        sums, peaks, weights, positions, out, rows * heads, span, window or 0,
        HEADS=heads, WIDTH=width, PADDED=padded, CHUNK=config.chunk, WINDOWED=window is not None, num_warps=1,
    )  # fmt: skip
    return out
