"""`edgespec serve`: flags, what is refused before a model is loaded, and a real process that is told to end."""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import serve
from edgespec.cli.main import build_parser, main
from edgespec.server import lifecycle
from edgespec.server.settings import MIB
from tests.cli.fakes import FakeEngine

ROOT = Path(__file__).parents[2]


def parsed(*words: str) -> argparse.Namespace:
    return build_parser(["serve"]).parse_args(["serve", *words])


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.KEY_VARIABLE, "from-environment")
    words = ["--host", "0.0.0.0", "--port", "0", "--allow-origin", "https://a.example", "--allow-host", "board.lan"]
    limits = ["--max-body", "2MiB", "--max-prompt-tokens", "9", "--max-connections", "7", "--request-timeout", "5"]
    more = ["--header-timeout", "1", "--body-timeout", "2", "--idle-timeout", "3", "--stall-timeout", "4"]
    args = parsed(*words, *limits, *more, "--grace", "1.5", "--model-name", "m")
    settings = serve.server_settings(args, {"temperature": 0.5})
    assert (settings.host, settings.port, settings.api_key) == ("0.0.0.0", 0, "from-environment")
    assert (settings.allow_origins, settings.allow_hosts) == (("https://a.example",), ("board.lan",))
    assert (settings.grace_seconds, settings.model_name, settings.defaults) == (1.5, "m", {"temperature": 0.5})
    one = settings.limits
    assert (one.body_bytes, one.prompt_tokens, one.connections, one.request_seconds) == (2 * MIB, 9, 7, 5)
    assert (one.header_seconds, one.body_seconds, one.idle_seconds, one.stall_seconds) == (1, 2, 3, 4)
    assert serve.server_settings(parsed("--api-key", "flag"), {}).api_key == "flag"


@pytest.mark.parametrize(("words", "wanted"), [([], 512), (["--max-queue", "1000"], 8 + 1000 + 64)])
def test_all_that_may_wait_may_be_connected(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str],
    wanted: int,
) -> None:  # fmt: skip
    """Else a full queue could never say so: the client would be turned away before."""
    seen: list[Any] = []
    monkeypatch.setattr(lifecycle, "serve", lambda *arguments: seen.append(arguments[1]) or 1)
    monkeypatch.setattr(lifecycle, "room_for_connections", lambda wanted: None)
    assert main(["serve", "--port", "0", *words]) == 0
    assert seen[0].limits.connections == wanted
    assert "--max-connections" not in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--max-connections", "100"]) == 0
    assert "less than the 328 that --max-sessions and --max-queue can use" in capsys.readouterr().err


def test_an_empty_key_in_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.KEY_VARIABLE, "")
    assert serve.server_settings(parsed(), {}).api_key is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", ""], "API key"),
        (["--port", "99999"], "port 99999"),
        (["--port", "x"], "--port"),
        (["--allow-origin", "*"], "every web page"),
        (["--max-body", "lots"], "--max-body 'lots': give bytes"),
        (["--max-body", "0"], "--max-body '0': give bytes"),
        (["--host", "nohost.invalid", "--api-key", "x"], "as --host"),
        (["--max-connections", "0"], "connections"),
        (["--max-sessions", "99"], "max_sessions"),
        (["--temperature", "-1"], "temperature"),
        (["--grace", "-1"], "grace"),
    ],
)
def test_wrong_flags_load_nothing(
    engine: type[FakeEngine], argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *argv]) == 2
    assert words in capsys.readouterr().err
    assert not engine.loads


def test_what_reaches_the_server(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(lifecycle, "serve", lambda *arguments: seen.append(arguments) or 1)
    assert main(["serve", "--port", "0", "--temperature", "0.7", "--logprobs", "3", "--max-sessions", "3", "-q"]) == 0
    assert seen[0][1].defaults == {"temperature": 0.7}
    assert engine.loads[0]["max_sessions"] == 3
    assert engine.closed == 1
    seen[0][4]()
    assert capsys.readouterr().out.startswith("edgespec serves http://127.0.0.1:")
    monkeypatch.setattr(lifecycle, "serve", lambda *arguments: 2)
    assert main(["serve", "--port", "0", "-q"]) == 130


def test_without_the_extra(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert main(["serve"]) == 2
    assert "needs uvicorn: pip install 'edgespec[serve]'" in capsys.readouterr().err


SERVER = """
import sys
from edgespec.cli import runtime
from edgespec.cli.main import main
from tests.server.fakes import FakeEngine
from contextlib import contextmanager

@contextmanager
def open_engine(args, config):
    yield FakeEngine()
    print("closed", flush=True)

runtime.open_engine, runtime.describe = open_engine, lambda engine, config: "fake"
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_ends_in_order(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[2].rstrip("/").rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        assert json.load(connection.getresponse())["choices"][0]["message"]["content"] == "Hello there."
        process.send_signal(number)  # the connection is open and idle
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "closed" in out
    assert err == "fake\n"
