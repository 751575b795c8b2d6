"""`edgespec bench specbench` as a user runs it: a whole run of a tiny model, its shards, and arms that fail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench import extras
from edgespec.bench.specbench import command, ray_cluster
from edgespec.bench.specbench.folder import read_run
from tests.bench.specbench.fakes import LINES, FakeArm, Workers, answering, failing


def test_a_run_of_a_tiny_model(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policies", "edgespec", "--repeats", "1", "--resident", "1")
    assert run(*words) == 0
    found = read_run(tmp_path / "out")
    assert (found.finished, found.questions, list(found.arms)) == (True, 2, ["plain", "edgespec"])
    assert all(info.status == "ok" and (info.peak_memory_bytes or 0) > 1e7 for info in found.arms.values())
    texts = {arm: [record.token_ids for record in records] for arm, records in found.records.items()}
    assert texts["plain"] == texts["edgespec"]  # float32: token by token
    for record in (record for records in found.records.values() for record in records):
        assert record.error is None
        assert 1 + sum(record.round_tokens) == len(record.token_ids)
        assert record.stats["reused_tokens"] == 0  # B173: every turn is a fresh session
        parts = sum(record.stats[f"{part}_seconds"] for part in ("prefill", "draft", "target", "bookkeeping"))
        assert 0 < parts <= record.seconds  # B175
        assert record.stats["acceptance_rate"] <= 1
    assert [(r.question_id, r.turn) for r in found.records["plain"]] == [("81", 0), ("81", 1), ("401", 0)]
    lines = (tmp_path / "out" / "model_answer" / "edgespec.jsonl").read_text().splitlines()
    assert [json.loads(line)["question_id"] for line in lines] == [81, 401]
    lanes = json.loads((tmp_path / "out" / "trace" / "edgespec.json").read_text())["traceEvents"]
    assert any(event.get("name") == "answer" for event in lanes)
    assert (tmp_path / "out" / "report.md").is_file()
    assert "edgespec" in capsys.readouterr().out
    assert list((tmp_path / "out" / "state" / "edgespec").glob("*.json"))
    assert not (tmp_path / "home" / "policies").exists()  # what was learned stays with the run
    assert run(*words, "--resume") == 0
    assert read_run(tmp_path / "out").records == found.records


def test_lines_and_questions_that_cannot_be_used_are_counted_and_named(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Worker", workers := Workers())
    too_long = {"question_id": 5, "category": "rag", "turns": ["the hen " * 60]}
    lines = [LINES[0], "not json", {"question_id": 4, "turns": ["x"]}, too_long, LINES[1]]
    assert run("--policies", "plain", "--repeats", "1", "--context", "128", lines=lines) == 0
    found = read_run(tmp_path / "out")
    assert [(one["line"], one["reason"].split(" prompt")[0].rstrip("0123456789")) for one in found.skipped] == [
        (2, "it is not JSON"),
        (3, "it has no 'category'"),
        (4, "its "),
    ]
    assert found.skipped[0]["file"] == "question.jsonl"
    assert found.questions == 2
    assert len(workers.asked) == 3
    err = capsys.readouterr().err
    assert all(words in err for words in ("line 2: it is not JSON", "line 3", "do not fit the context of 128"))


def test_a_question_file_whose_name_is_no_utf_8(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Worker", Workers(stop_after=1))
    run()  # which writes a file with the usual name
    odd = os.fsdecode(bytes(tmp_path) + b"/q\xff.jsonl")
    os.rename(tmp_path / "question.jsonl", odd)
    with open(odd, "a") as stream:
        stream.write("{half\n")
    monkeypatch.setattr(sys, "argv", ["edgespec", "bench", "specbench", "--questions", odd])
    monkeypatch.setattr(command, "Worker", Workers(stop_after=1))
    words = ("--questions", odd, "--policies", "plain", "--repeats", "1")
    assert run(*words, out="odd") == 130
    monkeypatch.setattr(command, "Worker", Workers())
    assert run(*words, "--resume", out="odd") == 0
    found = read_run(tmp_path / "odd")
    assert (found.settings["questions"], found.skipped[0]["file"]) == ("q?.jsonl", "q?.jsonl")
    assert "left out: " in capsys.readouterr().err


def test_shards_share_the_questions_out(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"question_id": n, "category": "qa", "turns": ["the hen " * (n + 1)]} for n in range(5)]
    monkeypatch.setattr(command, "Worker", Workers())
    found = []
    for part in ("1/2", "2/2"):
        words = ("--policies", "plain", "--repeats", "1", "--shard", part, "--order", "shuffled", "--seed", "3")
        assert run(*words, lines=lines, out=f"shard{part[0]}") == 0
        found += [(r.order, r.question_id) for r in read_run(tmp_path / f"shard{part[0]}").records["plain"]]
    assert sorted(order for order, _ in found) == [0, 1, 2, 3, 4]
    assert sorted(name for _, name in found) == ["0", "1", "2", "3", "4"]


def test_arms_that_fail_make_the_command_fail_and_leave_the_rest(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = Workers()

    def make(name: str, *, threads: int) -> FakeArm:
        worker = workers(name, threads=threads)
        if name == "memspec":
            worker.request = lambda op, **fields: failing("no room", alive=True)([], 0)  # type: ignore[method-assign]
        return worker

    monkeypatch.setattr(command, "Worker", make)
    assert run("--policies", "memspec,edgespec", "--repeats", "1") == 1
    assert "memspec has an error: no room" in capsys.readouterr().err
    found = read_run(tmp_path / "out")
    assert found.finished, "all that could be asked was"
    assert found.arms["memspec"].status == "error"
    assert len(found.records["edgespec"]) == len(found.records["plain"]) == 3


def test_a_run_whose_plain_fails_says_so_and_ends(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(name: str, *, threads: int) -> FakeArm:
        return FakeArm(name, failing("out of luck", alive=False))

    monkeypatch.setattr(command, "Worker", make)
    assert run("--policies", "edgespec") == 1
    assert "plain, which all others are compared with, cannot go on: out of luck" in capsys.readouterr().err
    assert read_run(tmp_path / "out").arms["plain"].status == "error"


def test_a_cluster_is_asked_with_the_same_arguments(
    run: Callable[..., int], no_models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(ray_cluster, "run", lambda args: given.append(args) or 7)
    assert run("--ray", "head:6379", "--shards", "4") == 7
    assert (given[0].ray, given[0].shards, given[0].shard) == ("head:6379", 4, None)


def test_differences_are_judged_on_the_device_of_the_run(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class Noting:
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(options)

        def gap(self, *asked: Any) -> dict[str, float]:
            return {"margin": 0.0, "gap": 0.0}

        def kill(self) -> None:
            pass

    def make(name: str, *, threads: int) -> FakeArm:
        return FakeArm(name, answering(ids=(105, 106 + (name == "edgespec"), 107)))

    monkeypatch.setattr(extras, "Probes", Noting)
    monkeypatch.setattr(command, "Worker", make)
    assert run("--policies", "edgespec", "--repeats", "1", "--device", "torch-cpu") == 0
    assert made == [{"device": "torch-cpu"}]
