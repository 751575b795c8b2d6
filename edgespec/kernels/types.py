"""Small things that the launchers share."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

INTERPRETED = isinstance(tl.sum, InterpretedFunction)  # decided when Triton was imported
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def dot_type(dtype: torch.dtype) -> Any:
    """The Triton type that products of `dtype` are computed in; ValueError for one that kernels do not take.

    The interpreter keeps bfloat16 as bare bits, which it cannot multiply.
    """
    if dtype not in _TYPES:
        raise ValueError(f"kernels take float16, bfloat16 and float32, not {dtype}")
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else _TYPES[dtype]


def pad_of(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """`tensor`, contiguous, or some pointer for a kernel that will not look at it."""
    return placeholder if tensor is None else tensor.contiguous()
