"""Saved chats: exact round trip, strict reading, writing that never harms."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import transcript
from edgespec.cli.transcript import TranscriptError
from edgespec.decoding.params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi 中\r\n\x00"}, {"role": "assistant", "content": " ok \n"}]


def saved(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "chat.json"
    transcript.save(str(file), "be terse", MESSAGES, SamplingParams(stop=("END",), logit_bias={5: -1.5}, seed=3))
    data = json.loads(file.read_text())
    data.update(changes)
    file.write_text(json.dumps({key: value for key, value in data.items() if value != "REMOVE"}))
    return file


def test_round_trip(tmp_path: Path) -> None:
    loaded = transcript.load(str(saved(tmp_path)))
    assert loaded.system == "be terse"
    assert list(loaded.messages) == MESSAGES
    assert loaded.params == SamplingParams(stop=("END",), logit_bias={5: -1.5}, seed=3)
    assert stat.S_IMODE((tmp_path / "chat.json").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["chat.json"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "version is 2"),
        ({"version": True, "format": "edgespec-chat"}, "version is True"),
        ({"extra": 1}, "keys are"),
        ({"params": "REMOVE"}, "keys are"),
        ({"system": 5}, "system message"),
        ({"system": "\ud800"}, "system message"),
        ({"messages": {}}, "not a list"),
        ({"messages": [{"role": "user"}]}, "message 1"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1"),
        ({"messages": [{"role": "user", "content": "a", "extra": 1}]}, "message 1"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "where user is due"),
        ({"messages": [MESSAGES[0], {"role": "system", "content": "x"}]}, "where assistant is due"),
        ({"messages": [MESSAGES[0]]}, "last question has no answer"),
        ({"params": []}, "params"),
        ({"params": {"temprature": 1}}, "temperature"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"params": {"temperature": float("nan")}}, "temperature"),
        ({"params": {"temperature": "hot"}}, "temperature"),
    ],
)
def test_what_save_would_not_write_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    file = saved(tmp_path, **changes)
    with pytest.raises(TranscriptError, match=problem) as caught:
        transcript.load(str(file))
    assert "chat.json" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(data)
    with pytest.raises(TranscriptError, match=r"chat\.json"):
        transcript.load(str(file))


@pytest.mark.parametrize("path", ["missing.json", ".", "a\x00b"])
def test_paths_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TranscriptError):
        transcript.load(path)


def test_only_chats_are_replaced(tmp_path: Path) -> None:
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    with pytest.raises(TranscriptError, match="is not a saved chat"):
        transcript.save(str(other), None, MESSAGES, SamplingParams())
    assert other.read_text() == "years of work"
    with pytest.raises(TranscriptError):
        transcript.save("/dev/null", None, MESSAGES, SamplingParams())
    file = saved(tmp_path)
    transcript.save(str(file), None, [], SamplingParams())
    assert transcript.load(str(file)).messages == ()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path)
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TranscriptError, match="No space left"):
        transcript.save(str(file), None, [], SamplingParams())
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["chat.json"]


def test_a_link_keeps_pointing_at_the_file(tmp_path: Path) -> None:
    file = saved(tmp_path)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    transcript.save(str(link), None, [], SamplingParams())
    assert link.is_symlink()
    assert transcript.load(str(file)).messages == ()
