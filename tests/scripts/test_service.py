"""service/: the unit, its installer, the memory check, and the server behind the socket."""

from __future__ import annotations

import configparser
import importlib.util
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edgespec import Engine, SamplingParams
from tests.scripts.boards import SCRIPTS, Stubs, make_board, run, snapshot
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE, load

UNIT = "etc/systemd/system/edgespec.service"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    return tmp_path / "venv"


def install(root: Path, stubs: Stubs, venv: Path, *arguments: str, code: int = 0) -> str:
    done = run("service/install.sh", "--root", str(root), "--venv", str(venv), "--user", "me", *arguments, stubs=stubs)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_install_again_and_remove(root: Path, stubs: Stubs, venv: Path) -> None:
    before = snapshot(make_board(root, "nano-8"))
    stubs.add("systemctl")
    assert "Nothing was changed" in install(root, stubs, venv)
    assert snapshot(root) == before
    assert stubs.calls == []
    install(root, stubs, venv, "--apply")
    unit = configparser.RawConfigParser(strict=False)
    unit.read_string((root / UNIT).read_text())
    service = unit["Service"]
    assert "@" not in (root / UNIT).read_text().split("[Unit]")[1]
    assert service["User"] == "me"
    assert service["ExecStart"].startswith(f"{venv}/bin/python {SCRIPTS}/service/answer_server.py")
    assert int(service["OOMScoreAdjust"]) > 0
    for key in ("ExecStart", "ExecStartPre"):
        assert all(Path(word).exists() for word in service[key].split() if word.startswith(str(SCRIPTS)))
    assert stubs.calls == ["systemctl daemon-reload", "systemctl enable --now edgespec.service"]
    assert "nothing to do" in install(root, stubs, venv, "--apply")
    install(root, stubs, venv, "remove", "--apply")
    assert snapshot(root) == before
    assert "not installed" in install(root, stubs, venv, "remove", "--apply")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--user", "a b"], "no user name"),
        (["--venv", "/x/|y"], "full path"),
        (["--venv", "/not/there"], "run setup.sh"),
    ],
)
def test_wrong_arguments(root: Path, stubs: Stubs, venv: Path, arguments: list[str], words: str) -> None:
    before = snapshot(make_board(root, "nano-8"))
    assert words in install(root, stubs, venv, *arguments, "--apply", code=1)
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("wanted", "code", "words"),
    [("", 0, "5942 MB are free"), ("5942", 0, "5942"), ("5943", 1, "5943 are wanted"), ("much", 1, "must be a number")],
)
def test_the_memory_check(root: Path, wanted: str, code: int, words: str) -> None:
    env = {"MIN_FREE_MB": wanted} if wanted else {}
    done = run("service/check_memory.sh", "--root", str(make_board(root, "nano-8")), env=env)
    assert done.returncode == code
    assert words in done.stdout + done.stderr


def test_a_memory_check_that_cannot_know_fails(root: Path) -> None:
    assert run("service/check_memory.sh", "--root", str(root)).returncode == 1


@pytest.fixture(scope="module")
def server() -> ModuleType:
    spec = importlib.util.spec_from_file_location("answer_server", SCRIPTS / "service/answer_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(tmp_path_factory.mktemp("home")))
        with load(write_tiny(tmp_path_factory.mktemp("model"), **SHAPE), drafts=["ngram"], context=128) as loaded:
            yield loaded


@pytest.fixture
def client(server: ModuleType, engine: Engine, tmp_path: Path) -> Iterator[socket.socket]:
    path = tmp_path / "s"
    path.touch()  # left by an earlier service
    with server.open_socket(path) as listening:
        assert path.stat().st_mode & 0o777 == 0o660
        threading.Thread(target=server.serve, args=(engine, listening), daemon=True).start()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(path))
            yield connection


def ask(client: socket.socket, *lines: bytes) -> list[dict[str, Any]]:
    client.sendall(b"".join(line + b"\n" for line in lines))
    with client.makefile("rb") as replies:
        return [json.loads(replies.readline()) for _ in lines]


def test_lines_are_answered_whatever_came_before(client: socket.socket, engine: Engine) -> None:
    question = json.dumps({"prompt": "the hen", "max_new_tokens": 5, "ignore_eos": True}).encode()
    first, *wrong, last = ask(
        client, question, b"no json", b"[1]", b"{}", b'{"prompt": "x", "frobnicate": 1}', b'{"prompt": ""}', question
    )
    expected = engine.generate("the hen", SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert first["text"] == last["text"] == expected.text
    assert first["finish_reason"] == "length"
    assert [set(reply) for reply in wrong[:4]] == [{"error"}] * 4


def test_a_client_that_goes_away_does_not_end_the_service(
    client: socket.socket, server: ModuleType, tmp_path: Path
) -> None:
    client.sendall(b'{"prompt": "half')
    client.close()
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(30)
        other.connect(str(tmp_path / "s"))
        assert ask(other, b"no json")[0]["error"]
