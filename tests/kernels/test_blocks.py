"""Moving and renaming blocks of keys and values."""

from __future__ import annotations

import pytest
import torch

from edgespec.kernels import ops
from tests.kernels.cases import normal


@pytest.mark.parametrize("side", ["triton", "torch"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((7, 2, 5, 9), torch.float16), ((7, 1500), torch.float32), ((7, 3), torch.int8), ((7, 3, 3), torch.bfloat16)],
)
def test_moves_happen_in_their_order(
    side: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    ops.use("triton" if side == "triton" else "torch")
    pool = (normal(1, *shape) * 50).to(dtype).to(device)
    moves = [(6, 1), (5, 6), (1, 5), (-1, 2), (3, -1), (4, 4)]  # chains: a block is read, then filled, then read
    expected = list(pool.clone())
    for source, target in moves:
        if source >= 0 and target >= 0:
            expected[target] = expected[source]
    assert ops.move_blocks(pool, torch.tensor(moves, device=device)) is pool
    assert torch.equal(pool, torch.stack(expected))


@pytest.mark.parametrize("side", ["triton", "torch"])
def test_tables_are_renamed_but_for_empty_places(side: str, device: torch.device) -> None:
    ops.use("triton" if side == "triton" else "torch")
    tables = torch.tensor([[3, 0, -1], [2, 2, -1]], dtype=torch.int32, device=device)
    assert ops.remap(tables, torch.tensor([7, 6, 5, 4], dtype=torch.int32, device=device)) is tables
    assert tables.tolist() == [[4, 7, -1], [5, 5, -1]]


def test_what_cannot_be_moved_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        ops.move_blocks(torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="contiguous"):
        ops.remap(torch.zeros(4, 4, dtype=torch.int64).T[:2], torch.zeros(4, dtype=torch.int64))
