"""Fault cases of the kind "Command line and chat", in processes: pipes, bytes of any kind, and how a process ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.cli.fakes import FAKE
from tests.cli.pseudo_terminal import python

pytestmark = pytest.mark.usefixtures("own_home")


def command(
    *arguments: str, script: dict[str, Any] | None = None, env: dict[str, str] | None = None, **options: Any
) -> Any:
    """Run the command line on the scripted engine in a process of its own."""
    surroundings = {**os.environ, "FAKE_SCRIPT": json.dumps(script or {}), **(env or {})}
    return subprocess.run(python(FAKE, *arguments), capture_output=True, timeout=180, env=surroundings, **options)


def writing(words: int, delay: float) -> subprocess.Popen[bytes]:
    """A process that writes "word " again and again, with so many seconds between."""
    script = json.dumps({"pieces": ["word "] * words, "delay": delay})
    surroundings = {**os.environ, "FAKE_SCRIPT": script}
    arguments = python(FAKE, "generate", "hi")
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=surroundings)


# B025, B152
@pytest.mark.parametrize(
    ("data", "answers"), [(b"", b""), (b"\n", b""), (b"hi\n", b"Hello there.\n"), (b"hi", b"Hello there.\n")]
)
def test_b025_chat_with_a_pipe(data: bytes, answers: bytes) -> None:
    done = command("chat", input=data)
    assert (done.returncode, done.stdout, done.stderr) == (0, answers, b"")


def test_b025_chat_with_stdin_closed() -> None:
    done = command("chat", stdin=None, preexec_fn=lambda: os.close(0))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_b025_chat_without_input_ends_at_once() -> None:
    start = time.monotonic()
    done = command("chat", stdin=subprocess.DEVNULL, script={"delay": 100.0})
    assert done.returncode == 0
    assert time.monotonic() - start < 150  # the fake answer alone would take five minutes


def test_stdout_closed_is_no_crash() -> None:
    done = subprocess.run(
        python(FAKE, "generate", "hi"), stderr=subprocess.PIPE, timeout=180, preexec_fn=lambda: os.close(1), check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


# B154
@pytest.mark.parametrize("argv", [["generate", "hi"], ["generate", "--prompt", "hi"]])
def test_b154_an_open_stdin_is_not_waited_for(argv: list[str]) -> None:
    reader, writer = os.pipe()  # kept open: reading it would block
    try:
        done = command(*argv, stdin=reader)
    finally:
        os.close(reader)
        os.close(writer)
    assert done.stdout == b"Hello there.\n"


# B157
@pytest.mark.parametrize("data", [b"\xff\xfe", b"a\x00b", b"\xed\xa0\x80", b"\xf0\x9f\x91\xa9\xe2\x80\x8d"])
def test_b157_any_bytes_are_a_question(data: bytes) -> None:
    done = command("chat", input=data, script={"echo": True})
    assert done.returncode == 0
    assert done.stdout == data.decode("utf-8", "replace").encode() + b"\n"
    done = command("generate", "-", input=data, script={"echo": True})
    assert done.stdout == data.decode("utf-8", "replace").encode() + b"\n"
    if b"\x00" not in data:
        done = command("generate", os.fsdecode(data), script={"echo": True})
        assert done.returncode == 0
        assert done.stderr == b""


# B158
@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"PYTHONIOENCODING": "cp1252"}, b"\\u4e2d \xe9\n"),
        ({"PYTHONIOENCODING": "ascii"}, b"\\u4e2d \\xe9\n"),
        ({"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"\\u4e2d \\xe9\n"),
        ({"PYTHONUTF8": "1"}, "中 é\n".encode()),
    ],
)
def test_b158_what_the_encoding_lacks_is_escaped(env: dict[str, str], shown: bytes) -> None:
    done = command("generate", "hi", script={"pieces": ["中 ", "é"]}, env=env)
    assert (done.returncode, done.stdout) == (0, shown)
    done = command("generate", "hi", "--json", script={"pieces": ["中 é"]}, env=env)
    assert json.loads(done.stdout)["text"] == "中 é"  # JSON stays exact


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = writing(50, delay=0.05)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(5) == b"word "
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(180) == 141


def test_help_that_nobody_reads_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(python(FAKE, "--help"), stdout=writer, stderr=subprocess.PIPE, timeout=180, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_ends_generate_with_130_and_the_text_so_far() -> None:
    process = writing(100, delay=0.2)
    assert process.stdout is not None
    assert process.stdout.read(5) == b"word "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert len(out) < 200
    assert err == b""
