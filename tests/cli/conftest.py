"""Every test of the command line has a home of its own, the scripted engine, and no settings from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.cli import runtime
from tests.cli.fakes import FakeEngine


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EDGESPEC_")]:
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("EDGESPEC_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """The scripted engine in place of the real one."""
    FakeEngine.reset()
    monkeypatch.setattr(runtime, "engine_class", lambda: FakeEngine)
    return FakeEngine


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text('model = "from-file"\ngamma = 7\n')
    return file
