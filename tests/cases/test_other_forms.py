"""A model in another form than the one its drafts were made for: they are found, they run, the text is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from predictor import ranker as rankers
from tests.support.draft_sets import facts_of, write_draft
from tests.support.packed import SHAPE as WIDE
from tests.support.packed import converted
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import GREEDY, QUESTION, load, plain


@pytest.mark.parametrize("bits", [4, 8])
def test_drafts_of_a_converted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    source = write_tiny(tmp_path / "source", **{**WIDE, "hidden_size": 32, "head_dim": 16})
    write_draft(tmp_path / "home" / "drafts" / "any-name" / "code", source)
    converted(source, tmp_path / "other", bits)
    asked: list[str] = []

    def find(folders: object, target: str, drafts: object) -> tuple[None, list[str]]:
        asked.append(target)
        return None, []

    monkeypatch.setattr(rankers, "find", find)
    with load(tmp_path / "other", drafts="auto", gamma=3) as engine:
        assert set(engine.drafts) == {"ngram", "code"}
        engine.use_draft("code")
        result = engine.generate(QUESTION, GREEDY)
        assert result.stats.draft_share["code"] > 0
        assert result.token_ids == plain(engine, QUESTION)
    # The ranker for these very weights, then the one for those that the drafts were made for.
    assert asked == [facts_of(tmp_path / "other").fingerprint, facts_of(source).fingerprint]
