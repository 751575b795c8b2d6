"""`edgespec bench specbench` as a user runs it: with a tiny model, and with everything that can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench import extras
from edgespec.bench.specbench import command, ray_cluster
from edgespec.bench.specbench.folder import LOCK, read_run, records_file
from edgespec.cli.main import main
from tests.bench.specbench.fakes import FakeArm, answering, failing
from tests.support.draft_sets import write_draft
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE

ROOT = Path(__file__).resolve().parents[3]
LINES = [
    {"question_id": 81, "category": "coding", "turns": ["the hen and the hen", "and in the"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["he ran in the an"]},
]


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


class Workers:
    """In place of real processes. asked: (arm, prompt ids); after `stop_after` answers comes Ctrl-C."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.made: list[FakeArm] = []
        self._stop_after = stop_after

    def __call__(self, name: str, *, threads: int) -> FakeArm:
        def script(prompt: list[int], limit: int) -> dict[str, Any]:
            if limit < command_limit():
                if self._stop_after is not None and len(self.asked) >= self._stop_after:
                    raise KeyboardInterrupt
                self.asked.append((name, tuple(prompt)))
            return answering(ids=(105, 106, 107))(prompt, limit)

        self.made.append(FakeArm(name, script))
        return self.made[-1]


def command_limit() -> int:
    """Warm-up answers are longer than those of these tests."""
    return 16


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(command, "Worker", never)


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


def test_ctrl_c_keeps_what_was_measured_and_resume_runs_the_rest(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--policies", "edgespec", "--repeats", "2")
    monkeypatch.setattr(command, "Worker", first := Workers(stop_after=5))
    monkeypatch.setattr(sys, "argv", ["/x/pytest", "bench", "specbench", "--resume", "--out", "a b"])
    assert run(*words) == 130
    err = capsys.readouterr().err
    assert "2 questions, 2 arms, 2 repeats: 8 answers, kept in" in err, "said at once, not after minutes"
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


def test_resume_with_another_question_file_is_refused(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Worker", Workers(stop_after=1))
    assert run() == 130
    assert run("--resume", lines=LINES[:1]) == 2
    assert "sha256 was" in capsys.readouterr().err


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
        (["-n", "100000"], "--max-new-tokens must be at most"),
        (["--resident", "9000", "--memory-budget", "1KB"], "memory"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    run: Callable[..., int], no_models: None, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    try:
        code = run(*given)
    except SystemExit as left:  # argparse's own
        code = int(str(left.code))
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_file_without_a_usable_question_is_refused(
    run: Callable[..., int], no_models: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(lines=["{half"]) == 2
    assert "has no prompt" in capsys.readouterr().err
    assert run("--context", "64", lines=[{"question_id": 1, "category": "qa", "turns": ["the hen " * 60]}]) == 2
    assert "No question can be asked" in capsys.readouterr().err


def test_there_must_be_a_run_to_go_on_with_and_nothing_of_others_in_the_folder(
    run: Callable[..., int], no_models: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


def test_two_runs_into_one_folder(
    run: Callable[..., int], no_models: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
