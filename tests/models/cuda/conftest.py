"""Checkpoints that several modules load, and torch on one thread: the models are far too small for more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.models.cuda import looks
from tests.support.tiny import write_tiny


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one architecture."""
    root = tmp_path_factory.mktemp("cuda-parts")
    return [write_tiny(root / f"model-{seed}", "llama", seed=seed) for seed in (0, 1)]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy to the host."""
    copied: list[int] = []
    look = looks.look

    def watched(tensor: torch.Tensor) -> Any:
        copied.append(tensor.nbytes)
        return look(tensor)

    monkeypatch.setattr(looks, "look", watched)
    return copied
