"""Rotary embedding of queries and keys, with the keys and values written into their blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgespec.kernels.paged import PagedLayer
from edgespec.kernels.types import pad_of


@triton.jit(do_not_specialize=["steps", "most"])
def _rotary_and_write(
    qkv, cos, sin, distances, starts, q_weight, k_weight, q_out, keys, values, steps, most, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Programs (rows, heads of q then k then v), a head of WIDTH numbers each; HALF: power of two >= WIDTH / 2.

    Rows are sequences of `steps` tokens; distances has `most` blocks of PAGE positions for each.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    sequence = row // steps
    position = tl.load(starts + sequence) + row % steps
    lane = tl.arange(0, HALF)
    ok = lane < WIDTH // 2
    at = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * WIDTH + lane
    first = tl.load(at, mask=ok, other=0.0)
    second = tl.load(at + WIDTH // 2, mask=ok, other=0.0)
    if head < HEADS + KV_HEADS:
        one, two = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            weight = q_weight if head < HEADS else k_weight
            scale = tl.rsqrt((tl.sum(one * one, axis=0) + tl.sum(two * two, axis=0)) / WIDTH + eps)
            one = one * scale * tl.load(weight + lane, mask=ok, other=0.0).to(tl.float32)
            two = two * scale * tl.load(weight + WIDTH // 2 + lane, mask=ok, other=0.0).to(tl.float32)
        angle = position * (WIDTH // 2) + lane
        c = tl.load(cos + angle, mask=ok, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=ok, other=0.0).to(tl.float32)
        first = (one * c - two * s).to(first.dtype)
        second = (two * c + one * s).to(second.dtype)
    if head < HEADS:
        out = q_out + (row * HEADS + head) * WIDTH + lane
        tl.store(out, first, mask=ok)
        tl.store(out + WIDTH // 2, second, mask=ok)
    else:
        is_key = head < HEADS + KV_HEADS
        kv_head = tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
        page = position // PAGE
        inside = page < most
        block = tl.load(distances + sequence * most + page, mask=inside, other=0)
        place = block + (kv_head.to(tl.int64) * PAGE + position % PAGE) * WIDTH + lane
        key_ok, value_ok = ok & inside & is_key, ok & inside & (head >= HEADS + KV_HEADS)
        tl.store(keys + place, first.to(keys.dtype.element_ty), mask=key_ok)
        tl.store(keys + place + WIDTH // 2, second.to(keys.dtype.element_ty), mask=key_ok)
        tl.store(values + place, first.to(values.dtype.element_ty), mask=value_ok)
        tl.store(values + place + WIDTH // 2, second.to(values.dtype.element_ty), mask=value_ok)


def rotary_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: PagedLayer,
    width: int,
    heads: int,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """See `paged.rotary_and_write`. A position beyond the table is not written."""
    qkv = qkv.contiguous()
    rows, head_dim = qkv.shape[0], kv.head_dim
    q = torch.empty((rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = (qkv, qkv, 0.0) if norms is None else norms
    _rotary_and_write[(rows, heads + 2 * kv.kv_heads)](
        qkv, cos, sin, kv.distances.contiguous(), kv.starts, pad_of(q_weight, qkv), pad_of(k_weight, qkv), q,
        kv.keys[0], kv.values[0], width, kv.distances.shape[1], eps,
        HEADS=heads, KV_HEADS=kv.kv_heads, WIDTH=head_dim, HALF=triton.next_power_of_2(head_dim // 2), PAGE=kv.block,
        NORMED=norms is not None, num_warps=1,
    )  # fmt: skip
    return q
