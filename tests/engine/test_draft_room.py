"""What drafts take beside their slots, and how many slots there are on a device with little memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec import Engine, draft_room, loading
from edgespec.draft_room import KEPT, kept_bytes
from edgespec.errors import MemoryBudgetError
from edgespec.memory.topology import Topology
from tests.support.held import make_held_target
from tests.support.phrases import write_phrases
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE, load

LOTS = 64 << 30
RESERVE = 256 << 20  # of what is free, which "auto" leaves to the rest of the machine


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


# A device with little memory


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device whose free bytes are what the test says."""
    made = SimpleNamespace(free=LOTS)
    there = Topology("discrete", LOTS, lambda: (made.free, LOTS))
    for module in (loading, draft_room):
        monkeypatch.setattr(module, "topology_of", lambda _config: there)
    return made


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_held_target(tmp_path, monkeypatch)


@pytest.fixture
def four(target: Path, board: SimpleNamespace) -> Iterator[Engine]:
    """An engine with four heads."""
    with load(target, context=256) as made:
        yield made


def almost_two(engine: Engine) -> int:
    """Free bytes with room for keys and values that are still to come and for more than one slot, but not for two.

    Two would fit, if keys and values to come were not counted.
    """
    planned, one = engine._target.planned, engine._held._room.slot_bytes
    cache = planned["KV cache"]
    assert engine._target.to_come == cache - engine._target.decoder.kv_bytes > cache // 2
    return RESERVE + engine._target.to_come + planned[KEPT] + 2 * one - min(one, cache) // 4


def test_slots_leave_keys_and_values_what_was_planned_for_them(four: Engine, board: SimpleNamespace) -> None:
    """Invariant 3: of what is free, what is planned for the text and not taken yet is nobody else's."""
    assert four.working_set.slots == 4
    board.free = almost_two(four)
    assert four._drafts.hold().working_set.slots == 1
    board.free += four._held._room.slot_bytes
    assert four._drafts.hold().working_set.slots == 2


def test_what_a_text_has_taken_is_not_left_to_it_again(four: Engine, board: SimpleNamespace) -> None:
    board.free, decoder = almost_two(four), four._target.decoder
    cache, before = decoder.new_cache(), four._target.to_come
    decoder.forward([5] * 200, cache)
    assert four._target.to_come == before - cache.nbytes
    board.free -= cache.nbytes
    assert four._drafts.hold().working_set.slots == 1


def test_as_many_as_were_asked_for_are_refused_with_the_numbers(target: Path, board: SimpleNamespace) -> None:
    with load(target, context=256, resident=2) as engine:
        board.free = almost_two(engine)
        with pytest.raises(MemoryBudgetError, match=r"2 draft slots .*keys and values to come"):
            engine._drafts.hold()
        board.free += engine._held._room.slot_bytes or LOTS
        assert engine._drafts.hold().working_set.slots == 2


def test_a_table_leaves_it_to_them_too(four: Engine, board: SimpleNamespace, target: Path, tmp_path: Path) -> None:
    table = write_phrases(tmp_path / "phrases", target)
    board.free = RESERVE + four._target.to_come + 10
    assert "keys and values to come" in four.add_draft(str(table)).status
    board.free = LOTS
    assert four.add_draft(str(table)).status == "active"
