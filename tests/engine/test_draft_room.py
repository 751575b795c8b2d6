"""What drafts take beside their slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgespec.draft_room import kept_bytes
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE, load


@pytest.mark.parametrize(
    ("draft", "bytes_of"),
    [
        ({"conversation_bytes": 10}, [10, 20, 80]),  # a head
        ({"further_bytes": 10}, [0, 10, 70]),  # keys and values of one conversation count as the slot's
        ({}, [0, 0, 0]),
    ],
)
def test_what_a_draft_keeps_of_so_many_conversations(draft, bytes_of):
    assert [kept_bytes(SimpleNamespace(**draft), count) for count in (1, 2, 8)] == bytes_of  # type: ignore[arg-type]


def test_a_standalone_draft_keeps_keys_and_values_of_each_conversation(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    folder = write_tiny(tmp_path / "tiny", **SHAPE)
    with load(folder, drafts=[str(write_tiny(tmp_path / "small", **SHAPE))], context=128, resident=1) as engine:
        position = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads
        assert engine._held.further_bytes == 128 * position
        assert engine._target.planned["keys and values of drafts"] == 0
        engine._held.plan_for(3)
        assert engine._target.planned["keys and values of drafts"] == 2 * 128 * position
