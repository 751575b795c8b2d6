"""Moving blocks of keys and values within their pool, and renaming them in tables."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _move(pool, moves, count, width, SIZE: tl.constexpr):
    """A program carries its columns of all blocks, move by move, so the order of moves holds without waiting.

    The same thread writes what it reads at the same columns; the barrier keeps that true whatever layout the compiler
    picks for either.
    """
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = column < width
    for move in range(count):
        source = tl.load(moves + move * 2)
        target = tl.load(moves + move * 2 + 1)
        valid = ok & (source >= 0) & (target >= 0)
        carried = tl.load(pool + source * width + column, mask=valid, other=0)
        tl.store(pool + target * width + column, carried, mask=valid)
        tl.debug_barrier()


@triton.jit
def _remap(tables, mapping, count, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = at < count
    block = tl.load(tables + at, mask=ok, other=-1)
    renamed = tl.load(mapping + block, mask=ok & (block >= 0), other=0).to(block.dtype)
    tl.store(tables + at, tl.where(block >= 0, renamed, block), mask=ok)


def move_blocks(pool: Tensor, moves: Tensor) -> Tensor:
    """See `reference.move_blocks`: pool [blocks, ...] contiguous, moves int64 [n, 2]."""
    flat = pool.view(pool.shape[0], -1)
    nbytes = flat.shape[1] * flat.element_size()
    words = flat.view(torch.int32 if nbytes % 4 == 0 else torch.uint8)
    width = words.shape[1]
    _move[(triton.cdiv(width, BLOCK),)](words, moves.contiguous(), moves.shape[0], width, SIZE=BLOCK)
    return pool


def remap(tables: Tensor, mapping: Tensor) -> Tensor:
    """See `reference.remap`: tables of any shape, contiguous; mapping [blocks]."""
    count = tables.numel()
    _remap[(triton.cdiv(count, BLOCK),)](tables, mapping.contiguous(), count, SIZE=BLOCK)
    return tables
