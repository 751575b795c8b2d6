"""What serving adds to the memory plan of an engine with drafts, and takes away again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine
from edgespec.config import RuntimeConfig
from edgespec.errors import MemoryBudgetError
from tests.support.draft_sets import write_draft
from tests.support.held import make_held_target

KEPT = "keys and values of drafts"
LOTS = 1 << 40


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_held_target(tmp_path, monkeypatch)


def load(folder: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(
        config=RuntimeConfig(model=str(folder), threads=1, weight_format="float32", kv_memory="64MiB", **settings)
    )


def test_drafts_of_all_requests_are_planned_while_serving(target: Path, tmp_path: Path) -> None:
    write_draft(tmp_path / "extra", target, seed=9)
    with load(target, resident=2, max_sessions=4) as engine:
        planned, one = engine._target.planned, engine._target.planned[KEPT]
        engine.start_serving()
        assert planned[KEPT] == 4 * one
        assert engine.serving.memory_bytes == planned["KV pool"] + planned["batch graph"] + 3 * one
        engine.add_draft(str(tmp_path / "extra"))
        assert planned[KEPT] == 4 * engine._held.further_bytes > 4 * one
        engine._host.close()
        assert planned[KEPT] == engine._held.further_bytes
        assert engine._target.decoder.batch_slots == 1


def test_a_graph_that_is_too_large_is_given_back(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(target, drafts=(), memory_budget="8GiB") as engine:
        decoder, before = engine._target.decoder, dict(engine._target.planned)
        prepare = decoder.prepare_batch
        monkeypatch.setattr(decoder, "prepare_batch", lambda slots: prepare(slots) and LOTS)
        with pytest.raises(MemoryBudgetError, match="serving 8 requests at once does not fit"):
            engine.start_serving()
        assert decoder.batch_slots == 1
        assert engine._target.planned == before
