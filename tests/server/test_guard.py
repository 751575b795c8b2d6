"""Who may come in: keys, hosts, origins."""

from __future__ import annotations

import itertools
import logging

import pytest

from edgespec.server.settings import host_name
from tests.server.conftest import Running, Start

PRIVATE = ["/v1/models", "/metrics", "/edgespec/timeline"]


WRONG = [None, "Bearer wrong", "Bearer ", "Basic secret", "secret", "Bearer secret2", "Bearer ü"]


def test_a_wrong_key_is_refused(start: Start) -> None:
    server = start(api_key="secret")
    for path, given in itertools.product(PRIVATE, WRONG):
        answer = server.ask(path, headers={} if given is None else {"authorization": given})
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["code"] == "invalid_api_key"


def test_the_right_key(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = start(api_key="secret-key-1")
    key = {"authorization": "bearer  secret-key-1"}
    assert [server.ask(path, headers=key).status for path in PRIVATE] == [200] * 3
    assert server.chat().status == 401
    assert not server.engine.submitted
    # The page and the probe hold no secrets.
    assert [server.ask(path).status for path in ("/", "/health")] == [200, 200]
    assert "secret-key-1" not in caplog.text


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1", 200), ("LOCALHOST", 200), ("127.0.0.1:80", 200), ("[::1]:8000", 200), ("localhost.", 200),
     ("evil.example", 403), ("evil.example:8000", 403), ("", 403), ("192.168.0.7", 403), ("localhost@evil", 403)],
)  # fmt: skip
def test_host(server: Running, host: str, status: int) -> None:
    for path in ("/", "/v1/models"):
        assert server.ask(path, headers={"host": host}).status == status


def test_host_name() -> None:
    assert [host_name(host) for host in ("A.b:80", "[::1]:80", "a.b.")] == ["a.b", "[::1]", "a.b"]


def test_a_page_of_another_origin_may_not_ask(server: Running) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:1", "file://"):
        answer = server.ask("/v1/chat/completions", {"messages": []}, headers={"origin": origin})
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers
    assert server.ask("/metrics", headers={"sec-fetch-site": "cross-site"}).status == 403
    assert server.ask("/", headers={"sec-fetch-site": "cross-site"}).status == 200  # a link to the page
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert server.ask("/v1/chat/completions", method="OPTIONS", headers=preflight).status == 403


def test_its_own_page_may(server: Running) -> None:
    own = {"origin": f"http://127.0.0.1:{server.port}", "sec-fetch-site": "same-origin"}
    answer = server.ask("/v1/models", headers=own)
    assert answer.status == 200
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_an_allowed_origin(start: Start) -> None:
    server = start(allow_origins=("https://Good.example",), api_key="k")
    preflight = {
        "origin": "https://good.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    answer = server.ask("/v1/chat/completions", method="OPTIONS", headers=preflight)
    assert answer.status == 204
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    for status, headers in ((401, {}), (200, {"authorization": "Bearer k"})):
        answer = server.ask("/v1/models", headers={"origin": "https://good.example", **headers})
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert "Origin" in answer.headers["vary"]
    assert server.ask("/v1/models", headers={"origin": "https://evil.example"}).status == 403


def test_every_answer_has_an_id_and_is_not_kept(server: Running) -> None:
    ids = set()
    for path in ("/v1/models", "/nowhere"):
        answer = server.ask(path)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        ids.add(answer.headers["x-request-id"])
    assert len(ids) == 2
