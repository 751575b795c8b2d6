"""Fault cases of the kind "Command line and chat": what each flag changes, and where each setting comes from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import options, runtime
from edgespec.cli.main import build_parser, main
from edgespec.config import RuntimeConfig
from edgespec.decoding.params import SamplingParams
from tests.cli.fakes import FakeEngine, Script

pytestmark = pytest.mark.usefixtures("own_home")


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
