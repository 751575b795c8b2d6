"""A tiny target with a set of four heads, for engines that hold fewer of them than there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafts import zoo
from drafts.head import FILE_NAME
from tests.support.draft_sets import write_draft
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE

NAMES = ("chat", "code", "general", "math")


def make_held_target(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The target's folder below `home`, which becomes EDGESPEC_HOME's parent; what is there already is kept."""
    monkeypatch.setenv("EDGESPEC_HOME", str(home / "home"))
    monkeypatch.setattr(zoo, "BUILT_IN", home / "shipped")
    folder = home / "models" / "tiny"
    if not folder.exists():
        write_tiny(folder, **SHAPE)
    for seed, name in enumerate(NAMES):
        if not (home / "home" / "drafts" / "set" / name / FILE_NAME).exists():
            write_draft(home / "home" / "drafts" / "set" / name, folder, seed=seed)
    return folder
