"""Fault cases of the kind "Command line and chat", with processes, pipes and terminals where the case is about them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import options, runtime
from edgespec.cli.main import build_parser, main
from edgespec.config import RuntimeConfig
from edgespec.decoding.params import SamplingParams
from tests.cli.fakes import FakeEngine, Script
from tests.cli.pseudo_terminal import PseudoTerminal, python

FAKE = "tests.cli.fake_main"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EDGESPEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "PYTHONIOENCODING", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)


def command(
    *arguments: str, script: dict[str, Any] | None = None, env: dict[str, str] | None = None, **options: Any
) -> Any:
    """Run the command line on the scripted engine in a process of its own."""
    surroundings = {**os.environ, "FAKE_SCRIPT": json.dumps(script or {}), **(env or {})}
    return subprocess.run(python(FAKE, *arguments), capture_output=True, timeout=180, env=surroundings, **options)


# B161: each flag of generate, and what it must change. engine = keyword of Engine.from_pretrained, params = field of
# SamplingParams, request = what the engine was asked; anything else is what stdout, stderr or a file shows.
FLAGS: list[tuple[list[str], str, str, Any]] = [
    (["--model", "other"], "engine", "model", "other"),
    (["-m", "other"], "engine", "model", "other"),
    (["--draft", "ngram"], "engine", "drafts", ("ngram",)),
    (["--draft", "ngram", "--draft", "code"], "engine", "drafts", ("ngram", "code")),
    (["--draft", "off"], "engine", "drafts", ()),
    (["--drafts", "code, ngram", "--draft", "math"], "engine", "drafts", ("code", "ngram", "math")),
    (["--drafts", "off"], "engine", "drafts", ()),
    (["--gamma", "3"], "engine", "gamma", 3),
    (["--gamma", "0"], "engine", "gamma", 0),
    (["--threads", "3"], "engine", "threads", 3),
    (["--device", "torch-cpu"], "engine", "device", "torch-cpu"),
    (["--weight-format", "int8"], "engine", "weight_format", "int8"),
    (["--weight-format", "float32"], "engine", "weight_format", "float32"),
    (["--context", "512"], "engine", "context", 512),
    (["--memory-budget", "1GiB"], "engine", "memory_budget", "1GiB"),
    (["--resident", "2"], "engine", "resident", 2),
    (["--policy", "plain"], "engine", "policy", "plain"),
    (["--load-rate", "200MB"], "engine", "load_rate", 200_000_000),
    (["--config", "FILE"], "engine", "gamma", 7),
    (["--max-new-tokens", "9"], "params", "max_new_tokens", 9),
    (["-n", "9"], "params", "max_new_tokens", 9),
    (["--min-new-tokens", "2"], "params", "min_new_tokens", 2),
    (["--temperature", "0.5"], "params", "temperature", 0.5),
    (["--top-k", "5"], "params", "top_k", 5),
    (["--top-p", "0.5"], "params", "top_p", 0.5),
    (["--min-p", "0.1"], "params", "min_p", 0.1),
    (["--repetition-penalty", "1.2"], "params", "repetition_penalty", 1.2),
    (["--frequency-penalty", "0.5"], "params", "frequency_penalty", 0.5),
    (["--presence-penalty", "-0.5"], "params", "presence_penalty", -0.5),
    (["--logit-bias", "5=-3", "--logit-bias", "7=1.5"], "params", "logit_bias", {5: -3.0, 7: 1.5}),
    (["--stop", "END", "--stop", "\n"], "params", "stop", ("END", "\n")),
    (["--stop-token-id", "5", "--stop-token-id", "7"], "params", "stop_token_ids", (5, 7)),
    (["--ignore-eos"], "params", "ignore_eos", True),
    (["--seed", "0"], "params", "seed", 0),
    (["--logprobs", "0"], "params", "logprobs", 0),
    (["--raw"], "request", "raw", True),
    (["--system", "s"], "request", "prompt", [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]),
    (["--json"], "seen", "stdout is json", True),
    (["--stats"], "seen", "stderr", "accepted 75%"),
    (["--quiet"], "seen", "warnings", 0),
    (["-q"], "seen", "warnings", 0),
    (["--no-stream"], "seen", "pieces", 1),
    (["--stream"], "seen", "pieces", 3),
    (["--trace", "FILE"], "seen", "trace", True),
    (["--debug"], "seen", "debug lines", 1),
    (["--prompt", "hi"], "request", "prompt", "hi"),
    (["-p", "hi"], "request", "prompt", "hi"),
    (["--prompt-file", "FILE"], "request", "prompt", "from a file"),
    (["-f", "FILE"], "request", "prompt", "from a file"),
]


# What only commands that serve several requests at once know, or show: flags, setting, value.
SERVING: dict[str, tuple[list[str], Any]] = {
    "max_sessions": (["--max-sessions", "3"], 3),
    "max_queue": (["--max-queue", "9"], 9),
    "kv_memory": (["--kv-memory", "1MiB"], 1 << 20),
    "load_policy": (["--load-policy", "none"], "none"),
    "elastic": (["--no-elastic"], False),
}


@pytest.mark.parametrize("name", SERVING)
def test_b161_flags_about_several_requests_change_what_they_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, value = SERVING[name]
    shown = []
    for words in ([], flags):
        assert main(["config", "--json", *words]) == 0
        shown.append({key: row["value"] for key, row in json.loads(capsys.readouterr().out).items()})
    assert shown[1][name] == value
    assert {key for key in shown[0] if shown[0][key] != shown[1][key]} == {name}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    FakeEngine.reset()
    monkeypatch.setattr(runtime, "engine_class", lambda: FakeEngine)
    return FakeEngine


@pytest.fixture
def observe(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Any:
    """observe(flags) -> what `generate hi FLAGS` did, in the four kinds of FLAGS."""
    import logging

    from edgespec.cli.terminal import Output

    def say() -> str:
        logging.getLogger("edgespec.engine").warning("a draft failed")
        logging.getLogger("edgespec.engine").debug("a detail")
        return "two "

    def run(flags: list[str]) -> dict[str, dict[str, Any]]:
        (tmp_path / "trace.json").unlink(missing_ok=True)
        files = {
            "--config": "settings.toml",
            "--trace": "trace.json",
            "--prompt-file": "prompt.txt",
            "-f": "prompt.txt",
        }
        (tmp_path / "settings.toml").write_text("gamma = 7\n")
        (tmp_path / "prompt.txt").write_text("from a file\n")
        words = [str(tmp_path / files[flags[0]]) if word == "FILE" else word for word in flags]
        pieces: list[str] = []
        write = Output.write
        monkeypatch.setattr(Output, "write", lambda self, text: (pieces.append(text), write(self, text))[1])
        engine.reset(Script(pieces=["one ", say, "three"]))
        prompt = [] if flags[:1] in (["--prompt"], ["-p"], ["--prompt-file"], ["-f"]) else ["hi"]
        assert main(["generate", *prompt, *words]) == 0
        monkeypatch.setattr(Output, "write", write)
        captured = capsys.readouterr()
        return {
            "engine": engine.loads[0],
            "params": {name: getattr(engine.requests[0]["params"], name) for name in options.SAMPLING},
            "request": {key: engine.requests[0][key] for key in ("prompt", "raw")},
            "seen": {
                "stdout is json": captured.out.startswith("{"),
                "stderr": captured.err,
                "warnings": captured.err.count("warning: a draft failed"),
                "debug lines": captured.err.count("debug: a detail"),
                "pieces": len(pieces),
                "trace": (tmp_path / "trace.json").exists(),
            },
        }

    return run


@pytest.mark.parametrize(("flags", "where", "name", "value"), FLAGS, ids=[" ".join(row[0]) for row in FLAGS])
def test_b161_every_flag_changes_what_it_names(
    observe: Any, flags: list[str], where: str, name: str, value: Any
) -> None:
    plain, changed = observe([]), observe(flags)
    if name == "stderr":
        assert value in changed[where][name]
        assert value not in plain[where][name]
        return
    assert changed[where][name] == value
    if flags[0] in ("--stream", "--prompt", "-p"):  # these say what happens anyway
        assert plain == changed
        return
    assert plain[where][name] != value
    # and it changes nothing else that reaches the engine
    for kind in ("engine", "params", "request"):
        for key in plain[kind]:
            assert (kind, key) == (where, name) or plain[kind][key] == changed[kind][key]


def test_b161_no_flag_is_left_out_of_the_table() -> None:
    known = set(build_parser([]).commands["generate"]._option_string_actions)
    tested = {word for flags, *_ in FLAGS for word in flags if word.startswith("-")}
    assert known - tested == {"-h", "--help"}
    assert {name for _, where, name, _ in FLAGS if where == "params"} == set(SamplingParams.__dataclass_fields__)
    assert {row.key for row in RuntimeConfig().describe()} - {
        name for _, where, name, _ in FLAGS if where == "engine"
    } == {"home", "policy_memory", *SERVING}


@pytest.mark.parametrize("name", ["chat", "demo", "doctor", "config"])
def test_b161_commands_share_their_flags(name: str) -> None:
    commands = build_parser([]).commands
    engine_flags = {word for flags, where, *_ in FLAGS if where == "engine" for word in flags if word.startswith("-")}
    assert engine_flags <= set(commands[name]._option_string_actions)
    if name == "chat":
        sampling = {word for flags, where, *_ in FLAGS if where == "params" for word in flags if word.startswith("--")}
        assert sampling <= set(commands[name]._option_string_actions)


def test_b161_flags_of_chat_reach_the_engine(engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi"), encoding="utf-8"))
    assert main(["chat", "--gamma", "3", "--draft", "off", "--top-k", "5", "--stop", "END", "--system", "s"]) == 0
    assert engine.loads[0]["gamma"] == 3
    assert engine.loads[0]["drafts"] == ()
    assert engine.requests[0]["params"] == SamplingParams(top_k=5, stop=("END",))
    assert engine.requests[0]["prompt"][0] == {"role": "system", "content": "s"}


# B193
def test_b193_the_settings_in_force_and_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("gamma = 7\nthreads = 3\n")
    monkeypatch.setenv("EDGESPEC_THREADS", "5")
    assert main(["config", "--config", str(file), "--draft", "off", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gamma"] == {"value": 7, "source": f"file {file}"}
    assert found["threads"] == {"value": 5, "source": "environment variable EDGESPEC_THREADS"}
    assert found["drafts"]["value"] == []
    assert found["device"] == {"value": "auto", "source": "default"}
    assert main(["config", "--config", str(file), "--draft", "off"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"gamma         = 7  (file {file})" in lines
    assert "drafts        = off  (argument drafts)" in lines
    assert any(line.startswith("home ") and str(tmp_path / "home") in line for line in lines)


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
    process = subprocess.Popen(
        python(FAKE, "generate", "hi"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "FAKE_SCRIPT": json.dumps({"pieces": ["word "] * 50, "delay": 0.05})},
    )
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
    process = subprocess.Popen(
        python(FAKE, "generate", "hi"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "FAKE_SCRIPT": json.dumps({"pieces": ["word "] * 100, "delay": 0.2})},
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == b"word "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert len(out) < 200
    assert err == b""


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
