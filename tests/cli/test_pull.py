"""`edgespec pull`: what it asks the catalogue for, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec import catalog
from edgespec.cli.main import main
from edgespec.errors import CatalogError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    def pull(model: str, *, verify: bool, home: Path | None, progress: Any) -> Path:
        seen.append({"model": model, "verify": verify, "home": home})
        for done in (0, 50, 100):
            progress("the model", done, 100)
        return Path("/models/x.gguf")

    monkeypatch.setattr(catalog, "pull", pull)
    return seen


def test_the_path_is_the_only_line_on_stdout(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('model = "other"\nhome = "/elsewhere"\n')
    assert main(["pull", "some/model"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "/models/x.gguf\n"
    assert "downloading the model" in captured.err
    assert main(["pull", "--verify", "--quiet", "--config", str(file)]) == 0
    assert capsys.readouterr() == ("/models/x.gguf\n", "")
    assert [call["model"] for call in calls] == ["some/model", "other"]
    assert [call["verify"] for call in calls] == [False, True]


def test_without_a_network_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def pull(model: str, **others: Any) -> Path:
        raise CatalogError("The model cannot be fetched: no network.")

    monkeypatch.setattr(catalog, "pull", pull)
    assert main(["pull"]) == 2
    assert capsys.readouterr() == ("", "error: The model cannot be fetched: no network.\n")
