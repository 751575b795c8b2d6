"""One engine on a tiny model for all tests of this folder, with the target itself as a second draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec import Engine
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE, load


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(home))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "target", **SHAPE)


@pytest.fixture(scope="module")
def engine(folder: Path, home: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(home))
        with load(folder, drafts=["ngram", str(folder)], gamma=3) as made:
            yield made


@pytest.fixture(autouse=True)
def _fresh(engine: Engine) -> None:
    engine.use_draft("auto")
    engine.gamma = 3
