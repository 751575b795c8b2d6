"""Keys and values in blocks: what a layer's kernels get to know of them, and the torch references that work on them.

Rows of a step belong to S sequences of W tokens each: row r is token r % W of sequence r // W, at position
starts[r // W] + r % W. Everything that changes from step to step lies in tensors, so that one captured graph serves
every sequence and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.kernels import reference

ALIGNED = 16  # elements: kernels read keys and values 16 bytes and more at a time


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Keys and values of one layer.

    keys, values: per slab [blocks, kv_heads, block, head_dim]. blocks: int64 [S, most blocks of a sequence], numbers
    over all slabs. distances: the same in elements from the first slab's first block, each a multiple of `ALIGNED`;
    this is how kernels address. starts: int64 [S], positions that each sequence holds before the step.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    blocks: Tensor
    distances: Tensor
    starts: Tensor

    @property
    def block(self) -> int:
        """Positions of a block."""
        return self.keys[0].shape[2]

    @property
    def kv_heads(self) -> int:
        return self.keys[0].shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys[0].shape[3]

    def positions(self, width: int) -> Tensor:
        """int64 [S * width] of the rows of a step."""
        steps = torch.arange(width, device=self.starts.device)
        return (self.starts[:, None] + steps).view(-1)

    def places(self, width: int) -> tuple[Tensor, Tensor]:
        """Block number and place in the block of each row: int64 [S * width] each."""
        positions = self.positions(width).view(-1, width)
        return self.blocks.gather(1, positions // self.block).view(-1), (positions % self.block).view(-1)


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
    """Rotate queries and keys, write keys and values into their blocks: returns q [S * width, heads, head_dim].

    qkv [S * width, (heads + 2 kv_heads) * head_dim]; cos, sin float32 [positions, head_dim / 2]. The halves of a head
    are the two coordinates of each pair ("neox"). norms: (q weight [head_dim], k weight [head_dim], eps) of a norm of
    each head before the rotation (Qwen3).
    """
    parts = qkv.view(qkv.shape[0], heads + 2 * kv.kv_heads, -1)
    q, k, v = parts.split((heads, kv.kv_heads, kv.kv_heads), dim=1)
    if norms is not None:
        q, k = (reference.rms_norm(part, weight, norms[2])[0] for part, weight in ((q, norms[0]), (k, norms[1])))
    positions = kv.positions(width)
    q, k = (reference.rotated(part, cos[positions], sin[positions]) for part in (q, k))
    blocks, places = kv.places(width)
    for slabs, new in ((kv.keys, k), (kv.values, v)):
        for index, slab in enumerate(slabs):
            own = blocks - index * slab.shape[0]
            inside = (own >= 0) & (own < slab.shape[0])
            # Rows of other slabs write back what stands there: shapes must not depend on values.
            at, kept = own.clamp(0, slab.shape[0] - 1), inside[:, None, None]
            if len(slabs) == 1:
                slab[at, :, places] = new.to(slab.dtype)
            else:
                for row in range(len(at)):  # one by one: two rows may fall on one place of a foreign slab
                    one = slice(row, row + 1)  # a plain index would be read on the host
                    old = slab[at[one], :, places[one]]
                    slab[at[one], :, places[one]] = torch.where(kept[one], new[one].to(slab.dtype), old)
    return q


def attention(q: Tensor, kv: PagedLayer, width: int, window: int | None = None, *, span: int | None = None) -> Tensor:
    """Attention of q [S * width, heads, head_dim] over each row's own sequence: [S * width, heads * head_dim].

    A row sees the positions up to its own, of the last `window` if that is given. span: no sequence is longer after the
    step, where the host knows that (a prompt's piece, any number of rows); None in a captured step of up to 16 rows.
    """
    keys = kv.keys[0] if len(kv.keys) == 1 else torch.cat(kv.keys)
    values = kv.values[0] if len(kv.values) == 1 else torch.cat(kv.values)
    blocks = kv.blocks if span is None else kv.blocks[:, : -(-span // kv.block)]
    length, positions = blocks.shape[1] * kv.block, kv.positions(width)
    results = []
    for sequence in range(blocks.shape[0]):
        rows = slice(sequence * width, (sequence + 1) * width)
        k, v = (pool[blocks[sequence]].transpose(0, 1).reshape(kv.kv_heads, length, -1) for pool in (keys, values))
        results.append(reference.attention(q[rows], k, v, positions[rows], length, window))
    return torch.cat(results)


def attention_bytes(rows: int, span: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """At most what `attention` of a sequence works in: `rows` that see up to `span` positions of `itemsize` bytes."""
    copies = 6 * itemsize + 3 * 4  # slabs joined, the sequence's own blocks, in float32
    return span * (kv_heads * head_dim * copies + heads * reference.ROWS * 5 * 4 + 4 * rows)


def move_blocks(slabs: Sequence[Tensor], moves: Tensor) -> None:
    """Carry blocks to other places of their slabs, keys and values of every layer, in the order of `moves`.

    slabs: each [2, layers, blocks, ...], any numbers. moves int64 [n, 4]: a block's number and its new one, its
    distance and its new one (see `PagedLayer`; elements from the first slab's first block). As if one after the other:
    a block may be filled after it was read.
    """
    count = slabs[0].shape[2]
    for move in moves:
        old, new = move[:1], move[1:2]
        carried = slabs[0].index_select(2, old.clamp(max=count - 1))
        for index, slab in enumerate(slabs[1:], 1):  # shapes must not depend on values: the last that has it wins
            at = old - index * count
            carried = torch.where(at >= 0, slab.index_select(2, at.clamp(0, count - 1)), carried)
        for index, slab in enumerate(slabs):
            at = new - index * count
            inside, at = (at >= 0) & (at < count), at.clamp(0, count - 1)
            slab.index_copy_(2, at, torch.where(inside, carried, slab.index_select(2, at)))


def remap(tables: Tensor, moves: Tensor) -> Tensor:
    """Give blocks in `tables` int64 [rows, 2 (numbers, distances), n] the names they have after `moves`, in place.

    moves: see `move_blocks`. Returns tables.
    """
    numbers, distances = tables.unbind(1)
    for move in moves:
        hit = numbers == move[0]
        numbers.copy_(torch.where(hit, move[1], numbers))
        distances.copy_(torch.where(hit, move[3], distances))
    return tables
