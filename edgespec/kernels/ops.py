"""The operations that decoders are made of: a Triton kernel where it can run, else the torch reference.

Nothing here looks at a tensor's values on the host. Launches depend on shapes alone, and positions, lengths and counts
stay in device tensors, so a captured CUDA graph serves every length. What each operation computes, with shapes, stands
in `edgespec.kernels.reference` and, for keys and values, in `edgespec.kernels.paged`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from edgespec.kernels import paged, reference
from edgespec.kernels.paged import PagedLayer
from edgespec.kernels.weights import QuantisedTorch

Choice = Literal["auto", "triton", "torch"]
Weight = QuantisedTorch | Tensor
_log = logging.getLogger(__name__)
_choice: Choice = "auto"


def use(choice: Choice) -> Choice:
    """Which side computes from now on, in this process; returns what was in force.

    "auto": Triton if it is installed and works on the tensors' device, which is a CUDA device (or any under
    TRITON_INTERPRET=1), else torch. ValueError for another word.
    """
    global _choice
    if choice not in ("auto", "triton", "torch"):
        raise ValueError(f'kernels are "auto", "triton" or "torch", not {choice!r}')
    before, _choice = _choice, choice
    return before


def backend(device: torch.device) -> Literal["triton", "torch"]:
    """What runs on `device` now."""
    if _choice != "auto":
        return _choice
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "torch"
    return "triton" if _works(device) else "torch"


@cache
def _works(device: torch.device) -> bool:
    """Whether a small kernel runs; without one (no Triton, C compiler or ptxas for the device) a single warning."""
    if find_spec("triton") is None:
        if device.type == "cuda":
            _log.warning("Triton is not installed; kernels run in plain torch, which is slower.")
        return False
    try:
        if _probe(device):
            return True
        cause = "a small product is wrong"
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    _log.warning("Triton does not work on %s (%s); kernels run in plain torch, which is slower.", device, cause)
    return False


def _probe(device: torch.device) -> bool:
    """Whether small products with all numbers that 4 and 8 bits hold come out right."""
    from edgespec.kernels.linear import linear as kernel

    x = (torch.arange(256, device=device) % 7 - 3).half()[None]
    q = torch.arange(256, device=device).to(torch.uint8)[None].contiguous()
    scale = torch.full((1, 8), 0.25, dtype=torch.float16, device=device)
    for weight in (
        QuantisedTorch(4, 32, q[:, 48:176].contiguous(), scale[:, :8]),
        QuantisedTorch(8, 32, q.view(torch.int8), scale),
    ):
        exact = reference.linear(x.float(), weight)
        for same_bits in (True, False):
            if not torch.allclose(kernel(x, weight, same_bits=same_bits).float(), exact, rtol=1e-2, atol=0.5):
                return False
    return True


def linear(
    x: Tensor,
    weight: Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    same_bits: bool = True,
    prompt: bool = False,
) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N], plus residual [M, N]: [M, N].

    same_bits: each row's result has the same bits for every M, so that a target judges a guess as it would choose a
    token alone, and beside other texts. Without it a single row may take a faster way, as a draft's steps do. prompt:
    more than 16 rows may take taller tiles; their bits are then those of every other M > 16.
    """
    _check_product(x, weight)
    if backend(x.device) == "torch" or (not same_bits and isinstance(weight, Tensor)):
        return reference.linear(x, weight, bias=bias, residual=residual)
    from edgespec.kernels.linear import linear as kernel

    return kernel(x, weight, bias=bias, residual=residual, same_bits=same_bits, prompt=prompt)


def gated_linear(
    x: Tensor, gate_up: Weight, *, bias: Tensor | None = None, same_bits: bool = True, prompt: bool = False
) -> Tensor:
    """silu(x gate^T) * (x up^T): [M, N] for gate_up [2 N, K], the gate's rows first. The rest is as in `linear`."""
    _check_product(x, gate_up)
    if gate_up.shape[0] % 2:
        raise ValueError(f"gate and up together have an even number of rows, not {gate_up.shape[0]}")
    if backend(x.device) == "torch" or (not same_bits and isinstance(gate_up, Tensor)):
        return reference.gated_linear(x, gate_up, bias=bias)
    from edgespec.kernels.linear import linear as kernel

    return kernel(x, gate_up, bias=bias, gated=True, same_bits=same_bits, prompt=prompt)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(normed, summed): summed = x + residual [M, H], normed = its root-mean-square norm times weight [H]."""
    return _home("norm", reference, x.device).rms_norm(x, weight, eps, residual)  # type: ignore[no-any-return]


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
    """Rotated q [S * width, heads, d]; rotated keys, and values, are written into the sequences' blocks."""
    _check_paged(kv, width, qkv.shape[0])
    if qkv.shape[1] != (heads + 2 * kv.kv_heads) * kv.head_dim:
        raise ValueError(f"qkv {list(qkv.shape)} does not fit {heads} and {kv.kv_heads} heads of {kv.head_dim}")
    if cos.shape != sin.shape or cos.shape[1] * 2 != kv.head_dim or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"rotary tables {list(cos.shape)}, {list(sin.shape)} do not fit heads of {kv.head_dim}")
    home = _home("rotary", paged, qkv.device)
    return home.rotary_and_write(qkv, cos, sin, kv, width, heads, norms=norms)  # type: ignore[no-any-return]


