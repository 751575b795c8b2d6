"""Fault cases of the kind "Command line and chat", on a terminal: keys, colours, the history, what waiting costs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fakes import FAKE
from tests.cli.pseudo_terminal import PseudoTerminal, python

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def terminal() -> Iterator[Any]:
    """terminal(*arguments, script=...) starts the command line on a terminal."""
    opened: list[PseudoTerminal] = []

    def start(
        *arguments: str, script: dict[str, Any] | None = None, env: dict[str, str] | None = None
    ) -> PseudoTerminal:
        opened.append(
            PseudoTerminal(python(FAKE, *arguments), {"FAKE_SCRIPT": json.dumps(script or {}), **(env or {})})
        )
        return opened[-1]

    yield start
    for item in opened:
        item.__exit__()


# B025: Ctrl-D and the empty line
def test_b025_a_chat_on_a_terminal(terminal: Any) -> None:
    screen = terminal("chat", script={"echo": True})
    screen.wait_for("Ctrl-D leaves")
    screen.wait_for(">")
    screen.type("\r")
    screen.wait_for(">")
    screen.type("first question\r")
    screen.wait_for("accepted 75%")
    screen.wait_for("412 MB")
    assert b"\x1b[2m" in screen.raw
    screen.wait_for(">")
    screen.type("\x04")
    assert screen.exit_code() == 0
    assert screen.text.count("412 MB") == 1  # the empty line was no question


# B155
def test_b155_ctrl_c_on_a_terminal(terminal: Any) -> None:
    screen = terminal("chat", script={"pieces": ["word "] * 1000, "delay": 0.05})
    screen.wait_for(">")
    screen.type("question\r")
    screen.wait_for("word word ")
    screen.type("\x03")
    screen.wait_for("stopped by you")
    screen.wait_for(">")
    screen.type("half a line\x03")  # clears the line, does not count
    screen.type("/save saved.json\x03\x03")  # clears this one too, then warns
    screen.wait_for("Ctrl-C again leaves")
    screen.wait_for(">")
    screen.type("\x03")
    assert screen.exit_code() == 130


def test_multi_line_messages_and_the_history_on_a_terminal(terminal: Any, tmp_path: Path) -> None:
    screen = terminal("chat", script={"echo": True})
    screen.wait_for(">")
    screen.type("one \\\r")
    screen.type("two\r")
    screen.wait_for("412 MB")
    screen.wait_for(">")
    screen.type('"""\rdef f():\r    pass\r"""\r')
    screen.wait_for("412 MB")
    screen.wait_for(">")
    saved = tmp_path / "saved.json"
    screen.type(f"/save {saved}\r")
    screen.wait_for("Saved 4 messages")
    screen.type("/exit\r")
    assert screen.exit_code() == 0
    questions = [message["content"] for message in json.loads(saved.read_text())["messages"][::2]]
    assert questions == ["one \ntwo", "def f():\n    pass"]
    history = tmp_path / "home" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "def f():" in history.read_text()

    screen = terminal("chat", "--no-history", script={"echo": True})
    screen.wait_for(">")
    screen.type("a secret\r")
    screen.wait_for("412 MB")
    screen.wait_for(">")
    screen.type("\x04")
    assert screen.exit_code() == 0
    assert "a secret" not in history.read_text()


def test_a_model_cannot_drive_the_terminal(terminal: Any) -> None:
    for arguments in (["generate", "hi"], ["chat"]):
        screen = terminal(*arguments, script={"pieces": ["\x1b]0;owned\x07", "\x9b31m", "done"]})
        if arguments == ["chat"]:
            screen.wait_for(">")
            screen.type("hi\r")
        screen.wait_for("done")
        assert b"\x1b]0;" not in screen.raw
        assert "\x9b" not in screen.text
        assert "\\x1b]0;owned\\x07\\x9b31mdone" in screen.text


def test_no_color_and_dumb_terminals(terminal: Any) -> None:
    screen = terminal("chat", env={"NO_COLOR": "1"})
    screen.wait_for(">")
    screen.type("hi\r")
    screen.wait_for("412 MB")
    assert b"\x1b[2m" not in screen.raw
    screen = terminal("chat", env={"TERM": "dumb"})
    screen.wait_for(">")
    screen.type("hi\n")
    screen.wait_for("412 MB")
    screen.wait_for(">")
    assert b"\x1b" not in screen.raw
    screen.type("\x04")
    assert screen.exit_code() == 0


# B151
def test_b151_waiting_costs_no_cpu(terminal: Any) -> None:
    screen = terminal("chat")
    screen.wait_for(">")
    time.sleep(0.5)
    before = screen.cpu_seconds()
    time.sleep(1.0)
    assert screen.cpu_seconds() - before < 0.1
