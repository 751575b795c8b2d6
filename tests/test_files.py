"""Files are written whole or not at all, and readable for whom they should be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from edgespec.files import write_bytes, write_text


@pytest.fixture
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
@pytest.mark.parametrize(("private", "mode"), [(False, 0o644), (True, 0o600)])
def test_results_are_for_all_and_private_files_for_their_owner(tmp_path: Path, private: bool, mode: int) -> None:
    write_text(tmp_path / "a", "text", private=private)
    assert (tmp_path / "a").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["a"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes(tmp_path / "a", b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
