"""How fast matrix-vector kernels read their weights, and blocks of keys and values move, against a plain copy."""

from __future__ import annotations

from functools import partial

import torch

from edgespec.bench.gpu_check.random_models import QWEN_3B, TINY
from edgespec.bench.gpu_check.report import Check
from edgespec.bench.gpu_check.timing import captured, median
from edgespec.kernels import ops
from edgespec.kernels.weights import QuantisedTorch
from edgespec.models.cuda.kv import MOVES_BYTES, PagedPool, Tables
from edgespec.models.cuda.staging import Staging

GOAL = 0.8
_COPY_BYTES = 1 << 29
_PASS_BYTES = 1 << 29  # of weights that a pass reads: several times what a cache holds
_SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192))


def run(check: Check) -> None:
    copied = copy_rate(check.device, 1 << 20 if check.tiny else _COPY_BYTES)
    check.found("bandwidth", "copy on the device, read and written", copied / 1e9, "GB/s")
    moved = moving_rate(check.device, tiny=check.tiny)
    note = f"{moved / 1e9:.4g} GB/s"
    check.found("bandwidth", "keys and values moved, 3B", moved / copied * 100, "% of the copy", note=note)
    for rows, columns in ((64, 64),) if check.tiny else _SHAPES:
        for bits, group in ((4, 32), (4, 128), (8, 32)):
            if columns % group or check.left < 60:
                continue
            goal = bits == 4 and rows * columns >= 4096 * 4096
            for count, same_bits, kind in ((1, True, "1 row"), (1, False, "1 row, draft"), (5, True, "5 rows")):
                rate = matrix_rate(check.device, rows, columns, bits, group, count, same_bits, tiny=check.tiny)
                share, judged = rate / copied, goal and count == 1 and not check.tiny
                check.found(
                    "bandwidth",
                    f"int{bits} groups of {group}, {rows} x {columns}, {kind}",
                    share * 100,
                    "% of the copy",
                    goal=f">= {GOAL:.0%}" if judged else "",
                    ok=share >= GOAL if judged else None,
                    note=f"{rate / 1e9:.4g} GB/s",
                )


def copy_rate(device: torch.device, nbytes: int) -> float:
    """Bytes a second that a large copy reads and writes together."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / median(lambda: target.copy_(source), device, inner=5)


def moving_rate(device: torch.device, *, tiny: bool) -> float:
    """Bytes a second, read and written, of moving nearly a slab of blocks, and renaming them for 16 texts."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    pool = PagedPool(TINY if tiny else QWEN_3B, device, dtype)
    count = pool.slabs[0].shape[2]
    for _ in range(count):
        pool.take()
    tables = Tables(16, 4096, pool, device, Staging(device, MOVES_BYTES))
    moves = [(count + place, place) for place in range(1, count)]
    return 2 * len(moves) * pool.slabs[0].nbytes / count / median(lambda: tables.carry(moves), device)


def matrix_rate(
    device: torch.device, rows: int, columns: int, bits: int, group: int, count: int, same_bits: bool, *, tiny: bool
) -> float:
    """Bytes of weights a second, over so many different matrices that none is still in a cache."""
    make = partial(torch.randint, device=device)
    one = rows * columns * bits // 8 + rows * columns // group * 2
    weights = [
        QuantisedTorch(
            bits,
            group,
            make(0, 256, (rows, columns // 2), dtype=torch.uint8)
            if bits == 4
            else make(-128, 128, (rows, columns), dtype=torch.int8),
            torch.full((rows, columns // group), 0.01, dtype=torch.float16, device=device),
        )
        for _ in range(2 if tiny else max(2, _PASS_BYTES // one))
    ]
    x = torch.randn(count, columns, device=device).to(torch.float32 if device.type == "cpu" else torch.float16)

    def once() -> None:
        for weight in weights:
            ops.linear(x, weight, same_bits=same_bits)

    return len(weights) * one / median(captured(once, device), device, 3 if tiny else 7)
