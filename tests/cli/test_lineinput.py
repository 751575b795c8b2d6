"""Multi-line messages and reading lines."""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path

import pytest

from edgespec.cli import lineinput
from edgespec.cli.lineinput import PlainReader, is_incomplete, unfold
from edgespec.cli.terminal import Output


@pytest.mark.parametrize(
    ("text", "incomplete"),
    [
        ("hello", False),
        ("hello \\", True),
        ("a path C:\\\\", False),  # an escaped backslash ends the line
        ("one \\\ntwo", False),
        ("one \\\ntwo \\", True),
        ('"""', True),
        ('"""one\ntwo', True),
        ('"""one\ntwo"""', False),
        ('  """one"""', False),
        ('say """ please', False),
        ("", False),
    ],
)
def test_when_a_message_goes_on(text: str, incomplete: bool) -> None:
    assert is_incomplete(text) is incomplete


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "hello"),
        ("one \\\ntwo", "one \ntwo"),
        ('"""\ndef f():\n    return "\\n"\n"""', 'def f():\n    return "\\n"'),
        ('"""keep \\\nthis"""', "keep \\\nthis"),
        ('"""one""" and more', "one and more"),
        ('"""\n    a\n    """', "    a"),
        ('"""\n\na\n\n"""', "\na\n"),
        ("pasted\nlines", "pasted\nlines"),
        ("  indented", "  indented"),
    ],
)
def test_the_message_behind_the_lines(text: str, message: str) -> None:
    assert unfold(text) == message


def read_all(monkeypatch: pytest.MonkeyPatch, data: bytes) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    reader = PlainReader(Output(io.StringIO()))
    messages = []
    while True:
        try:
            messages.append(reader.read())
        except EOFError:
            return messages


# B157
def test_plain_lines_survive_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"one\r\ntwo \\\nlines\n\xff\xfe\nnul \x00\nlast without newline"
    assert read_all(monkeypatch, data) == ["one", "two \nlines", "\ufffd\ufffd", "nul \x00", "last without newline"]


def test_history_is_private_and_takes_any_text(tmp_path: Path) -> None:
    file = tmp_path / "new" / "history"
    history = lineinput._history(file)
    history.append_string("hello \udcff")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "hello \ufffd" in file.read_text(encoding="utf-8")
    file.chmod(0o644)
    lineinput._history(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_history_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = lineinput._history(tmp_path / "file" / "history")
    history.append_string("hello")
    assert history.get_strings() == ["hello"]


@pytest.mark.parametrize("term", ["dumb", "", None])
def test_a_terminal_without_abilities_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, term: str | None) -> None:
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(lineinput, "is_terminal", lambda stream: True)
    assert isinstance(lineinput.make_reader(lambda text: (0, []), None), PlainReader)
    assert os.environ.get("TERM") == term
