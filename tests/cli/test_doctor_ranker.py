"""The line of `edgespec doctor` about the ranker: which one is found, how many drafts it knows, or why none is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafts import zoo
from edgespec.cli import doctor, doctor_ranker
from edgespec.config import RuntimeConfig
from predictor.features import Layout
from predictor.ranker import RankedDraft, RankerInfo
from predictor.train.export import ranker_bytes
from tests.support.draft_sets import facts_of, write_draft
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE
from tests.support.traces import sha

NONE = "none for these drafts: they are chosen by observation"


def home() -> Path:
    return Path(os.environ["EDGESPEC_HOME"])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny target with a set of two heads."""
    folder = write_tiny(tmp_path / "tiny", **SHAPE)
    for seed, name in enumerate(("code", "math")):
        write_draft(home() / "drafts" / "set" / name, folder, seed=seed)
    return folder


def write_ranker(model: Path, *names: str) -> Path:
    """A ranker for these drafts: for those that are here by their weights, for others by weights that nobody has."""
    facts = facts_of(model)
    entries = zoo.for_target(home(), facts.fingerprint, model=facts.model)
    here = {each.name: each.manifest.weights_fingerprint for each in entries if each.manifest is not None}
    known = [RankedDraft(name, here.get(name, sha(name))) for name in names]
    info = RankerInfo(facts.fingerprint, facts.name, facts.hidden_size, 16, tuple(known))
    shape = len(names), Layout(facts.hidden_size, names).size
    path = home() / "rankers" / "mine" / "ranker.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ranker_bytes(info, [(np.zeros(shape, np.float32), np.zeros(len(names), np.float32))]))
    return path


def checks(model: Path, **settings: Any) -> list[doctor.Check]:
    return doctor_ranker.checks(RuntimeConfig.load(model=str(model), **settings))


@pytest.mark.parametrize(("names", "known"), [(("code", "math"), 2), (("math", "stories"), 1)])
def test_the_one_that_is_found(model: Path, names: tuple[str, ...], known: int) -> None:
    path = write_ranker(model, *names)
    (check,) = checks(model)
    assert (check.status, check.detail) == ("ok", f"{path}, knows {known} of 2 drafts")
    assert doctor._ranker in doctor.CHECKS


def test_one_that_cannot_be_used_says_why(model: Path) -> None:
    path = write_ranker(model, "stories")
    (check,) = checks(model)
    assert check.status == "warn"
    assert f"ranker {path} cannot be used: it was trained with other drafts (stories) than are here" in check.detail
    assert "docs/predictor.md" in check.advice
    path.write_bytes(path.read_bytes()[:100])
    (check,) = checks(model)
    assert (check.status, str(path) in check.detail) == ("warn", True)


def test_none(model: Path) -> None:
    (check,) = checks(model)
    assert (check.status, check.detail) == ("ok", NONE)


def test_where_there_is_nothing_to_rank_there_is_no_line(model: Path, tmp_path: Path) -> None:
    write_ranker(model, "code")
    assert checks(model, drafts=["math"]) == []
    assert checks(model, drafts=["ngram"]) == []
    assert checks(tmp_path / "no-such-model") == []
