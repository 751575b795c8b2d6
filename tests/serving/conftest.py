"""Engines that the tests of one file share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import Engine
from tests.serving.engines import load
from tests.support.tiny import write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(tmp_path_factory.mktemp("home")))
        yield write_tiny(tmp_path_factory.mktemp("models") / "target", head_dim=16)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with load(folder) as made:
        yield made
