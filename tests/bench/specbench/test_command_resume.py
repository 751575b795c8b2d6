"""`edgespec bench specbench --resume`: what is kept, what is asked once more, and what may not have changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench import extras
from edgespec.bench.specbench import command
from edgespec.bench.specbench.folder import read_run, records_file
from tests.bench.specbench.fakes import LINES, FakeArm, Workers, answering, command_limit, failing


def test_ctrl_c_keeps_what_was_measured_and_resume_runs_the_rest(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--policies", "edgespec", "--repeats", "2")
    monkeypatch.setattr(command, "Worker", first := Workers(stop_after=5))
    monkeypatch.setattr(sys, "argv", ["/x/pytest", "bench", "specbench", "--resume", "--out", "a b"])
    assert run(*words) == 130
    err = capsys.readouterr().err
    assert "2 questions, 2 arms, 2 repeats: 8 answers, kept in" in err, "said at once, not after minutes"
    assert "\nstarting 2 workers: plain, edgespec\n" in err
    assert "5 turns are kept" in err
    assert "To go on: edgespec bench specbench --out 'a b' --resume\n" in err
    kept = read_run(tmp_path / "out")
    assert not kept.finished
    assert sum(map(len, kept.records.values())) == 5
    assert (tmp_path / "out" / "model_answer" / "plain.jsonl").is_file()
    with records_file(tmp_path / "out", "plain").open("ab") as stream:
        stream.write(b'{"question_id": "81", "half')  # a kill in the middle of a line
    assert run(*words) == 2
    assert "go on with it with --resume" in capsys.readouterr().err
    monkeypatch.setattr(command, "Worker", rest := Workers())
    assert run(*words, "--resume") == 0
    found = read_run(tmp_path / "out")
    assert found.finished
    assert len(first.asked) + len(rest.asked) == 12
    for name, records in found.records.items():
        assert len({record.key for record in records}) == len(records) == 6
        assert records[: len(kept.records[name])] == kept.records[name]
    assert all(worker.killed or worker.closed for worker in first.made)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--repeats", "3"], "repeats was 1 and is 3 now"),
        (["--order", "shuffled"], "order was 'file' and is 'shuffled' now"),
        (["--policies", "memspec"], "policies was"),
        (["--shard", "1/2"], "shard was '1/1' and is '1/2' now"),
        (["--resident", "1"], "resident was None and is 1 now"),
    ],
)
def test_resume_with_other_settings_is_refused(
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(command, "Worker", Workers(stop_after=1))
    assert run("--policies", "edgespec", "--repeats", "1") == 130
    capsys.readouterr()
    assert run("--policies", "edgespec", "--repeats", "1", *changed, "--resume") == 2
    assert words in capsys.readouterr().err


def test_resume_with_other_code_is_refused(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Worker", Workers(stop_after=1))
    assert run() == 130
    file = tmp_path / "out" / "run.json"
    document = json.loads(file.read_text())
    document["machine"]["code"] = "of yesterday"
    file.write_text(json.dumps(document))
    assert run("--resume") == 2
    assert "edgespec's code was 'of yesterday'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "device", "refused"),
    [
        ("onnxruntime", "cpu", True),
        ("llama-cpp-python", "cpu", False),
        ("torch", "cpu", False),
        ("torch", "torch-cpu", True),
    ],
)
def test_only_packages_that_the_arms_compute_with_must_be_the_same(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    device: str,
    refused: bool,
) -> None:
    words = ("--policies", "edgespec", "--repeats", "1", "--device", device)
    monkeypatch.setattr(command, "Worker", Workers(stop_after=1))
    assert run(*words) == 130
    file = tmp_path / "out" / "run.json"
    document = json.loads(file.read_text())
    document["machine"]["versions"][package] = "0.0 of yesterday"
    file.write_text(json.dumps(document))
    capsys.readouterr()
    monkeypatch.setattr(command, "Worker", Workers())
    assert run(*words, "--resume") == (2 if refused else 0)
    assert (f"versions was {{'{package}': '0.0 of yesterday'}} and is" in capsys.readouterr().err) == refused


def test_resume_with_another_question_file_is_refused(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Worker", Workers(stop_after=1))
    assert run() == 130
    assert run("--resume", lines=LINES[:1]) == 2
    assert "sha256 was" in capsys.readouterr().err


def test_ctrl_c_while_the_report_is_made_loses_nothing(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __init__(self, *args: Any, **options: Any) -> None:
            pass

        def gap(self, *asked: Any) -> dict[str, float]:
            raise KeyboardInterrupt

        def kill(self) -> None:
            pass

    def make(name: str, *, threads: int) -> FakeArm:
        return FakeArm(name, answering(ids=(105, 106 + (name == "edgespec"), 107)))

    words = ("--policies", "edgespec", "--repeats", "1")
    monkeypatch.setattr(command, "Worker", make)
    monkeypatch.setattr(extras, "Probes", Interrupted)
    assert run(*words) == 130
    err = capsys.readouterr().err
    assert "interrupted; 6 turns are kept in" in err
    assert "To go on: " in err
    assert not read_run(tmp_path / "out").finished
    monkeypatch.setattr(command, "Worker", rest := Workers())
    monkeypatch.setattr(Interrupted, "gap", lambda *asked: {"margin": 0.0, "gap": 0.0})
    assert run(*words, "--resume") == 0
    assert read_run(tmp_path / "out").finished
    assert not rest.made


def test_a_run_of_which_the_groups_are_not_known_is_not_gone_on_with(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Worker", Workers(stop_after=1))
    assert run("--policies", "edgespec") == 130
    file = tmp_path / "out" / "run.json"
    document = json.loads(file.read_text())
    for groups in ([], [["edgespec"]], [["plain", "memspec"]]):
        document["machine"]["groups"] = groups
        file.write_text(json.dumps(document))
        capsys.readouterr()
        assert run("--policies", "edgespec", "--resume") == 2
        assert "does not tell which arms were in memory together" in capsys.readouterr().err


def test_what_was_made_of_auto_holds_for_the_whole_run(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much memory is free when it is gone on with."""
    monkeypatch.setattr(command, "Worker", Workers(stop_after=1))
    assert run("--policies", "edgespec", "--repeats", "1") == 130
    file = tmp_path / "out" / "run.json"
    document = json.loads(file.read_text())
    assert document["machine"]["slots"] == 2
    document["machine"] |= {"slots": 1, "context": 96}
    file.write_text(json.dumps(document))
    given, workers = [], Workers()

    def make(name: str, *, threads: int) -> FakeArm:
        worker = workers(name, threads=threads)
        request = worker.request

        def noting(op: str, **fields: Any) -> dict[str, Any]:
            given.extend([fields["options"]["config"]] if op == "load" else [])
            return request(op, **fields)

        worker.request = noting  # type: ignore[method-assign]
        return worker

    monkeypatch.setattr(command, "Worker", make)
    assert run("--policies", "edgespec", "--repeats", "1", "--resume") == 0
    assert {(config["resident"], config["context"]) for config in given} == {(1, 96)}


def test_answers_that_failed_are_named_and_asked_once_more(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(name: str, *, threads: int) -> FakeArm:
        def script(prompt: list[int], limit: int) -> dict[str, Any]:
            bad = name == "edgespec" and limit < command_limit()
            return (failing("no luck", alive=True) if bad else answering(ids=(105, 106, 107)))(prompt, limit)

        return FakeArm(name, script)

    words = ("--policies", "edgespec", "--repeats", "1")
    monkeypatch.setattr(command, "Worker", make)
    assert run(*words) == 0
    assert "3 answers failed; --resume --retry-errors asks once more" in capsys.readouterr().err
    monkeypatch.setattr(command, "Worker", workers := Workers())
    assert run(*words, "--resume", "--retry-errors") == 0
    assert {name for name, _ in workers.asked} == {"edgespec"}
    assert all(record.error is None for record in read_run(tmp_path / "out").records["edgespec"])
