"""Start, draining, grace, and signals."""

from __future__ import annotations

import json
import signal
import socket
import threading
from typing import Any

import pytest

from edgespec.errors import ConfigError
from edgespec.server import lifecycle
from edgespec.server.settings import ServerSettings
from tests.server.conftest import CHAT, Running, Start, ended, request_bytes, until, until_sent
from tests.server.fakes import Script

ASK = {"messages": [{"role": "user", "content": "hi"}]}


def in_thread(server: Running, **fields: Any) -> tuple[threading.Thread, list[Any]]:
    """A chat that is on its way: its first piece is there."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.chat(**fields)))
    thread.start()
    assert server.engine.arrived.acquire(timeout=10)
    until(lambda: server.engine.requests[-1]._deltas)
    return thread, answers


def test_a_running_answer_finishes_and_new_ones_are_refused(start: Start) -> None:
    server = start(Script(gate=threading.Semaphore(1)), grace_seconds=60)
    thread, answers = in_thread(server)
    server.server.handle_exit(signal.SIGTERM, None)
    refused = server.chat()
    assert (refused.status, refused.error["code"]) == (503, "unavailable")
    assert refused.headers["retry-after"] == "5"
    assert server.ask("/health").status == 503
    assert server.thread.is_alive()
    server.engine.script.gate.release(10)  # type: ignore[union-attr]
    thread.join(10)
    assert answers[0].json["choices"][0]["message"]["content"] == "Hello there."
    server.thread.join(10)
    assert not server.thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_after_the_grace_answers_are_ended_with_what_there_is(start: Start, stream: bool) -> None:
    server = start(Script(gate=threading.Semaphore(1)), grace_seconds=0)
    thread, answers = in_thread(server, stream=stream)
    server.server.handle_exit(signal.SIGINT, None)
    thread.join(10)
    server.thread.join(10)
    assert not server.thread.is_alive()
    if stream:
        last = answers[0].events[-1]
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        last = answers[0].json
        assert last["choices"][0]["message"]["content"] == "Hello"
    assert last["edgespec"]["cancelled"] == "shutdown"
    assert any("cancelling 1" in line for line in server.lines)


def test_what_is_still_encoded_is_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd prompt takes seconds, and its client has as much right to an answer as others."""
    monkeypatch.setattr(lifecycle, "_LAST_SECONDS", 0.05)
    server = start(grace_seconds=60)
    began, go, encode = threading.Event(), threading.Event(), server.engine.encode

    def slowly(prompt: Any, *, raw: bool = False) -> list[int]:
        began.set()
        assert go.wait(10)
        return encode(prompt, raw=raw)

    server.engine.encode = slowly  # type: ignore[method-assign]
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.chat()))
    thread.start()
    assert began.wait(10)
    server.server.handle_exit(signal.SIGTERM, None)
    server.thread.join(0.5)  # several ticks
    assert server.lines == ["answers that still run: 1; waiting up to 60 s, another signal (Ctrl-C) ends them now"]
    go.set()
    thread.join(10)
    assert answers[0].status == 200
    server.thread.join(10)
    assert not server.thread.is_alive()


