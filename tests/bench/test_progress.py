"""How far a long command is, where the output is no terminal."""

from __future__ import annotations

import io

import pytest

from edgespec.bench import progress
from edgespec.bench.progress import LINE_SECONDS, Lines, no_progress
from edgespec.bench.words import are, counted, duration, were


def test_a_log_gets_a_line_now_and_then_and_one_that_is_quick_none() -> None:
    out, now = io.StringIO(), [100.0]
    lines = Lines(108, out, now=lambda: now[0])
    lines.say("plain: question 1")
    lines.advance(3)
    now[0] += LINE_SECONDS - 1
    lines.say("plain: question 2")
    assert out.getvalue() == ""
    now[0] += 2
    lines.advance(9)
    lines.say("memspec: question 3")
    assert out.getvalue() == "12 of 108: plain: question 2\n"
    now[0] += LINE_SECONDS
    lines.say("memspec:\x1b[2J question 3")
    assert out.getvalue().splitlines()[1:] == ["12 of 108: memspec:?[2J question 3"], "a terminal may be shown it later"


def test_without_a_stream_nothing_is_said() -> None:
    now = [0.0]
    lines = Lines(1, None, now=lambda: now[0])
    now[0] = 1e6
    lines.say("x")
    lines.advance(1)


def test_a_command_writes_lines_to_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with progress.progress(2) as (say, advance):
        say("one")
        advance(1)
    assert capsys.readouterr().err == "0 of 2: one\n1 of 2: one\n"
    with no_progress(2) as (say, advance):
        say("one")
        advance(1)
    assert capsys.readouterr().err == ""


def test_counts_in_sentences() -> None:
    assert [counted(n, "line") for n in (0, 1, 2, 1000)] == ["0 lines", "1 line", "2 lines", "1,000 lines"]
    assert (counted(1, "stretch", "stretches"), counted(2, "stretch", "stretches")) == ("1 stretch", "2 stretches")
    assert (are(1), are(0), were(1), were(2)) == ("is", "are", "was", "were")
    assert [duration(s) for s in (40.2, 700, 11100)] == ["40 s", "12 min", "3 h 05 min"]
