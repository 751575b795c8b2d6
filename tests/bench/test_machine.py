"""What is written down of the machine and the command."""

from __future__ import annotations

import pytest

from edgespec.bench.machine import command_line


def test_a_command_that_is_shown_to_others_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EDGESPEC_API_KEY": "hush", "EDGESPEC_HUB_TOKEN": "hush", "EDGESPEC_DRAFTS": "a b"}.items():
        monkeypatch.setenv(name, value)
    command = command_line(["edgespec", "bench"])
    assert "EDGESPEC_DRAFTS='a b'" in command
    assert command.endswith(" edgespec bench")
    assert "hush" not in command
