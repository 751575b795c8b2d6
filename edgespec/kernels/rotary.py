"""Rotary embedding of queries and keys, with the keys and values written into their static buffers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgespec.kernels.types import pad_of


@triton.jit
def _rotary_and_write(
    qkv, cos, sin, positions, q_weight, k_weight, q_out, keys, values, capacity, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Programs (rows, heads of q then k then v), a head of WIDTH numbers each; HALF: power of two >= WIDTH / 2."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
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
        angle = tl.maximum(position, 0) * (WIDTH // 2) + lane
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
        place = (kv_head.to(tl.int64) * capacity + position) * WIDTH + lane
        inside = ok & (position >= 0) & (position < capacity)
        key_ok, value_ok = inside & is_key, inside & (head >= HEADS + KV_HEADS)
        tl.store(keys + place, first.to(keys.dtype.element_ty), mask=key_ok)
        tl.store(keys + place + WIDTH // 2, second.to(keys.dtype.element_ty), mask=key_ok)
        tl.store(values + place, first.to(values.dtype.element_ty), mask=value_ok)
        tl.store(values + place + WIDTH // 2, second.to(values.dtype.element_ty), mask=value_ok)


def rotary_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    kv_heads: int,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """See `reference.rotary_and_write`. A position beyond the buffers is not written."""
    qkv = qkv.contiguous()
    rows, (_, capacity, width) = qkv.shape[0], keys.shape
    q = torch.empty((rows, heads, width), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = (qkv, qkv, 0.0) if norms is None else norms
    _rotary_and_write[(rows, heads + 2 * kv_heads)](
        qkv, cos, sin, positions, pad_of(q_weight, qkv), pad_of(k_weight, qkv), q, keys, values, capacity, eps,
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, HALF=triton.next_power_of_2(width // 2),
        NORMED=norms is not None, num_warps=1,
    )  # fmt: skip
    return q
