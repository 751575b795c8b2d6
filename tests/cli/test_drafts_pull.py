"""`edgespec drafts pull`: what it would fetch, what it says of licences, and what happens when one fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec import catalog
from edgespec.cli.main import main
from edgespec.errors import CatalogError

SET = "qwen2.5-3b-instruct"


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were pulled; the hub lacks those with "Coder" in their name."""
    names: list[str] = []

    def pull(model: str, **more: Any) -> Path:
        names.append(model)
        if "Coder" in model:
            raise CatalogError(f"{model} is not on the hub")
        return Path("/cache") / model

    monkeypatch.setattr(catalog, "pull", pull)
    monkeypatch.setattr(catalog, "located", lambda model, **more: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))
    return names


def test_without_a_set_the_sets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafts", "pull"]) == 0
    out = capsys.readouterr().out
    assert "qwen3-4b: " in out
    assert "Llama 3.2 Community License" in out
    assert main(["drafts", "pull", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["sets"]
    assert {each["name"] for each in listed} >= {SET, "llama-3.2-3b-instruct"}
    assert all(model["source"] and model["licence"] for each in listed for model in each["models"])


def test_one_that_fails_does_not_keep_the_others_from_coming(
    pulled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafts", "pull", "Qwen2.5-3B-Instruct", "--target", "--json"]) == 1
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["models"]
    assert [row["name"] for row in rows] == ["Qwen2.5-3B-Instruct", "general", "code"]
    assert [row["error"] is None for row in rows] == [True, True, False]
    assert len(pulled) == 3
    assert "no commercial use" in captured.err
    assert "error: " in captured.err


def test_drafts_and_builds_are_chosen_by_name(pulled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafts", "pull", SET, "general", "math", "--build", "bf16", "-q"]) == 0
    assert pulled == ["Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-Math-1.5B-Instruct"]
    pulled.clear()
    assert main(["drafts", "pull", SET, "general", "math"]) == 0
    assert [name.partition("/")[0] for name in pulled] == ["bartowski", "Qwen"]
    assert capsys.readouterr().out.count("/cache/") == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen2.5-3b-instructs"], "did you mean qwen2.5-3b-instruct?"),
        ([SET, "poems"], "it has general, code, math"),
        ([SET, "--build", "q9"], "has no build 'q9'; it has q4_0, bf16"),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones(
    arguments: list[str], words: str, pulled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafts", "pull", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert pulled == []


def test_terms_of_a_gated_model_are_said_before_it_is_fetched(
    pulled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafts", "pull", "llama-3.2-3b-instruct", "--build", "bf16"]) == 0
    assert "HF_TOKEN" in capsys.readouterr().err
    assert main(["drafts", "pull", "llama-3.2-3b-instruct"]) == 0
    assert "HF_TOKEN" not in capsys.readouterr().err


def test_a_dry_run_fetches_nothing(pulled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafts", "pull", SET, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would be fetched") == 2
    assert pulled == []


def test_a_disk_that_is_too_small_is_found_before_the_first_byte(
    pulled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    assert main(["drafts", "pull", SET, "--target"]) == 2
    assert "HF_HOME" in capsys.readouterr().err
    assert pulled == []
    monkeypatch.setattr(catalog, "located", lambda model, **more: Path("/cache") / model)
    assert main(["drafts", "pull", SET, "general"]) == 0  # what is here already needs no room