def test_what_is_encoded_when_the_grace_ends_is_cancelled(start: Start) -> None:
    server = start(Script(gate=threading.Semaphore(0)), grace_seconds=0)
    began, go = threading.Event(), threading.Event()
    server.engine.encode = lambda prompt, raw: began.set() or (go.wait(10) and [1])  # type: ignore[method-assign, assignment]
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.chat()))
    thread.start()
    assert began.wait(10)
    server.server.handle_exit(signal.SIGTERM, None)
    until(lambda: server.lines)
    go.set()
    thread.join(10)
    assert (answers[0].status, answers[0].error["code"]) == (503, "unavailable")


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_signal_ends_the_grace(start: Start, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    server = start(Script(gate=threading.Semaphore(1)), grace_seconds=600)
    thread, answers = in_thread(server, stream=stream)
    server.server.handle_exit(signal.SIGINT, None)
    server.server.handle_exit(signal.SIGINT, None)
    thread.join(10)
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert server.server.signals == 2
    last = answers[0].events[-1] if stream else answers[0].json
    assert last["edgespec"]["cancelled"] == "shutdown"
    assert not caplog.records


@pytest.mark.parametrize("said", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_does_not_end_an_answer_does_not_hold_the_server(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: int, stream: bool
) -> None:
    """Clients that were not answered yet are told, in OpenAI's form; nothing is logged, it is nobody's fault."""
    monkeypatch.setattr(lifecycle, "_HURRIED_SECONDS", 0.05)
    server = start(Script(gate=threading.Semaphore(said)), grace_seconds=600)
    monkeypatch.setattr(server.engine, "_wake", lambda: None)  # a cancel has no effect
    with server.open(request_bytes(CHAT, json.dumps({**ASK, "stream": stream}).encode())) as sock:
        assert server.engine.arrived.acquire(timeout=10)
        until(lambda: len(server.engine.requests[0]._deltas) == said)
        begun = until_sent(sock, b"Hello") if stream and said else b""
        for _ in range(2):
            server.server.handle_exit(signal.SIGTERM, None)
        server.thread.join(10)
        assert not server.thread.is_alive()
        if begun:  # it breaks off
            assert ended(sock)
        else:
            head, _, body = until_sent(sock, None).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert json.loads(body)["error"]["code"] == "unavailable"
    assert not caplog.records


def test_a_third_signal_ends_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_HURRIED_SECONDS", 600)
    server = start(Script(gate=threading.Semaphore(1)), grace_seconds=600)
    monkeypatch.setattr(server.engine, "_wake", lambda: None)
    with server.open(request_bytes(CHAT, json.dumps(ASK).encode())):
        assert server.engine.arrived.acquire(timeout=10)
        for _ in range(3):
            server.server.handle_exit(signal.SIGTERM, None)
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_a_body_that_is_still_coming_is_not_waited_for(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(grace_seconds=600)
    ask = request_bytes(CHAT, json.dumps(ASK).encode())
    with server.open(ask[:-5]) as sock, server.open(ask[:20]) as beginning:
        until(lambda: server.server.server_state.tasks)
        assert server.app.busy == 0
        server.server.handle_exit(signal.SIGTERM, None)
        text = until_sent(sock, None)
        assert text.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"unavailable"' in text
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert ended(beginning)
    assert not server.engine.submitted
    assert not caplog.records


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_is_closed_after_its_last_answer(start: Start, stream: bool) -> None:
    """Also while another answer holds the server up: a client may read until the end."""
    gates = threading.Semaphore(1), threading.Semaphore(0)
    server = start(Script(["Hello", " there"], gate=gates[0]), grace_seconds=600)
    with server.open(request_bytes(CHAT, json.dumps({**ASK, "stream": stream}).encode())) as sock:
        assert server.engine.arrived.acquire(timeout=10)
        until(lambda: server.engine.requests[0]._deltas)
        if stream:
            until_sent(sock, b"Hello")
        server.engine.script = Script(gate=gates[1])
        other = threading.Thread(target=server.chat)
        other.start()
        assert server.engine.arrived.acquire(timeout=10)
        server.server.handle_exit(signal.SIGTERM, None)
        gates[0].release()
        text = until_sent(sock, None)
        assert b" there" in text
        assert stream or b"\r\nconnection: close\r\n" in text  # the head of a stream was out before
    assert server.thread.is_alive()
    gates[1].release(10)
    other.join(10)
    server.thread.join(10)
    assert not server.thread.is_alive()


def test_a_port_that_is_taken() -> None:
    (sock,) = lifecycle.listen(ServerSettings(port=0))
    with sock:
        sock.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
            lifecycle.listen(ServerSettings(port=sock.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen on"):
        lifecycle.listen(ServerSettings(host="no.such.host.invalid", api_key="k"))


def resolved(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Let every name stand for these addresses of IPv4."""

    def found(_host: str, port: int, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_a_name_of_several_addresses_is_served_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, "127.0.0.1", "127.0.0.2", "127.0.0.1")
    socks = lifecycle.listen(ServerSettings(host="localhost", port=0))
    names = [sock.getsockname() for sock in socks]
    for sock in socks:
        sock.close()
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
    assert names[0][1] == names[1][1] > 0


def test_an_address_that_the_machine_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, "192.0.2.1", "127.0.0.1")  # the first is for documentation only
    (sock,) = lifecycle.listen(ServerSettings(host="board.lan", port=0, api_key="k"))
    with sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    resolved(monkeypatch, "192.0.2.1")
    with pytest.raises(ConfigError, match="cannot listen on"):
        lifecycle.listen(ServerSettings(host="board.lan", port=0, api_key="k"))


def test_localhost_is_never_an_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, "0.0.0.0")
    with pytest.raises(ConfigError, match="cannot listen on localhost:0"):
        lifecycle.listen(ServerSettings(host="localhost", port=0))


def test_a_port_that_is_taken_at_one_of_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, "127.0.0.1", "127.0.0.2")
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.listen()
        with pytest.raises(ConfigError, match="cannot listen on localhost"):
            lifecycle.listen(ServerSettings(host="localhost", port=other.getsockname()[1]))


def test_urls() -> None:
    (sock,) = lifecycle.listen(ServerSettings(port=0))
    with sock:
        port = sock.getsockname()[1]
        assert lifecycle.url(sock) == f"http://127.0.0.1:{port}/"
    if socket.has_ipv6:
        try:
            (sock,) = lifecycle.listen(ServerSettings(host="::1", port=0))
        except ConfigError:
            return  # this machine has none
        with sock:
            assert lifecycle.url(sock, "/v1").startswith("http://[::1]:")


def test_more_connections_than_files() -> None:
    with pytest.raises(ConfigError, match="open files"):
        lifecycle.room_for_connections(1 << 40)
