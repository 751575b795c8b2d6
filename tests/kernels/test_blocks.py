"""Moving blocks between slabs, and renaming them in tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec.bench.gpu_check.random_models import TINY
from edgespec.kernels import ops
from edgespec.models.cuda import kv
from edgespec.models.cuda.kv import PagedCache, PagedPool, Tables
from edgespec.models.cuda.staging import Staging
from tests.kernels.cases import normal

# Of 12 blocks. Some chain: a block is read, then filled, then read again; one stays where it is.
MOVES = [(6, 1), (5, 6), (1, 5), (4, 4), (11, 0), (2, 11), (11, 8)]
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def slabs_of(layers: int, *block: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Three of four blocks; the first one lies behind the others, and every second block of each is NaN."""
    whole = (normal(1, 3, 2, layers, 4, *block) * 50).to(dtype).to(device)
    if dtype.is_floating_point:
        whole[:, :, :, ::2] = float("nan")
    return whole.unbind(0)[::-1]


def moves_of(slabs: Sequence[Tensor], names: Sequence[tuple[int, int]]) -> Tensor:
    def distance(number: int) -> int:
        slab, place = divmod(number, slabs[0].shape[2])
        apart = slabs[slab].data_ptr() - slabs[0].data_ptr()
        return apart // slabs[0].element_size() + place * slabs[0][0, 0, 0].numel()

    rows = [(old, new, distance(old), distance(new)) for old, new in names]
    return torch.tensor(rows, dtype=torch.int64, device=slabs[0].device).view(-1, 4)


def bits(slabs: Sequence[Tensor]) -> list[Tensor]:
    """Of every block, in the order of their numbers."""
    words = [slab.view(WORDS[slab.element_size()]) for slab in slabs]
    return [slab[:, :, place].clone() for slab in words for place in range(slab.shape[2])]


@pytest.mark.parametrize("side", ["triton", "torch"])
@pytest.mark.parametrize(
    ("layers", "block", "dtype"),
    [
        (1, (1, 16, 1), torch.float32),
        (7, (3, 16, 24), torch.float16),  # more than one program, and not a multiple
        (36, (2, 64, 16), torch.bfloat16),
        (2, (2, 16, 80), torch.float32),
        (3, (16, 3), torch.int8),
    ],
)
def test_moves_happen_in_their_order_in_all_layers(
    side: Any, layers: int, block: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    ops.use(side)
    slabs = slabs_of(layers, *block, dtype=dtype, device=device)
    moves = moves_of(slabs, MOVES)
    assert (moves < 0).any()
    expected = bits(slabs)
    for old, new in MOVES:
        expected[new] = expected[old]
    ops.move_blocks(slabs, moves)
    assert all(torch.equal(*pair) for pair in zip(bits(slabs), expected))
    ops.move_blocks(slabs, moves[:0])
    assert all(torch.equal(*pair) for pair in zip(bits(slabs), expected))


@pytest.mark.parametrize("side", ["triton", "torch"])
@pytest.mark.parametrize("entries", [1, 5, 1500])
def test_tables_have_the_new_names(side: Any, entries: int, device: torch.device) -> None:
    ops.use(side)
    names = [entry % 12 for entry in range(entries)]
    rows = [[names, [1000 + name for name in names]], [names[::-1], [1000 + name for name in names[::-1]]]]
    tables = torch.tensor(rows, device=device)
    moves = torch.tensor([(old, new, 1000 + old, 1000 + new) for old, new in MOVES], device=device)
    found = {}
    for name in range(12):
        at = name
        for old, new in MOVES:
            at = new if at == old else at
        found[name] = at
    assert ops.remap(tables, moves) is tables
    assert tables[0, 0].tolist() == [found[name] for name in names]
    assert tables[1, 0].tolist() == [found[name] for name in names[::-1]]
    assert torch.equal(tables[:, 1], tables[:, 0] + 1000)


@pytest.mark.parametrize("side", ["triton", "torch"])
def test_rows_find_the_same_keys_and_values_after_a_compaction(
    side: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over slabs that are allocations of their own, in several launches."""
    ops.use(side)
    monkeypatch.setattr(kv, "SLAB_POSITIONS", 192)
    monkeypatch.setattr(kv, "MOVES", 1)
    pool = PagedPool(TINY, device, torch.float16, positions=512)
    tables = Tables(3, 512, pool, device, Staging(device, 4096))
    gone, *caches = (PagedCache(None, pool, 512, 1) for _ in range(4))
    for length in range(64, 257, 64):  # in turns
        for cache in (gone, *caches):
            cache.reserve(length)
    for slab in pool.slabs:
        slab.copy_(normal(7, *slab.shape))

    def rows() -> list[Tensor]:
        at = tables.place(caches)
        numbers = tables.blocks[at].cpu()
        assert tables.distances[at].tolist() == [[pool.distance(int(name)) for name in row] for row in numbers]
        every = torch.cat(tuple(pool.slabs), dim=2)
        return [every[:, :, row[:4]] for row in numbers]

    before, slabs = rows(), len(pool.slabs)
    gone.release()
    monkeypatch.setattr(Tables, "_write", lambda *_: pytest.fail("a row was written by the host"))
    assert tables.compact()
    assert pool.trim() > 0
    assert len(pool.slabs) == 5 < slabs  # the scratch block and three times four, three in a slab
    assert all(torch.equal(*pair) for pair in zip(rows(), before))


def test_what_cannot_be_moved_is_refused() -> None:
    slab, moves = torch.zeros(2, 3, 4, 1, 16, 2), torch.zeros(3, 4, dtype=torch.int64)
    tables = torch.zeros(4, 2, 9, dtype=torch.int64)
    for message, call in (
        ("moves", lambda: ops.move_blocks((slab,), moves[:, :2])),
        ("moves", lambda: ops.remap(tables, moves[0])),
        ("one shape", lambda: ops.move_blocks((slab, slab[:, :2]), moves)),
        ("in one piece", lambda: ops.move_blocks((slab.transpose(0, 1),), moves)),
        ("multiple of 16", lambda: ops.move_blocks((slab[..., :1, :1].contiguous(),), moves)),
        ("in one piece", lambda: ops.remap(tables[:, :, ::2], moves)),
        ("rows of numbers", lambda: ops.remap(tables[0], moves)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
