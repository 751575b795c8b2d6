"""A server on a free port of loopback, in a thread of the test's own process."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from edgespec.server import lifecycle
from edgespec.server.app import App
from edgespec.server.settings import ServerSettings
from tests.server.fakes import FakeEngine, Script

CHAT = "/v1/chat/completions"


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]  # type: ignore[no-any-return]

    @property
    def events(self) -> list[Any]:
        """Of a stream: the objects of all `data:` lines; the last one, [DONE], must be there and is left out."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


class Running:
    """A server that runs, and a client for it."""

    def __init__(self, script: Script | None, settings: ServerSettings, sock: socket.socket | None = None) -> None:
        self.engine = FakeEngine(script)
        self.socks = [sock] if sock else lifecycle.listen(settings)
        self.port = self.socks[0].getsockname()[1]
        self.app = App(self.engine, settings)
        self.lines: list[str] = []
        self.server = lifecycle.Server(self.app, self.lines.append)
        self.thread = threading.Thread(target=self.server.run, args=(self.socks,), daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**({"content-type": "application/json"} if data is not None else {}), **(headers or {})}
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def chat(self, **fields: Any) -> Answer:
        return self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})

    def open(self, data: bytes = b"") -> socket.socket:
        """A raw connection that has sent `data`."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        sock.sendall(data)
        return sock

    def close(self) -> None:
        if self.engine.script.gate is not None:
            self.engine.script.gate.release(1000)
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.app.close()
        for sock in self.socks:
            sock.close()
        self.engine.wait()


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(script=None, sock=None, **settings)`: servers that end with the test."""
    running: list[Running] = []

    def make(script: Script | None = None, sock: socket.socket | None = None, **settings: Any) -> Running:
        running.append(Running(script, ServerSettings(port=0, **settings), sock))
        return running[-1]

    yield make
    for one in running:
        one.close()


@pytest.fixture(scope="session")
def _shared() -> Iterator[Running]:
    running = Running(None, ServerSettings(port=0))
    yield running
    running.close()


@pytest.fixture
def server(_shared: Running) -> Running:
    """A server without a key, one for all tests; its engine has a new script and no requests."""
    _shared.engine.reset()
    return _shared


def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    """Wait for it; the time is only there to end a test that is broken."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


def request_bytes(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def until_sent(sock: socket.socket, end: bytes | None) -> bytes:
    """All that comes until `end` does, or until the connection is closed."""
    text = b""
    while end is None or end not in text:
        data = sock.recv(65536)
        if not data:
            assert end is None, f"the connection ended after {text!r}"
            break
        text += data
    return text


def ended(sock: socket.socket) -> bool:
    """Whether the server ends the connection, whatever it said before."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True
