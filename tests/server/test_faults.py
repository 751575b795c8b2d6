"""Bodies that are wrong, clients that leave, do not read, or are too many; and HTTP/1.0."""

from __future__ import annotations

import json
import socket
import struct
import threading

import pytest

from edgespec.server import lifecycle
from edgespec.server.settings import SPARE_CONNECTIONS, Limits, ServerSettings
from tests.server.conftest import CHAT, Running, Start, ended, request_bytes, until, until_sent
from tests.server.fakes import Script

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
WHOLE = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[1]", b'{"messages": NaN}', b"[" * 200_000, b"\x00" * 100])
def test_a_body_that_is_no_object(server: Running, body: bytes) -> None:
    for path in (CHAT, "/v1/completions"):
        answer = server.ask(path, body)
        assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    assert not server.engine.submitted


def test_a_body_of_another_kind(server: Running) -> None:
    answer = server.ask(CHAT, WHOLE, headers={"content-type": "text/plain"})
    assert answer.status == 415
    assert server.ask(CHAT, WHOLE, headers={"content-type": "application/json; charset=utf-8"}).status == 200


def test_half_characters_in_messages(server: Running) -> None:
    assert server.ask(CHAT, b'{"messages": [{"role": "user", "content": "\\ud83d"}]}').status == 200
    assert server.engine.submitted[0].ids == [0xFFFD]


def test_a_huge_body(start: Start) -> None:
    server = start(limits=Limits(body_bytes=1000))
    for size, status in ((1000, 200), (1001, 413), (3_000_000, 413)):
        answer = server.ask(CHAT, WHOLE + b" " * (size - len(WHOLE)))
        assert answer.status == status
    assert answer.error["code"] == "body_too_large"
    with server.open() as sock:  # without saying how long it is
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        sock.sendall(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")
    with server.open() as sock:  # a client that asks first is told at once
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n".encode())
        sock.sendall(b"expect: 100-continue\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_too_many_values(start: Start) -> None:
    server = start(limits=Limits(body_parts=100))
    answer = server.chat(x=[0] * 100)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert server.chat(x=[0] * 50).status == 200
    assert server.chat(**{f"x{n}": 0 for n in range(60)}).json["edgespec"]["ignored"]


def test_a_body_that_does_not_come(start: Start) -> None:
    server = start(limits=Limits(body_seconds=0.02))
    with server.open(request_bytes(CHAT, WHOLE)[:-5]) as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("head", "status"), [(f"POST {CHAT}", b"401"), ("GET /health", b"200"), ("POST /nowhere", b"401")]
)
def test_a_body_that_does_not_come_behind_an_answer(start: Start, head: str, status: bytes) -> None:
    """Nobody waits for this one, so nobody else would end it; it needs no key."""
    server = start(limits=Limits(body_seconds=0.1), api_key="k")
    with server.open(f"{head} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode()) as sock:
        assert until_sent(sock, b"}")[9:12] == status
        sock.sendall(b"x")
        assert ended(sock)
    until(lambda: not server.server.server_state.connections)


def test_a_body_that_comes_behind_an_answer_is_not_cut_off(start: Start) -> None:
    server = start(limits=Limits(body_seconds=0.05), api_key="k")
    ask = request_bytes("/nowhere", WHOLE)
    with server.open(ask[:-5]) as sock:
        until_sent(sock, b"}}")
        sock.sendall(ask[-5:] + request_bytes(CHAT, WHOLE, "authorization: Bearer k")[:-5])
        threading.Event().wait(0.02)
        sock.sendall(WHOLE[-5:])
        assert until_sent(sock, b'"edgespec"').startswith(b"HTTP/1.1 200 ")


def test_bodies_have_a_bound_together(start: Start) -> None:
    server = start(limits=Limits(body_bytes=1000, bodies_bytes=1000))
    ask = request_bytes(CHAT, WHOLE + b" " * (900 - len(WHOLE)))
    with server.open(ask[:-100]) as sock:
        until(lambda: server.app.bodies.taken == 800)
        answer = server.ask(CHAT, WHOLE + b" " * 300)
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (429, "busy", "1")
        assert server.chat().status == 200
        sock.sendall(ask[-100:])
        assert until_sent(sock, b'"edgespec"').startswith(b"HTTP/1.1 200 ")
    assert server.app.bodies.taken == 0


def test_a_head_that_does_not_come(start: Start) -> None:
    server = start(limits=Limits(header_seconds=0.02))
    for begun in (b"", b"POST / HT", b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "):
        with server.open(begun) as sock:
            assert gone(sock)


def test_a_second_request_may_take_as_long_as_an_idle_connection(start: Start) -> None:
    server = start(limits=Limits(header_seconds=0.05, idle_seconds=60))
    ask = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with server.open(ask) as sock:
        until_sent(sock, b"ok")
        threading.Event().wait(0.1)  # longer than a head may take
        sock.sendall(ask)
        until_sent(sock, b"ok")
        sock.sendall(b"GET /hea")
        assert gone(sock)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"HELO\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n",
             b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"GET /" + b"a" * 100_000]
)  # fmt: skip
def test_what_is_no_http(server: Running, data: bytes) -> None:
    with server.open(data) as sock:
        assert sock.recv(100)[9:10] == b"4"
    assert server.ask("/health").status == 200


def test_a_length_beside_chunks(server: Running) -> None:
    """What a proxy that goes by the length takes for more of the body is not taken for a request."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    more = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    chunks = f"{len(WHOLE):x}\r\n".encode() + WHOLE + b"\r\n0\r\n\r\n"
    with server.open(f"{head}content-length: 500\r\n\r\n".encode() + chunks + more) as sock:
        assert until_sent(sock, None).count(b"HTTP/1.1 ") == 1
    with server.open(f"{head}\r\n".encode() + chunks + more) as sock:
        assert until_sent(sock, b'"status":"ok"}').count(b"HTTP/1.1 200") == 2


def test_http_1_0(server: Running) -> None:
    for body in (BODY, WHOLE):
        with server.open(request_bytes(CHAT, body, version="1.0")) as sock:
            text = until_sent(sock, None)
        assert text.startswith(b"HTTP/1.1 200 ")
        assert b"there" in text
    with server.open(b"GET /health HTTP/1.0\r\n\r\n") as sock:  # without a host
        assert until_sent(sock, None).endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("body", [BODY, WHOLE])
@pytest.mark.parametrize("said", [0, 1])
def test_a_client_that_leaves_is_cancelled(server: Running, body: bytes, said: int) -> None:
    server.engine.script = Script(gate=threading.Semaphore(said))
    sock = server.open(request_bytes(CHAT, body))
    assert server.engine.arrived.acquire(timeout=10)
    until(lambda: len(server.engine.requests[0]._deltas) == said)
    sock.close()
    until(lambda: server.engine.requests[0].status == "cancelled")
    assert server.engine.requests[0].cancel_reason == "client left"
    until(lambda: not server.app.answering.running)


def test_a_client_that_leaves_while_its_prompt_is_encoded(server: Running) -> None:
    began, go = threading.Event(), threading.Event()
    encode = server.engine.encode

    def slowly(prompt: object, *, raw: bool = False) -> list[int]:
        began.set()
        assert go.wait(10)
        return encode(prompt, raw=raw)

    server.engine.encode = slowly  # type: ignore[method-assign]
    try:
        sock = server.open(request_bytes(CHAT, WHOLE))
        assert began.wait(10)
        before = len(server.server.server_state.connections)
        sock.close()
        until(lambda: len(server.server.server_state.connections) < before)
        go.set()
        until(lambda: not server.server.server_state.tasks)
    finally:
        del server.engine.encode
    assert not server.engine.submitted


def test_a_client_that_leaves_in_the_middle_of_its_body(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start()
    with server.open(request_bytes(CHAT, WHOLE)[:-3]):
        until(lambda: server.server.server_state.tasks)
    until(lambda: not server.server.server_state.tasks)
    assert server.chat().status == 200
    assert 'path="/v1/chat/completions",status="499"} 1.0' in server.ask("/metrics").body.decode()
    assert not caplog.records  # it is nobody's fault, and anybody could fill the log


def test_what_is_no_http_behind_an_answer(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: evil.example\r\ntransfer-encoding: chunked\r\n\r\n"
    with server.open(head.encode()) as sock:
        assert until_sent(sock, b"}}").startswith(b"HTTP/1.1 403 ")
        sock.sendall(b"zz\r\n")
        assert ended(sock)
    assert not caplog.records


def test_a_client_that_asks_ahead_and_leaves_is_noticed(server: Running) -> None:
    server.engine.script = Script(gate=threading.Semaphore(0))
    sock = server.open(request_bytes(CHAT, WHOLE) + b"G")
    assert server.engine.arrived.acquire(timeout=10)
    sock.sendall(b"E")
    sock.close()
    until(lambda: server.engine.requests[0].cancel_reason == "client left")


def test_requests_ahead_are_answered_in_turn_and_have_a_bound(server: Running) -> None:
    gate = threading.Semaphore(0)
    server.engine.script = Script(gate=gate)
    with server.open(request_bytes(CHAT, WHOLE)) as sock:
        assert server.engine.arrived.acquire(timeout=10)
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        gate.release(10)
        assert until_sent(sock, b'"status":"ok"}').count(b"HTTP/1.1 200") == 2
    server.engine.script = Script(gate=threading.Semaphore(0))
    with server.open(request_bytes(CHAT, WHOLE)) as sock:
        assert server.engine.arrived.acquire(timeout=10)
        sock.sendall(b"x" * 100_000)
        assert ended(sock)
    until(lambda: server.engine.requests[1].cancel_reason == "client left")


def small_buffers(**settings: object) -> socket.socket:
    """A listening socket whose connections hold little, so that a reader that does not read is soon noticed."""
    (sock,) = lifecycle.listen(ServerSettings(port=0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return sock


def test_a_reader_that_does_not_read_is_cut_off(start: Start) -> None:
    """It holds nobody up meanwhile."""
    gate = threading.Semaphore(0)
    server = start(Script(["x" * 20_000] * 200, gate=gate), small_buffers(), limits=Limits(stall_seconds=0.3))
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", server.port))
    with reader:
        reader.sendall(request_bytes(CHAT, BODY))
        assert server.engine.arrived.acquire(timeout=10)
        gate.release(150)
        # The engine goes on, whether anybody reads or not.
        until(lambda: len(server.engine.requests[0]._deltas) == 150)
        server.engine.script = Script()
        assert server.chat().status == 200
        until(lambda: server.engine.requests[0].cancel_reason == "client left")
        server.engine.requests[0]._wake()
        gate.release()
    until(lambda: not server.server.server_state.connections)


def test_a_whole_answer_that_nobody_reads(start: Start) -> None:
    server = start(Script(["x" * 2_000_000]), small_buffers(), limits=Limits(stall_seconds=0.2, idle_seconds=0.1))
    with server.open(request_bytes(CHAT, WHOLE)):
        assert server.engine.arrived.acquire(timeout=10)
        until(lambda: server.server.server_state.connections)
        until(lambda: not server.server.server_state.connections)


def test_too_many_connections(start: Start) -> None:
    server = start(limits=Limits(connections=5))
    held = [server.open() for _ in range(5)]
    until(lambda: len(server.server.server_state.connections) == 5)
    # A probe must not take a full server for a dead one.
    assert [server.ask(path).status for path in ("/health", "/metrics", "/")] == [200, 200, 200]
    refused = server.chat()
    assert (refused.status, refused.error["code"], refused.headers["connection"]) == (503, "unavailable", "close")
    until(lambda: len(server.server.server_state.connections) == 5)
    held += [server.open() for _ in range(SPARE_CONNECTIONS)]
    until(lambda: len(server.server.server_state.connections) == 5 + SPARE_CONNECTIONS)
    with server.open() as sock:
        text = until_sent(sock, None)
    assert text.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in text
    assert json.loads(text.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
    for sock in held:
        sock.close()
    until(lambda: not server.server.server_state.connections)
    assert server.ask("/health").status == 200


def test_hundreds_of_connections(start: Start) -> None:
    server = start(limits=Limits(connections=300))
    socks = [server.open(request_bytes(CHAT, BODY if number % 2 else WHOLE)) for number in range(250)]
    for number, sock in enumerate(socks):
        if number % 5:
            assert b"there" in until_sent(sock, b"[DONE]" if number % 2 else b'"edgespec"')
        elif number % 2:  # some leave with a reset
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    until(lambda: not server.server.server_state.connections)
    until(lambda: not server.app.answering.running)
    assert len(server.engine.submitted) >= 200  # all but those whose client had left before
    assert server.chat().status == 200


def gone(sock: socket.socket) -> bool:
    """Whether the server ends the connection."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
