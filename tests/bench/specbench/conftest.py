"""The command `edgespec bench specbench` with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.specbench import command
from edgespec.cli.main import main
from tests.bench.specbench.fakes import LINES
from tests.support.draft_sets import write_draft
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("specbench") / "tiny", **SHAPE)


@pytest.fixture
def run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in a home of its own, with two random drafts; `lines` of the question file may be other ones."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for seed, name in enumerate(("code", "math")):
        write_draft(tmp_path / "home" / "drafts" / "set" / name, model, seed=seed)

    def run(*words: str, lines: list[Any] = LINES, out: str = "out") -> int:
        questions = tmp_path / "question.jsonl"
        questions.write_text("".join((o if isinstance(o, str) else json.dumps(o)) + "\n" for o in lines))
        base = ["bench", "specbench", "--questions", str(questions), "--out", str(tmp_path / out), "-m", str(model)]
        return main([*base, "--threads", "1", "--weight-format", "float32", "-n", "6", *words])

    return run


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(command, "Worker", never)
