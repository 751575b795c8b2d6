"""What is refused before a model is loaded, and which names the server answers to."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.errors import ConfigError
from edgespec.server.settings import Limits, ServerSettings


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.3.4.5"])
def test_loopback_needs_no_key(host: str) -> None:
    assert ServerSettings(host=host).loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "board.local"])
def test_other_addresses_need_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        ServerSettings(host=host)
    assert not ServerSettings(host=host, api_key="k").loopback
    assert not ServerSettings(host=host, insecure=True).loopback


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"port": 70_000}, "port 70000"),
        ({"port": -1}, "port -1"),
        ({"grace_seconds": float("nan")}, "grace"),
        ({"grace_seconds": -1}, "grace"),
        ({"api_key": ""}, "API key"),
        ({"api_key": "two words"}, "API key"),
        ({"api_key": "schlüssel"}, "API key"),
        ({"allow_origins": ("example.org",)}, "'example.org' is no origin"),
        ({"allow_origins": ("https://example.org/path",)}, "is no origin"),
        ({"allow_origins": ("*",)}, "every web page"),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**wrong)


@pytest.mark.parametrize(
    "name",
    ["body_bytes", "prompt_tokens", "connections", "bodies_bytes", "body_parts", "request_seconds", "stall_seconds"],
)
@pytest.mark.parametrize("value", [0, -1])
def test_wrong_limits(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_the_key_is_not_shown() -> None:
    assert "hidden" not in repr(ServerSettings(api_key="hidden"))


def test_which_names_are_known() -> None:
    own = ServerSettings()
    assert all(map(own.knows_host, ["localhost", "127.0.0.1", "[::1]", "127.0.0.9"]))
    assert not any(map(own.knows_host, ["evil.example", "192.168.1.2", "", "localhost.evil.example"]))
    wide = ServerSettings(host="0.0.0.0", api_key="k", allow_hosts=("Board.lan", "other.lan:8000", "third.lan."))
    assert all(map(wide.knows_host, ["192.168.1.2", "[fd00::1]", "board.lan", "localhost", "other.lan", "third.lan"]))
    assert not any(map(wide.knows_host, ["evil.example", "board.lan.evil.example"]))
