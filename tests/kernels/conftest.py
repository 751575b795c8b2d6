"""Kernels run in Triton's interpreter, or compiled where there is a CUDA device: the same cases, one or the other.

A process is either interpreted or compiled, which Triton decides when it is imported; so it is imported here, and the
environment is left as it was.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from edgespec.kernels import ops

KERNELS = ("linear", "norm", "rotary", "attention", "acceptance", "blocks")
INSTALLED = find_spec("triton") is not None
COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def _import_kernels() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    if not COMPILED:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in KERNELS:
            importlib.import_module(f"edgespec.kernels.{name}")
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before
    if sys.modules["edgespec.kernels.types"].INTERPRETED is COMPILED:
        raise pytest.UsageError("Triton was imported before tests/kernels/conftest.py could choose its interpreter")


if INSTALLED:
    _import_kernels()


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where the case's tensors live; Triton computes, and memory that it gets is poisoned."""
    if not INSTALLED:
        pytest.skip("Triton is not installed (it has wheels for Linux on x86_64 and aarch64)")
    if (request.param == "compiled") is not COMPILED:
        pytest.skip("needs a CUDA device" if not COMPILED else "this process compiles its kernels")
    if not COMPILED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # parts of Triton are imported at the first launch
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    before = ops.use("triton")
    yield torch.device("cuda" if COMPILED else "cpu")
    ops.use(before)


def _poisoned(allocate: Any) -> Any:
    """What a kernel forgets to write is NaN, or a number far out of any range."""

    def allocated(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = allocate(*arguments, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    return allocated
