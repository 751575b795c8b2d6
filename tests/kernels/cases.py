"""Random inputs of kernels, and how far from the float64 reference they may end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec.kernels import tuning
from edgespec.kernels.weights import QuantisedTorch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
HALVES = (torch.float16, torch.bfloat16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype).to(device)


def quantised(
    seed: int,
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group: int = 32,
    mode: str = "symmetric",
    scale_type: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> QuantisedTorch:
    """A matrix whose bits are all used, with scales of either sign."""
    source = generator(seed)
    groups = (rows, columns // group)
    if bits == 4:
        q = torch.randint(0, 256, (rows, columns // 2), generator=source, dtype=torch.uint8)
    else:
        q = torch.randint(-128, 128, (rows, columns), generator=source, dtype=torch.int8)
    scale = (torch.randn(groups, generator=source) * 0.05).to(scale_type)
    zero = torch.randint(0, 16, groups, generator=source, dtype=torch.uint8) if mode == "zeros" else None
    shift = torch.randn(groups, generator=source).to(scale_type) if mode == "shift" else None
    return QuantisedTorch.from_arrays(bits=bits, group=group, q=q, scale=scale, zero=zero, shift=shift, device=device)


def close(result: Tensor, reference: Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert that no number is further off than the type allows, relative to the largest of the reference's row."""
    tolerance = TOLERANCE[dtype or result.dtype]
    result, reference = result.detach().cpu().double(), reference.detach().cpu().double()
    assert result.shape == reference.shape
    assert torch.isfinite(result).all(), "not all was written"
    largest = reference.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    error = ((result - reference).abs() / largest).max().item()
    assert error <= tolerance, f"off by {error:.2e}, allowed {tolerance:.0e}"


def tuned(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, dict[str, int]]) -> None:
    """Launch configurations with other numbers, so that small cases reach every branch."""
    base = tuning.for_capability(None)
    parts: dict[str, Any] = {kind: dataclasses.replace(getattr(base, kind), **values) for kind, values in kinds.items()}
    changed = dataclasses.replace(base, **parts)
    monkeypatch.setattr(tuning, "of", lambda _device: changed)
