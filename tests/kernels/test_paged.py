"""Rotation with its writes, and attention, over keys and values in blocks: against float64."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from edgespec.kernels import ops, paged, reference
from edgespec.kernels.paged import PagedLayer
from tests.kernels.cases import HALVES, close, generator, normal, tuned

NAN = float("nan")


class Blocks(NamedTuple):
    """A paged layer whose sequences have their blocks all over the slabs, and what they hold as plain tensors."""

    kv: PagedLayer
    keys: list[Tensor]  # per sequence [kv_heads, held, head_dim]
    values: list[Tensor]


def distances_of(slabs: tuple[Tensor, ...], blocks: Tensor) -> Tensor:
    """Elements from the first slab's first block to each block."""
    first = slabs[0]
    apart = torch.tensor([(slab.data_ptr() - first.data_ptr()) // first.element_size() for slab in slabs])
    blocks = blocks.cpu()
    return apart[blocks // len(first)] + blocks % len(first) * first.stride(0)


def paged_case(
    held: tuple[int, ...], width: int, kv_heads: int, head_dim: int, *, block: int = 16, slabs: int = 2,
    spare: int = 1, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0,
) -> Blocks:  # fmt: skip
    """Sequences that hold held[i] positions, the last `width` of them those of the step; all the rest is NaN.

    Each has `spare` more entries in its table, which name one block that belongs to nobody.
    """
    needed = [-(-length // block) for length in held]
    count = -(-(sum(needed) + 1) // slabs)
    # One allocation that is cut: distances are then as the kernel needs them, also backwards.
    pools = [torch.full((2, slabs, count, kv_heads, block, head_dim), NAN, dtype=dtype, device=device) for _ in "k"]
    pieces = pools[0].unbind(1)[::-1]  # the first slab lies behind the others
    keys, values = (tuple(piece[side] for piece in pieces) for side in (0, 1))
    order = torch.randperm(slabs * count, generator=generator(seed)).tolist()
    nobody = order.pop()
    table = torch.full((len(held), max(needed) + spare), nobody)
    plain: tuple[list[Tensor], list[Tensor]] = ([], [])
    for sequence, length in enumerate(held):
        own = [order.pop() for _ in range(needed[sequence])]
        table[sequence, : len(own)] = torch.tensor(own)
        for side, (store, kept) in enumerate(zip((keys, values), plain)):
            whole = normal(seed + 10 * sequence + side, kv_heads, length, head_dim, dtype=dtype, device=device)
            kept.append(whole)
            for at, number in enumerate(own):
                part = whole[:, at * block : (at + 1) * block]
                store[number // count][number % count, :, : part.shape[1]] = part
    starts = torch.tensor([length - width for length in held], device=device)
    distances = distances_of(keys, table).to(device)
    assert (distances < 0).any() or slabs == 1
    return Blocks(PagedLayer(keys, values, table.to(device), distances, starts), *plain)


def exact_attention(q: Tensor, case: Blocks, width: int, window: int | None) -> Tensor:
    """float64, sequence by sequence on plain tensors."""
    results = []
    for sequence, (keys, values) in enumerate(zip(case.keys, case.values)):
        held = keys.shape[1]
        rows = q[sequence * width : (sequence + 1) * width].double()
        positions = torch.arange(held - width, held, device=q.device)
        results.append(reference.attention(rows, keys.double(), values.double(), positions, held, window))
    return torch.cat(results)


CASES: list[tuple[tuple[int, ...], int, int, int, int, int | None, int]] = [
    # held, width, heads, kv_heads, head_dim, window, slabs
    ((1,), 1, 4, 4, 16, None, 1),
    ((33,), 1, 6, 2, 24, None, 2),
    ((130, 17, 64), 5, 6, 2, 64, None, 2),
    ((64, 80), 16, 3, 1, 32, None, 3),
    ((65, 3), 3, 14, 2, 16, None, 2),
    ((130, 9), 4, 2, 1, 16, 20, 2),
    ((100,), 1, 2, 1, 32, 1, 2),
    ((97,), 16, 2, 2, 16, 33, 2),
    ((40, 2), 2, 4, 2, 16, 500, 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("held", "width", "heads", "kv_heads", "head_dim", "window", "slabs"), CASES)
def test_attention(
    held: tuple[int, ...], width: int, heads: int, kv_heads: int, head_dim: int, window: int | None, slabs: int,
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tuned(monkeypatch, {"attention": {"chunk": 32, "block": 16}})
    case = paged_case(held, width, kv_heads, head_dim, slabs=slabs, spare=3, dtype=dtype, device=device)
    q = normal(7, len(held) * width, heads, head_dim, dtype=dtype, device=device) * 2
    close(ops.attention(q, case.kv, width, window), exact_attention(q, case, width, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("begin", "width", "window"), [(0, 40, None), (33, 50, None), (70, 33, 21)])
def test_a_piece_of_a_prompt(
    begin: int, width: int, window: int | None, dtype: torch.dtype, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tuned(monkeypatch, {"attention": {"chunk": 32, "block": 16}})
    case = paged_case((begin + width,), width, 2, 16, dtype=dtype, device=device)
    q = normal(7, width, 6, 16, dtype=dtype, device=device) * 2
    result = ops.attention(q, case.kv, width, window, span=begin + width)
    close(result, exact_attention(q, case, width, window))


def test_a_tile_is_never_longer_than_a_block(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, {"attention": {"chunk": 128, "block": 64}})
    case = paged_case((150,), 2, 1, 16, block=48, device=device)
    q = normal(7, 2, 2, 16, device=device)
    close(ops.attention(q, case.kv, 2), exact_attention(q, case, 2, None))


@pytest.mark.parametrize("window", [None, 21])
def test_the_same_bits_at_every_width_table_and_company(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, {"attention": {"chunk": 32, "block": 16}})
    case = paged_case((101, 50), 9, 2, 32, spare=5, dtype=torch.float16, device=device)
    q = normal(7, 18, 6, 32, dtype=torch.float16, device=device)
    together = ops.attention(q, case.kv, 9, window)
    for row in (0, 4, 8):
        alone = dataclasses.replace(
            case.kv, blocks=case.kv.blocks[:1, :7], distances=case.kv.distances[:1, :7], starts=case.kv.starts[:1] + row
        )
        assert torch.equal(ops.attention(q[row : row + 1], alone, 1, window), together[row : row + 1])


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    case = paged_case((50,), 2, 2, 16, device=device)
    q = normal(7, 2, 2, 16, device=device) * 200
    exact = exact_attention(q, case, 2, None)
    assert torch.isfinite(exact).all()
    assert torch.allclose(ops.attention(q, case.kv, 2).double(), exact, atol=1e-3)  # scores are rounded, at about 1000


def rotary_case(width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> tuple[Blocks, Tensor, Tensor]:
    case = paged_case((37, 5), width, kv_heads, head_dim, **options)
    angles = normal(2, 64, head_dim // 2).double() * 3
    device = case.kv.starts.device
    return case, angles.cos().float().to(device), angles.sin().float().to(device)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "normed"), [(6, 2, 16, False), (3, 3, 24, True), (4, 1, 64, True)]
)
@pytest.mark.parametrize("slabs", [1, 2])
def test_rotary_and_write(
    heads: int, kv_heads: int, head_dim: int, normed: bool, slabs: int, dtype: torch.dtype, device: torch.device
) -> None:
    width = 3
    case, cos, sin = rotary_case(width, heads, kv_heads, head_dim, slabs=slabs, dtype=dtype, device=device)
    qkv = normal(1, 2 * width, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    weights = [normal(seed, head_dim, dtype=dtype, device=device) for seed in (3, 4)]
    before = [slab.clone() for slab in (*case.kv.keys, *case.kv.values)]
    norms = (weights[0], weights[1], 1e-5) if normed else None
    q = ops.rotary_and_write(qkv, cos, sin, case.kv, width, heads, norms=norms)
    wide = qkv.double().view(2 * width, -1, head_dim)
    parts = list(wide.split((heads, kv_heads, kv_heads), dim=1))
    if normed:
        parts[:2] = [reference.rms_norm(part, w.double(), 1e-5)[0] for part, w in zip(parts, weights)]
    positions = case.kv.positions(width)
    parts[:2] = [reference.rotated(part, cos[positions].double(), sin[positions].double()) for part in parts[:2]]
    close(q, parts[0])
    for slabs_of, new in ((case.kv.keys, parts[1]), (case.kv.values, parts[2])):
        for row, position in enumerate(positions.tolist()):
            number = int(case.kv.blocks[row // width, position // 16])
            slab, place = divmod(number, slabs_of[0].shape[0])
            spot = slabs_of[slab][place, :, position % 16]
            close(spot, new[row])
            spot.fill_(0.0)
    total = 0
    for slab, old in zip((*case.kv.keys, *case.kv.values), before):
        written = slab.eq(0.0) & ~old.eq(0.0)
        total += int(written.sum())
        rests = [torch.where(written, 7.0, each).nan_to_num(7.0) for each in (slab, old)]
        assert torch.equal(*rests)
    assert total == 2 * 2 * width * kv_heads * head_dim, "a place was written that is not the row's"


def test_a_position_beyond_the_table_is_not_written(device: torch.device) -> None:
    case, cos, sin = rotary_case(1, 2, 1, 16, device=device)
    before = [slab.clone() for slab in (*case.kv.keys, *case.kv.values)]
    beyond = dataclasses.replace(case.kv, starts=case.kv.starts * 0 + case.kv.blocks.shape[1] * 16)
    ops.rotary_and_write(normal(1, 2, 64, device=device), cos.repeat(2, 1), sin.repeat(2, 1), beyond, 1, 2)
    for slab, old in zip((*case.kv.keys, *case.kv.values), before):
        assert torch.equal(slab.nan_to_num(7.0), old.nan_to_num(7.0))


@pytest.mark.parametrize("slabs", [1, 2])
def test_the_torch_side_computes_the_same(slabs: int) -> None:
    case, cos, sin = rotary_case(3, 4, 2, 16, slabs=slabs)
    qkv = normal(1, 6, 8 * 16)
    q = paged.rotary_and_write(qkv, cos, sin, case.kv, 3, 4)
    for sequence, held in enumerate((37, 5)):  # what was written replaces the case's own rows
        for kept, store in ((case.keys, case.kv.keys), (case.values, case.kv.values)):
            for position in range(held - 3, held):
                slab, place = divmod(int(case.kv.blocks[sequence, position // 16]), len(store[0]))
                kept[sequence][:, position] = store[slab][place, :, position % 16]
    for keys in case.keys:
        assert torch.isfinite(keys).all()
    for window in (None, 9):
        close(paged.attention(q, case.kv, 3, window), exact_attention(q, case, 3, window))
    kv = case.kv
    one = dataclasses.replace(kv, blocks=kv.blocks[:1], distances=kv.distances[:1], starts=kv.starts[:1])
    assert torch.allclose(paged.attention(q[:3], one, 3, span=37), paged.attention(q[:3], one, 3), atol=1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    case, cos, sin = rotary_case(1, 2, 2, 16)
    kv, q = case.kv, torch.zeros(2, 2, 16)
    for message, call in (
        ("does not fit 2 key heads", lambda: ops.attention(torch.zeros(2, 3, 16), kv, 1)),
        ("not 2 sequences of 2", lambda: ops.attention(q, kv, 2)),
        ("window 0", lambda: ops.attention(q, kv, 1, 0)),
        ("do not fit a span of 0", lambda: ops.attention(q, kv, 1, span=0)),
        ("does not fit 4 and 2 heads", lambda: ops.rotary_and_write(torch.zeros(2, 96), cos, sin, kv, 1, 4)),
        ("rotary tables", lambda: ops.rotary_and_write(torch.zeros(2, 128), cos[:, 1:], sin[:, 1:], kv, 1, 4)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    odd = paged_case((9,), 1, 1, 16, block=8).kv
    with pytest.raises(ValueError, match="multiple of 16"):
        ops.attention(torch.zeros(1, 1, 16), odd, 1)
