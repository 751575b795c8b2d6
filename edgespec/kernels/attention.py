"""Attention of a few queries over keys and values in blocks, split over the context.

The split kernel's programs each take `chunk` positions of one key head of one sequence, for the queries of all heads
that share it; `_merge` joins the chunks that a row sees, in order (the split softmax of Flash-Decoding). Chunks begin
at multiples of `chunk` whatever the lengths are, and a tile of positions that a row does not see changes nothing of it:
so a row's bits depend neither on how long the table is, nor on how many rows come with it. Lengths are read on the
device and the grid covers the whole table: one captured graph serves every length, programs without a position to look
at end at once.

A prompt's piece (`span` given) takes the same kernel in taller tiles of rows and with a single chunk. There are enough
programs then without a split, and the partial results of hundreds of rows would take more memory than the keys. torch's
own product was the alternative; it needs keys and values of the whole context gathered and, with a window, a mask of
rows times span, for each layer.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgespec.kernels import tuning
from edgespec.kernels.paged import PagedLayer
from edgespec.kernels.types import dot_type

TILE = 16  # rows of a product on the tensor cores
TALL = 64  # rows of a tile of a prompt's piece, in half precision


@triton.jit(do_not_specialize=["steps", "most", "chunk_size", "row_blocks", "window", "total"])
def _chunk(
    q, keys, values, distances, starts, sums, peaks, weights, steps, most, chunk_size, row_blocks, window, total, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WINDOWED: tl.constexpr, DOT_TYPE: tl.constexpr,
):  # fmt: skip
    """Programs (chunks, sequences x key heads x row blocks). Rows of a tile are (token, head of the group).

    steps: tokens of a sequence. most: blocks in a row of `distances`. chunk_size: a multiple of BLOCK, which divides
    PAGE. total: rows times HEADS. Writes sums float32 [chunks, total, WIDTH], peaks and weights [chunks, total]: the
    weighted values, the largest score and the sum of exp(score - peak). A chunk that no row of the tile sees is not
    written.
    """
    chunk = tl.program_id(0)
    tile = tl.program_id(1) % row_blocks
    kv_head = (tl.program_id(1) // row_blocks) % (HEADS // GROUP)
    sequence = tl.program_id(1) // (row_blocks * (HEADS // GROUP))
    start = tl.load(starts + sequence).to(tl.int32)
    row = tile * ROWS + tl.arange(0, ROWS)
    row_ok = row < steps * GROUP
    token = row // GROUP
    head_row = (sequence * steps + token) * HEADS + kv_head * GROUP + row % GROUP
    position = tl.where(row_ok, start + token, -1)
    begin = chunk * chunk_size
    end = tl.minimum(tl.minimum(begin + chunk_size, most * PAGE), tl.max(position, axis=0) + 1)
    if WINDOWED:  # whole tiles before every row's window are passed over
        earliest = start + (tile * ROWS) // GROUP - window + 1
        begin += tl.minimum(tl.maximum(earliest - begin, 0), chunk_size) // BLOCK * BLOCK
    if begin < end:
        lane = tl.arange(0, PADDED)
        lane_ok = lane < WIDTH
        q_ok = row_ok[:, None] & lane_ok[None, :]
        rows = tl.load(q + head_row[:, None].to(tl.int64) * WIDTH + lane[None, :], mask=q_ok, other=0.0).to(DOT_TYPE)
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, PADDED), tl.float32)
        for at in range(begin, end, BLOCK):
            place = at + tl.arange(0, BLOCK)
            there = place < end
            # Blocks begin at multiples of 16 elements (`ops` checks it); not knowing that, loads would be narrow.
            block = tl.multiple_of(tl.load(distances + sequence * most + at // PAGE), 16)
            inside = kv_head * (PAGE * WIDTH) + (at % PAGE + tl.arange(0, BLOCK))[:, None] * WIDTH + lane[None, :]
            kv_ok = there[:, None] & lane_ok[None, :]
            k = tl.load(keys + block + inside, mask=kv_ok, other=0.0).to(DOT_TYPE)
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
            v = tl.load(values + block + inside, mask=kv_ok, other=0.0).to(DOT_TYPE)
            weight = weight * kept + tl.sum(part, axis=1)
            acc = tl.dot(part.to(DOT_TYPE), v, acc * kept[:, None], input_precision="ieee")
            peak = highest
        out_row = chunk.to(tl.int64) * total + head_row
        tl.store(sums + out_row[:, None] * WIDTH + lane[None, :], acc, mask=q_ok)
        tl.store(peaks + out_row, peak, mask=row_ok)
        tl.store(weights + out_row, weight, mask=row_ok)


@triton.jit(do_not_specialize=["steps", "limit", "chunk_size", "window", "total"])
def _merge(
    sums, peaks, weights, starts, out, steps, limit, chunk_size, window, total,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Join the chunks that a row of `_chunk`'s results sees, first to last; others may be unset. Programs (total)."""
    row = tl.program_id(0)
    token = row // HEADS
    position = tl.load(starts + token // steps).to(tl.int32) + token % steps
    lane = tl.arange(0, PADDED)
    ok = lane < WIDTH
    peak = tl.full((1,), float("-inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    acc = tl.zeros((PADDED,), tl.float32)
    last = tl.cdiv(tl.minimum(position + 1, limit), chunk_size)
    first = 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // chunk_size
    for chunk in range(first, last):
        at = (chunk * total + row).to(tl.int64) + tl.arange(0, 1)
        other = tl.load(peaks + at)
        highest = tl.maximum(peak, other)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        kept, gained = tl.exp(peak - level), tl.exp(other - level)
        weight = weight * kept + tl.load(weights + at) * gained
        acc = acc * kept + tl.load(sums + at * WIDTH + lane, mask=ok, other=0.0) * gained
        peak = highest
    acc = tl.where(weight > 0.0, acc / weight, 0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + lane, acc.to(out.dtype.element_ty), mask=ok)


def attention(q: Tensor, kv: PagedLayer, width: int, window: int | None = None, *, span: int | None = None) -> Tensor:
    """See `paged.attention`."""
    q = q.contiguous()
    rows, heads, head_dim = q.shape
    config, most = tuning.of(q.device).attention, kv.distances.shape[1]
    group, sequences = heads // kv.kv_heads, rows // width
    limit = most * kv.block if span is None else min(most * kv.block, span)
    split = span is None
    chunk = config.chunk if split else most * kv.block
    tile = TILE if split or q.dtype == torch.float32 else TALL
    row_blocks, chunks = triton.cdiv(width * group, tile), triton.cdiv(limit, chunk)
    sums = torch.empty((chunks, rows * heads, head_dim), dtype=torch.float32, device=q.device)
    peaks, weights = torch.empty((2, chunks, rows * heads), dtype=torch.float32, device=q.device).unbind()
    padded = max(16, triton.next_power_of_2(head_dim))
    _chunk[(chunks, sequences * kv.kv_heads * row_blocks)](
        q, kv.keys[0], kv.values[0], kv.distances.contiguous(), kv.starts, sums, peaks, weights, width, most, chunk,
        row_blocks, window or 0, rows * heads, head_dim**-0.5,
        HEADS=heads, GROUP=group, WIDTH=head_dim, PADDED=padded, PAGE=kv.block, BLOCK=math.gcd(config.block, kv.block),
        ROWS=tile, WINDOWED=window is not None, DOT_TYPE=dot_type(q.dtype), num_warps=max(config.warps, tile // 8),
        num_stages=config.stages,
    )  # fmt: skip
    out = torch.empty((rows, heads * head_dim), dtype=q.dtype, device=q.device)
    _merge[(rows * heads,)](
        sums, peaks, weights, kv.starts, out, width, limit, chunk, window or 0, rows * heads,
        HEADS=heads, WIDTH=head_dim, PADDED=padded, WINDOWED=window is not None, num_warps=1,
    )  # fmt: skip
    return out
