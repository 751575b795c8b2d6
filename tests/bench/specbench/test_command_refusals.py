"""What `edgespec bench specbench` refuses before a model is loaded: arguments, question files and folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.bench.specbench.folder import LOCK, STATE
from tests.bench.specbench.fakes import LINES

pytestmark = pytest.mark.usefixtures("no_models")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--policies", "edgspec"], "did you mean edgespec"),
        (["--policies", "static:cod@4"], "did you mean code"),
        (["--drafts", "cod,math"], "there is no draft 'cod' (argument drafts): did you mean code?"),
        (["--policies", "oracle-dynamic"], "edgespec bench simulate"),
        (["--policies", "peer:llama"], "did you mean peer:llama.cpp"),
        (["--categories", "codng"], "did you mean coding"),
        (["--shard", "3/2"], "--shard wants I/N"),
        (["--shard", "3/3"], "has no question"),
        (["--shards", "2"], "--shards is for --ray"),
        (["--together", "1"], "--together must be 2 or more"),
        (["--policy", "memspec"], "--policies"),
        (["--questions", "/nowhere/q.jsonl"], "/nowhere/q.jsonl"),
        (["--out", "/proc/nothing/run"], "cannot be written"),
        (["--temperature", "nan"], "wants a number from 0 to 100"),
        (["--retry-errors"], "--retry-errors goes with --resume"),
        (["--limit", "0"], "whole number from 1 up"),
        (["--limit", "9" * 400], "whole number from 1 up"),
        (["--order", "shuffled", "--seed", "9" * 400], "whole number from 0 up"),
        (["-n", "100000"], "--max-new-tokens must be at most"),
        (["--resident", "9000", "--memory-budget", "1KB"], "memory"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    try:
        code = run(*given)
    except SystemExit as left:  # argparse's own
        code = int(str(left.code))
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_file_without_a_usable_question_is_refused(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(lines=["{half"]) == 2
    assert "has no prompt" in capsys.readouterr().err
    assert run("--context", "64", lines=[{"question_id": 1, "category": "qa", "turns": ["the hen " * 60]}]) == 2
    assert "No question can be asked" in capsys.readouterr().err


def test_a_question_file_that_can_be_read_once_only_is_refused(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in --questions <(head question.jsonl): a --resume could not tell whether it is the same."""
    reading, writing = os.pipe()
    os.write(writing, json.dumps(LINES[0]).encode() + b"\n")
    os.close(writing)
    try:
        assert run("--questions", f"/dev/fd/{reading}") == 2
    finally:
        os.close(reading)
    assert "is no file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_there_must_be_a_run_to_go_on_with_and_nothing_of_others_in_the_folder(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--resume", out="new") == 2
    assert "There is no run in" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    (tmp_path / "full").mkdir()
    for name in "dcab":
        (tmp_path / "full" / name).touch()
    assert run(out="full") == 2
    assert "has other files (a, b, c, ...)" in capsys.readouterr().err
    assert {file.name for file in (tmp_path / "full").iterdir()} == set("abcd")


def test_what_an_earlier_run_learned_is_not_taken_for_nothing(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where somebody has deleted run.json and the records, to begin anew."""
    state = tmp_path / "out" / STATE / "edgespec"
    state.mkdir(parents=True)
    (state / "0123.json").write_text("{}")
    assert run() == 2
    assert "has other files (state)" in capsys.readouterr().err


def test_two_runs_into_one_folder(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path / "out" / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert run() == 2
        assert "Another run writes into" in capsys.readouterr().err
    finally:
        holder.communicate()


_HOLD = """
import fcntl, os, sys
os.makedirs(os.path.dirname(sys.argv[1]))
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
