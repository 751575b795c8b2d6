"""What joins the loop to an engine: the order of what it makes, what it falls back to, the engine's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine
from edgespec.errors import ConfigError, ModelError
from edgespec.serving import host
from tests.serving.engines import GREEDY, PROMPTS, WAIT, load


def test_what_is_refused_leaves_no_graph_for_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, (), load_policy="edgspec") as engine:
        decoder, made = engine._target.decoder, list[int]()
        prepare = decoder.prepare_batch

        def noted(slots: int) -> int:
            made.append(slots)
            return prepare(slots)

        monkeypatch.setattr(decoder, "prepare_batch", noted)
        with pytest.raises(ConfigError, match="did you mean edgespec"):
            engine.start_serving()
        assert made == []  # and nothing was measured
        engine.load_policy = "edgespec"

        def fail(*_args: Any) -> Any:
            raise ModelError("it cannot be measured")

        monkeypatch.setattr(host, "batch_costs", fail)
        with pytest.raises(ModelError, match="cannot be measured"):
            engine.start_serving()
        assert made == [8, 1]
        assert decoder.batch_slots == 1


def test_without_a_graph_for_batches_texts_are_made_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with load(folder, ()) as engine:
        alone = [engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS[:3]]

        def fail(slots: int) -> int:
            if slots > 1:
                raise ModelError("the graph cannot be made")
            return 0

        monkeypatch.setattr(engine._target.decoder, "prepare_batch", fail)
        assert [result.token_ids for result in engine.generate(PROMPTS[:3], GREEDY)] == alone
        assert "the graph cannot be made" in caplog.text
        assert "batch graph" not in engine._target.planned
        assert engine.serving is not None
        assert engine.serving.memory_bytes == engine._target.planned["KV pool"]


def test_an_admission_measures_nothing_and_asks_for_the_settings_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up all texts, and `use_draft` may be called in the midst of it."""
    engine.start_serving()
    measured, planners, chosen = list[Any](), list[str](), ["ngram", "auto"]
    only = host.OnlyPlanner

    def noted(planner: Any, draft: str) -> Any:
        planners.append(draft)
        return only(planner, draft)

    monkeypatch.setattr(engine._target.costs, "knows", lambda name: False)
    monkeypatch.setattr("edgespec.engine.measure_drafts", lambda *args: measured.append(args))
    monkeypatch.setattr(host, "OnlyPlanner", noted)
    read = property(lambda self: chosen.pop(0) if len(chosen) > 1 else chosen[0], lambda self, name: None)
    monkeypatch.setattr(Engine, "_chosen", read, raising=False)
    assert len(engine.submit(PROMPTS[0], GREEDY).result(WAIT).token_ids) == 24
    assert (measured, planners) == ([], ["ngram"])


def test_the_end_gives_all_back_whatever_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, ()) as engine:
        before = dict(engine._target.planned)
        engine.start_serving()
        serving = engine._host
        assert serving is not None

        def fail(*_args: Any) -> None:
            raise RuntimeError("no disk")

        monkeypatch.setattr(host, "keep", fail)
        closed: list[int] = []
        close = serving.pool.close
        monkeypatch.setattr(serving.pool, "close", lambda: (closed.append(1), close()))
    assert closed
    assert engine._target.planned == before


def test_a_load_policy_that_fails_says_so_and_works_when_it_is_chosen_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder, load_policy="fixed:2") as engine:
        engine.start_serving()
        assert engine._host is not None
        assert engine.serving is not None
        assert engine.serving.load_policy == "fixed:2"
        guard: Any = engine._host._runner.lengths.planner
        monkeypatch.setattr(guard._planner, "lengths", lambda view: [1 // 0])
        alone = engine.generate(PROMPTS[0], GREEDY).token_ids
        (first, *_others) = engine.generate(PROMPTS[:3], GREEDY)
        assert first.token_ids == alone
        assert first.stats.proposed_tokens == 0
        assert engine.serving.load_policy.startswith("fixed:2 (failed: ZeroDivisionError: ")
        engine.load_policy = "fixed:2"
        assert engine.serving.load_policy == "fixed:2"
        (first, *_others) = engine.generate(PROMPTS[:3], GREEDY)
        assert first.token_ids == alone
        assert first.stats.proposed_tokens > 0
