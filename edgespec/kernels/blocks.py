"""Moving blocks of keys and values to other places of their slabs, and renaming them in the tables that say where."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bits are carried, whatever they mean


@triton.jit(do_not_specialize=["count"])
def _move(slab, moves, count, apart, width, SIZE: tl.constexpr):
    """Programs (columns, planes: keys or values of one layer). apart: elements from plane to plane of a slab.

    A program carries its columns of all blocks, move by move, so the order of moves holds without waiting for others.
    The same thread writes what it reads at the same columns; the barrier keeps that true whatever layout the compiler
    picks for either.
    """
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = column < width
    plane = slab + tl.program_id(1).to(tl.int64) * apart
    for move in range(count):
        # Blocks begin at multiples of 16 elements (`PagedPool.distance`); not knowing that, loads would be narrow.
        old = tl.multiple_of(tl.load(moves + move * 4 + 2), 16)
        new = tl.multiple_of(tl.load(moves + move * 4 + 3), 16)
        carried = tl.load(plane + old + column, mask=ok, other=0)
        tl.store(plane + new + column, carried, mask=ok)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["count", "entries"])
def _remap(tables, moves, count, entries, SIZE: tl.constexpr):
    """Programs (rows, entries). A row of the tables is its numbers, then its distances."""
    entry = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    ok = entry < entries
    numbers = tables + tl.program_id(0).to(tl.int64) * (2 * entries) + entry
    distances = numbers + entries
    number = tl.load(numbers, mask=ok, other=-1)
    distance = tl.load(distances, mask=ok, other=0)
    for move in range(count):
        hit = number == tl.load(moves + move * 4)
        number = tl.where(hit, tl.load(moves + move * 4 + 1), number)
        distance = tl.where(hit, tl.load(moves + move * 4 + 3), distance)
    tl.store(numbers, number, mask=ok)
    tl.store(distances, distance, mask=ok)


def move_blocks(slabs: Sequence[Tensor], moves: Tensor) -> None:
    """See `paged.move_blocks`."""
    first = slabs[0]
    words = first.view(_WORDS[first.element_size()])
    width, planes = words.stride(2), first.shape[0] * first.shape[1]
    grid = (triton.cdiv(width, BLOCK), planes)
    _move[grid](words, moves.contiguous(), len(moves), words.stride(1), width, SIZE=BLOCK)


def remap(tables: Tensor, moves: Tensor) -> Tensor:
    """See `paged.remap`."""
    rows, _, entries = tables.shape
    _remap[(rows, triton.cdiv(entries, BLOCK))](tables, moves.contiguous(), len(moves), entries, SIZE=BLOCK)
    return tables