def attention(q: Tensor, kv: PagedLayer, width: int, window: int | None = None, *, span: int | None = None) -> Tensor:
    """Causal attention [S * width, heads * d] of q [S * width, heads, d] over the sequences' blocks."""
    _check_paged(kv, width, q.shape[0])
    if q.shape[2] != kv.head_dim or q.shape[1] % kv.kv_heads:
        raise ValueError(f"q {list(q.shape)} does not fit {kv.kv_heads} key heads of {kv.head_dim}")
    if (span is not None and span < width) or (window is not None and window < 1):
        raise ValueError(f"{width} rows do not fit a span of {span} (window {window})")
    return _home("attention", paged, q.device).attention(q, kv, width, window, span=span)  # type: ignore[no-any-return]


def move_blocks(slabs: Sequence[Tensor], moves: Tensor) -> None:
    """Carry blocks to other places of slabs [2, layers, blocks, ...], in the order of moves int64 [n, 4]; see `paged`.

    A move: number, new number, distance, new distance. Distances are multiples of `paged.ALIGNED`.
    """
    first = slabs[0]
    if any(slab.shape != first.shape or not slab.is_contiguous() for slab in slabs) or first.stride(2) % paged.ALIGNED:
        raise ValueError(f"slabs must have one shape, of blocks of a multiple of {paged.ALIGNED} numbers, in one piece")
    _check_moves(moves)
    _home("blocks", paged, first.device).move_blocks(slabs, moves)


def remap(tables: Tensor, moves: Tensor) -> Tensor:
    """Rename blocks in tables int64 [rows, 2, n] (numbers, distances) as `moves` say, in place; returns tables."""
    if tables.ndim != 3 or tables.shape[1] != 2 or not tables.is_contiguous():
        raise ValueError(f"tables {list(tables.shape)} are not rows of numbers and distances, in one piece")
    _check_moves(moves)
    return _home("blocks", paged, tables.device).remap(tables, moves)  # type: ignore[no-any-return]


def best_tokens(logits: Tensor) -> Tensor:
    """int64 [M] on the device: the best token of each row of logits [M, V], -1 for a row that cannot be used."""
    return _home("acceptance", reference, logits.device).best_tokens(logits)  # type: ignore[no-any-return]


def accept_greedy(best: Tensor, tokens: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """int64 [S, 2] on the device: (accepted, next token) of S blocks; best and tokens int64 [S, W], see the reference.

    The next token is -1 if its row cannot be used.
    """
    if best.shape != tokens.shape or begins.shape != ends.shape or begins.shape != tokens.shape[:1]:
        raise ValueError(
            f"{list(best.shape)} best tokens do not fit {list(tokens.shape)} of {list(begins.shape)} blocks"
        )
    home = _home("acceptance", reference, best.device)
    return home.accept_greedy(best, tokens, begins, ends)  # type: ignore[no-any-return]


def accept_sampled(p: Tensor, q: Tensor | None, proposed: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [2] on the device: (accepted, next token) by the rejection rule; all float32, see the reference."""
    rows, vocabulary = p.shape
    if proposed.shape != (rows - 1,) or uniforms.shape != (rows,) or (q is not None and q.shape[1] != vocabulary):
        raise ValueError(f"p {list(p.shape)}, {list(proposed.shape)} guesses and {list(uniforms.shape)} uniforms")
    if q is not None and q.shape[0] < rows - 1:
        raise ValueError(f"{q.shape[0]} rows of q for {rows - 1} guesses")
    return _home("acceptance", reference, p.device).accept_sampled(p, q, proposed, uniforms)  # type: ignore[no-any-return]


def _home(name: str, otherwise: ModuleType, device: torch.device) -> ModuleType:
    """The kernel module `name` if Triton computes on `device`, else the reference."""
    if backend(device) == "torch":
        return otherwise
    from importlib import import_module

    return import_module(f"edgespec.kernels.{name}")


def _check_paged(kv: PagedLayer, width: int, rows: int) -> None:
    """What kernels rely on; shapes alone are looked at."""
    first = kv.keys[0]
    if rows != kv.starts.shape[0] * width or kv.distances.shape != kv.blocks.shape or len(kv.blocks) != len(kv.starts):
        raise ValueError(f"{rows} rows are not {kv.starts.shape[0]} sequences of {width}, or tables are missing")
    if kv.block % paged.ALIGNED or any(slab.shape != first.shape for slab in (*kv.keys, *kv.values)):
        raise ValueError(f"slabs must have one shape, of blocks of a multiple of {paged.ALIGNED} positions")
    if not all(slab.is_contiguous() for slab in (*kv.keys, *kv.values)):
        raise ValueError("keys and values must be contiguous")


def _check_moves(moves: Tensor) -> None:
    if moves.ndim != 2 or moves.shape[1] != 4:
        raise ValueError(f"moves {list(moves.shape)} are not rows of numbers and distances, old and new")


def _check_product(x: Tensor, weight: Weight) -> None:
    if x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {list(weight.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}, the weight on {weight.device}")
