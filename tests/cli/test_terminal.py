"""Output: what reaches a terminal, a pipe, and a stream that cannot encode the text."""

from __future__ import annotations

import io
import os
import signal
import sys

import pytest

from edgespec.cli.terminal import Output, interrupt_calls, is_terminal, neutralise, replace_surrogates


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Output, "_terminal_mid_line", False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("bell\a back\b null\0 del\x7f", "bell\\x07 back\\x08 null\\x00 del\\x7f"),
        ("\x9b31m", "\\x9b31m"),  # the one-character form of ESC [
        ("over\rwrite", "over\\x0dwrite"),
        ("two\r\nlines\tand a tab\n", "two\nlines\tand a tab\n"),
        ("ďčř 中文 👩‍👩‍👧", "ďčř 中文 👩‍👩‍👧"),
    ],
)
def test_a_terminal_is_never_driven_by_text(text: str, shown: str) -> None:
    assert neutralise(text) == shown
    stream = Terminal()
    Output(stream).write(text)
    assert stream.getvalue() == shown


def test_a_pipe_gets_the_exact_text() -> None:
    stream = io.StringIO()
    Output(stream).write("\x1b[1m a\r\nb\0")
    assert stream.getvalue() == "\x1b[1m a\r\nb\0"


def test_own_lines_are_neutralised_too() -> None:
    stream = Terminal()
    Output(stream).line("no file '\x1b[31m'")
    assert stream.getvalue() == "no file '\\x1b[31m'\n"


# B158
@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("cp1252", b"\\u4e2d \xe9 \\ud800\n"),
        ("ascii", b"\\u4e2d \\xe9 \\ud800\n"),
        ("utf-8", b"\xe4\xb8\xad \xc3\xa9 \\ud800\n"),
    ],
)
def test_what_cannot_be_encoded_is_escaped(encoding: str, shown: bytes) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    Output(stream).line("中 é \ud800")
    assert raw.getvalue() == shown


def test_dim_only_where_colours_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def dim() -> str:
        stream = Terminal()
        Output(stream).line("status", dim=True)
        return stream.getvalue()

    assert dim() == "\x1b[2mstatus\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert dim() == "status\n"
    monkeypatch.setenv("NO_COLOR", "")  # empty means nothing was said
    assert dim() == "\x1b[2mstatus\x1b[0m\n"
    monkeypatch.setenv("TERM", "dumb")
    assert dim() == "status\n"


def test_own_lines_begin_on_a_fresh_line() -> None:
    stream = io.StringIO()
    output = Output(stream)
    output.write("answer")
    output.line("status")
    output.write("answer\n")
    output.line("status")
    assert stream.getvalue() == "answer\nstatus\nanswer\nstatus\n"


def test_a_warning_on_the_same_screen_begins_on_a_fresh_line() -> None:
    screen = Terminal()
    Output(screen).write("half an ans")
    Output(screen).line("warning: draft failed")
    assert screen.getvalue() == "half an ans\nwarning: draft failed\n"
    pipe = io.StringIO()
    Output(screen).write("half an ans")
    Output(pipe).line("warning: draft failed")
    assert pipe.getvalue() == "warning: draft failed\n"


def test_a_missing_or_closed_stream_is_no_terminal() -> None:
    closed = io.StringIO()
    closed.close()
    assert not is_terminal(None)
    assert not is_terminal(closed)
    Output(None).line("into the void")


def test_lone_surrogates_become_replacement_characters() -> None:
    assert replace_surrogates("a\udcffb\ud83d") == "a\ufffdb\ufffd"
    assert replace_surrogates("👩 ok") == "👩 ok"


def test_first_interrupt_cancels_and_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    calls: list[int] = []
    with interrupt_calls(lambda: calls.append(1)) as pressed:
        assert not pressed.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed.is_set()
        assert calls == [1]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_stdout_is_looked_up_when_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    from edgespec.cli.terminal import stdout

    stdout().line("here")
    assert capsys.readouterr().out == "here\n"
    assert sys.stdout is not None
