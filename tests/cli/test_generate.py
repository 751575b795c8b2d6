"""`edgespec generate` on a scripted engine: where the prompt comes from, what is printed, how it ends."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.main import main
from tests.cli.fakes import FakeEngine, Script


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def asked(engine: type[FakeEngine]) -> Any:
    assert len(engine.requests) == 1
    return engine.requests[0]["prompt"]


def test_the_answer_and_nothing_else_is_on_stdout(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello there.\n"
    assert captured.err == ""
    assert asked(engine) == "hi"
    assert engine.closed == 1


def test_pieces_are_printed_as_they_come(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def look() -> str:
        seen.append(capsys.readouterr().out)
        return "two"

    engine.reset(Script(pieces=["one ", look]))
    assert main(["generate", "hi"]) == 0
    assert seen == ["one "]
    assert capsys.readouterr().out == "two\n"
    seen.clear()
    engine.reset(Script(pieces=["one ", look]))
    assert main(["generate", "hi", "--no-stream"]) == 0
    assert seen == [""]
    assert capsys.readouterr().out == "one two\n"


def test_no_second_newline(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    engine.reset(Script(pieces=["line\n"]))
    assert main(["generate", "hi"]) == 0
    assert capsys.readouterr().out == "line\n"


# B157
@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"hi", "hi"),
        (b"hi\n", "hi"),
        (b"two\r\nlines\r\n", "two\nlines"),
        (b"\xef\xbb\xbfhi\n\n", "hi\n"),
        (b"bad \xff byte", "bad \ufffd byte"),
        (b"nul \x00 byte", "nul \x00 byte"),
        (b"surrogate \xed\xa0\x80", "surrogate \ufffd\ufffd\ufffd"),
    ],
)
def test_prompt_on_stdin(engine: type[FakeEngine], data: bytes, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, data)
    assert main(["generate", "-"]) == 0
    assert asked(engine) == prompt


def test_a_raw_prompt_is_exact(engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stdin(monkeypatch, b"two\r\nlines\r\n\n")
    assert main(["generate", "-", "--raw"]) == 0
    assert engine.requests[-1]["raw"] is True
    assert asked(engine) == "two\r\nlines\r\n\n"
    engine.reset()
    file = tmp_path / "prompt.txt"
    file.write_bytes(b" \n")
    assert main(["generate", "--prompt-file", str(file), "--raw"]) == 0
    assert asked(engine) == " \n"


@pytest.mark.parametrize("data", [b"", b"\n", b"  \n\t"])
def test_empty_stdin_is_named(
    engine: type[FakeEngine], data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, data)
    assert main(["generate", "-"]) == 2
    assert "The prompt on stdin is empty" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)  # closed by the shell
    assert main(["generate", "-"]) == 2


# B154
def test_stdin_is_not_read_when_a_prompt_is_given(engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            pytest.fail(f"stdin.{name} was used")

    monkeypatch.setattr(sys, "stdin", Untouchable())
    for argv in (["generate", "hi"], ["generate", "--prompt", "hi"]):
        assert main(argv) == 0
    assert [request["prompt"] for request in engine.requests] == ["hi", "hi"]


@pytest.mark.parametrize(
    ("argument", "prompt"), [("a\udcffb", "a\ufffdb"), ("\ud83d", "\ufffd"), ("-5 plus 3", "-5 plus 3"), ("-", "-")]
)
def test_any_text_can_be_a_prompt(engine: type[FakeEngine], argument: str, prompt: str) -> None:
    assert main(["generate", f"--prompt={argument}"]) == 0
    assert asked(engine) == prompt


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a\x00b", "NUL"),
        (b"a\xff", "not UTF-8 text (byte 1)"),
        (b"", "is empty"),
        (b"x" * ((1 << 20) + 1), "larger than 1,048,576 bytes"),
    ],
)
def test_prompt_files_that_are_no_text(
    engine: type[FakeEngine], data: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(data)
    assert main(["generate", "--prompt-file", str(file)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "prompt.bin" in err
    assert main(["generate", "--prompt-file", str(tmp_path)]) == 2


def test_system_message(engine: type[FakeEngine]) -> None:
    assert main(["generate", "hi", "--system", "be terse"]) == 0
    assert asked(engine) == [{"role": "system", "content": "be terse"}, {"role": "user", "content": "hi"}]


def test_json_is_one_exact_object(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    engine.reset(Script(pieces=["\x1b[1m 中", "\ud83d\r\n\0"]))
    assert main(["generate", "hi", "--json", "--logprobs", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.isascii()
    assert captured.out.count("\n") == 1
    found = json.loads(captured.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert found["text"] == "\x1b[1m 中\ud83d\r\n\0"
    assert found["token_ids"] == [0, 1]
    assert found["finish_reason"] == "stop"
    assert found["stats"]["gamma_histogram"] == {"4": 2}
    assert found["logprobs"][0]["top"] == [[0, -0.5], [99, None]]  # minus infinity has no word in JSON


def test_ctrl_c_keeps_what_there_is(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    def press() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "two "

    engine.reset(Script(pieces=["one ", press, "three"]))
    assert main(["generate", "hi"]) == 130
    assert capsys.readouterr().out == "one two \n"
    engine.reset(Script(pieces=["one ", press, "three"]))
    assert main(["generate", "hi", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["finish_reason"]) == ("one two ", "cancelled")


def test_a_cut_answer_is_mentioned(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    engine.reset(Script(finish="length"))
    assert main(["generate", "hi", "-n", "3"]) == 0
    assert "cut at max_new_tokens = 3" in capsys.readouterr().err
    for flag in ("--quiet", "--json"):
        assert main(["generate", "hi", "-n", "3", flag]) == 0
        assert capsys.readouterr().err == ""


def test_warnings_are_single_lines_and_quiet_hides_them(
    engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    def warn() -> str:
        logging.getLogger("edgespec.decoding").warning("draft code failed: %s", "it is cut short")
        return "two"

    engine.reset(Script(pieces=["one ", warn]))
    assert main(["generate", "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "warning: draft code failed: it is cut short\n"
    assert captured.out == "one two\n"
    assert main(["generate", "hi", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
