"""Normalisation against float64; what works on keys and values is in test_paged.py."""

from __future__ import annotations

import pytest
import torch

from edgespec.kernels import ops, reference
from tests.kernels.cases import HALVES, close, normal


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("width", [7, 64, 130])
@pytest.mark.parametrize("added", [False, True])
def test_rms_norm(dtype: torch.dtype, width: int, added: bool, device: torch.device) -> None:
    x, weight = normal(1, 5, width, dtype=dtype, device=device), normal(2, width, dtype=dtype, device=device)
    residual = normal(3, 5, width, dtype=dtype, device=device) if added else None
    normed, summed = ops.rms_norm(x, weight, 1e-5, residual)
    close(summed, x.double() if residual is None else x.double() + residual.double())
    close(normed, reference.rms_norm(summed.double(), weight.double(), 1e-5)[0])


def test_the_norm_of_tiny_numbers_needs_epsilon(device: torch.device) -> None:
    x = torch.full((2, 48), 1e-4, device=device)
    weight = torch.ones(48, device=device)
    close(ops.rms_norm(x, weight, 1e-6)[0], reference.rms_norm(x.double(), weight.double(), 1e-6)[0])
