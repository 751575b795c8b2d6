"""prefetch_models.sh: fetches through edgespec, and knows later whether the files are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts.boards import Stubs, run


@pytest.fixture
def models(tmp_path: Path, stubs: Stubs) -> Path:
    """A target (a folder with a link in it, as in the hub's cache) and a draft (a file), which edgespec "fetches"."""
    folder = tmp_path / "models"
    (folder / "target").mkdir(parents=True)
    (folder / "blob").write_text("weights")
    (folder / "target/model.safetensors").symlink_to(folder / "blob")
    (folder / "draft.gguf").write_text("draft")
    rows = [{"path": str(folder / name)} for name in ("target", "draft.gguf")]
    (folder / "answer.json").write_text(json.dumps({"models": rows}))
    stubs.add("edgespec", f'case "$*" in *--json*) cat "{folder}/answer.json" ;; *) echo listed ;; esac')
    return folder


def prefetch(stubs: Stubs, *arguments: str, code: int = 0) -> str:
    done = run("prefetch_models.sh", *arguments, stubs=stubs)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_without_a_set_the_sets_are_listed(models: Path, stubs: Stubs) -> None:
    assert prefetch(stubs) == "listed\n"
    assert stubs.calls == ["edgespec drafts pull"]


def test_a_dry_run_only_asks_edgespec_what_it_would_do(models: Path, stubs: Stubs) -> None:
    text = prefetch(stubs, "--set", "qwen3-4b", "--convert", "int4", "--out", "x")
    assert "Nothing was changed" in text
    assert "edgespec convert" in text
    assert stubs.calls == ["edgespec drafts pull qwen3-4b --target --dry-run"]


def test_what_was_fetched_is_written_down_and_checked(models: Path, stubs: Stubs) -> None:
    arguments = ["--set", "qwen3-4b", "--draft", "general", "--draft", "larger", "--build", "q4_0", "--apply"]
    for _ in range(2):  # a second time changes nothing
        assert "2 files" in prefetch(stubs, *arguments)
    assert stubs.calls[0] == "edgespec drafts pull qwen3-4b general larger --target --build q4_0 --json"
    assert "as they were fetched" in prefetch(stubs, "--check")
    (models / "blob").write_text("damaged")
    assert "fetch them again" in prefetch(stubs, "--check", code=1)


def test_the_target_is_converted(models: Path, stubs: Stubs) -> None:
    prefetch(stubs, "--set", "s", "--build", "bf16", "--convert", "int4", "--out", "small", "--apply")
    assert stubs.calls[-1] == f"edgespec convert {models}/target --dtype int4 --out small"


def test_what_is_converted_already_is_kept(models: Path, stubs: Stubs, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    made = ("--set", "s", "--build", "bf16", "--convert", "int4", "--out", tmp_path / "small", "--apply")
    assert "is kept" in prefetch(stubs, *made)
    assert not any(call.startswith("edgespec convert") for call in stubs.calls)


def test_a_fetch_that_fails_is_an_error(models: Path, stubs: Stubs) -> None:
    stubs.add("edgespec", "exit 1")
    assert "not everything was fetched" in prefetch(stubs, "--set", "s", "--apply", code=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--convert", "int3", "--out", "x"], "int4 or int8"),
        (["--convert", "int4"], "--out"),
        (["--convert", "int4", "--out", "x", "--no-target"], "leaves out"),
        (["--set"], "wants a value"),
        (["--check"], "nothing was fetched"),
    ],
)
def test_wrong_arguments(models: Path, stubs: Stubs, arguments: list[str], words: str) -> None:
    assert words in prefetch(stubs, *arguments, code=1)
