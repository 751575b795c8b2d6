"""Working sets over drafts that read real files, and a home of its own for the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.memory.working_set import WorkingSet
from tests.support.working_sets import FileDraft

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> list[FileDraft]:
    return [FileDraft(name, tmp_path / name, MIB + 77, number) for number, name in enumerate("abc", start=1)]


@pytest.fixture
def open_set() -> Iterator[Callable[..., WorkingSet]]:
    made: list[WorkingSet] = []

    def build(drafts: Any, **options: Any) -> WorkingSet:
        made.append(WorkingSet(drafts, **{"slots": 2, "watch_seconds": None, **options}))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and files of this test only, and a terminal that knows colours."""
    for name in [name for name in os.environ if name.startswith("EDGESPEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "PYTHONIOENCODING", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
