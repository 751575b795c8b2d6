"""A run's shards on other machines: what comes back is kept, what does not is named. One test starts a real Ray."""

from __future__ import annotations

import _thread
import argparse
import builtins
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from edgespec.bench.specbench import cluster as cluster_module
from edgespec.bench.specbench import command as specbench
from edgespec.bench.specbench import ray_cluster
from edgespec.bench.specbench.cluster import Job, Outcome, run_job, spread, write_folder
from edgespec.bench.specbench.ray_cluster import RayCluster, run_shards, shard_words
from edgespec.bench.specbench.schedule import Shard
from edgespec.errors import ConfigError, EdgespecError

RUN = {
    "format": 1, "settings": {}, "machine": {}, "command": "", "started": "", "version": "", "arms": {},
    "skipped": [], "questions": 1, "finished": True,
}  # fmt: skip
# Stands for the command on the node: fails on shard 2 unless the file that it is told of is there.
COMMAND = f"""
import json, pathlib, sys
luck, words = pathlib.Path(sys.argv[1]), dict(zip(sys.argv[2::2], sys.argv[3::2]))
out = pathlib.Path(words["--out"])
out.mkdir()
(out / "lock").touch()
(out / "records").mkdir()
(out / "records" / "plain.jsonl").write_text(pathlib.Path(words["--questions"]).read_text() + words["--shard"])
bad = words["--shard"].startswith("2/") and not luck.exists()
(out / "run.json").write_text(json.dumps({RUN!r} | {{"finished": not bad}}))
if bad:
    print("first line\\nout of luck", file=sys.stderr)
    sys.exit(3)
"""


def jobs(count: int, luck: Path = Path("luck"), **changes) -> list[Job]:
    settings = {"command": ("-c", COMMAND, str(luck)), "questions": ("q.jsonl", b"text "), **changes}
    return [Job(Shard(index, count), **settings) for index in range(1, count + 1)]


def run_folder(finished: bool = True, answers: int = 0, **changes) -> dict[str, bytes]:
    records = b'{"error": null}\n' * answers
    return {"run.json": json.dumps(RUN | {"finished": finished} | changes).encode(), "records/plain.jsonl": records}


class FakeCluster:
    """Nodes that end their jobs in the order in which they got them. `endings[shard index]`, or [node, shard index], is
    how; `sent` comes of those that are stopped."""

    def __init__(self, nodes: list[str], endings: dict | None = None) -> None:
        self.there, self.endings = nodes, endings or {}
        self.sent: dict[int, Outcome] = {}
        self.started: list[tuple[str, int]] = []
        self.most: dict[str, int] = {}
        self.running: dict[int, str] = {}
        self.stopped: list[int] = []
        self.jobs: list[Job] = []

    def nodes(self) -> list[str]:
        return list(self.there)

    def start(self, node: str, job: Job) -> int:
        self.jobs.append(job)
        self.started.append((node, job.shard.index))
        self.running[job.shard.index] = node
        self.most[node] = max(self.most.get(node, 0), list(self.running.values()).count(node))
        return job.shard.index

    def wait(self, handles):
        where = self.running[handles[0]], handles[0]
        outcome = self.endings.get(where) or self.endings.get(handles[0], Outcome("host", files=run_folder()))
        if isinstance(outcome, BaseException):
            raise outcome
        node = self.running.pop(handles[0])
        if outcome.lost:
            self.there.remove(node)
        return handles[0], outcome

    def stop(self, handles):
        self.stopped += handles
        return [(handle, self.sent[handle]) for handle in handles if handle in self.sent]


def merger(log: list) -> ray_cluster.Merge:
    def merge(folders, out) -> int:
        log.append(([folder.name for folder in folders], out))
        return 0

    return merge


def test_each_node_runs_one_shard_at_a_time():
    cluster = FakeCluster(["a", "b"])
    spread(jobs(5), cluster, lambda *what: None)
    assert cluster.started[:2] == [("a", 1), ("b", 2)]
    assert sorted(index for _, index in cluster.started) == [1, 2, 3, 4, 5]
    assert cluster.most == {"a": 1, "b": 1}


def test_shards_come_back_and_are_merged(tmp_path, capsys):
    merged: list = []
    assert run_shards(jobs(3), FakeCluster(["a"]), tmp_path, resume=False, merge=merger(merged)) == 0
    names = ["shard-1-of-3", "shard-2-of-3", "shard-3-of-3"]
    assert merged == [(names, tmp_path)]
    assert all((tmp_path / name / "run.json").is_file() for name in names)
    assert "shard 2/3 is done" in capsys.readouterr().err


def test_a_node_that_dies_is_named_and_the_others_go_on(tmp_path, capsys):
    lost = Outcome(code=1, message="NodeDiedError: the node is gone", lost=True)
    cluster, merged = FakeCluster(["a", "b"], {1: lost}), []
    assert run_shards(jobs(4), cluster, tmp_path, resume=False, merge=merger(merged)) == 1
    assert merged[0][0] == ["shard-2-of-4", "shard-3-of-4", "shard-4-of-4"]
    assert cluster.started == [("a", 1), ("b", 2), ("b", 3), ("b", 4), ("b", 1)]
    text = capsys.readouterr().err
    assert "shard 1/4 on a failed: NodeDiedError: the node is gone" in text
    assert "1 of 4 shards are not finished (1/4)" in text


def test_without_any_node_left_the_rest_fails(tmp_path, capsys):
    lost = Outcome(code=1, message="gone", lost=True)
    merged: list = []
    assert run_shards(jobs(3), FakeCluster(["a"], {1: lost}), tmp_path, resume=False, merge=merger(merged)) == 1
    assert merged == []
    assert "shard 3/3 failed: no node is left to run it" in capsys.readouterr().err


def test_a_node_that_refuses_its_shard_does_not_get_all_the_others(tmp_path):
    cluster = FakeCluster(["a", "b"], {1: Outcome("a", 2, "error: no such model")})
    assert run_shards(jobs(4), cluster, tmp_path, resume=False, merge=merger([])) == 1
    assert cluster.started == [("a", 1), ("b", 2), ("b", 3), ("b", 4), ("b", 1)], "perhaps it was the node: at last"


def test_a_shard_that_one_node_cannot_run_is_run_by_another(tmp_path, capsys):
    for outcome in (Outcome("a", 2, "error: no such model"), Outcome(code=1, message="NodeDiedError", lost=True)):
        cluster, merged, out = FakeCluster(["a", "b"], {("a", 1): outcome}), [], tmp_path / str(outcome.code)
        out.mkdir()
        assert run_shards(jobs(2), cluster, out, resume=False, merge=merger(merged)) == 0
        assert cluster.started == [("a", 1), ("b", 2), ("b", 1)]
        assert len(merged[0][0]) == 2
        assert "shard 1/2 runs on b" in capsys.readouterr().err


def test_a_shard_that_nobody_takes_does_not_go_to_all_nodes(tmp_path):
    cluster = FakeCluster(list("abcde"), {1: Outcome("x", 2, "error: no question")})
    assert run_shards(jobs(1), cluster, tmp_path, resume=False, merge=merger([])) == 1
    assert cluster.started == [("a", 1), ("b", 1), ("c", 1)]


def test_of_two_that_failed_the_one_with_more_answers_is_kept(tmp_path):
    folder = tmp_path / "shard-1-of-1"
    for answers, kept in ((3, 3), (2, 3), (4, 4)):
        cluster = FakeCluster(["a"], {1: Outcome("a", 1, "killed", run_folder(False, answers))})
        assert run_shards(jobs(1), cluster, tmp_path, resume=answers != 3, merge=merger([])) == 1
        assert len((folder / "records" / "plain.jsonl").read_bytes().splitlines()) == kept
    done = FakeCluster(["a"], {1: Outcome("a", files=run_folder(True, 2))})
    assert run_shards(jobs(1), done, tmp_path, resume=True, merge=merger([])) == 0


def test_a_shard_with_errors_is_done_and_asked_once_more_only_if_that_is_wanted(tmp_path, capsys):
    broken = {"kind": "policy", "status": "error", "message": "no room", "weights": "", "peak_memory_bytes": None}
    faulty = Outcome("a", 1, "no room", run_folder(arms={"b": broken}))
    assert run_shards(jobs(2), FakeCluster(["a"], {2: faulty}), tmp_path, resume=False, merge=merger([])) == 1
    assert "shard 2/2 is done, with errors: no room (code 1)" in capsys.readouterr().err
    idle, again = FakeCluster(["a"]), FakeCluster(["a"])
    assert run_shards(jobs(2), idle, tmp_path, resume=True, merge=merger([])) == 0
    assert idle.started == []
    assert run_shards(jobs(2), again, tmp_path, resume=True, merge=merger([]), retry_errors=True) == 0
    assert again.started == [("a", 2)]


def test_resume_runs_only_what_is_not_finished(tmp_path, capsys):
    half, merged = Outcome("a", 1, "error: killed", run_folder(finished=False)), []
    assert run_shards(jobs(3), FakeCluster(["a"], {2: half}), tmp_path, resume=False, merge=merger(merged)) == 1
    assert "shard 2/3 on a failed: error: killed (code 1)" in capsys.readouterr().err
    assert "shard-2-of-3" in merged.pop()[0]  # what it had measured counts
    cluster = FakeCluster(["a"])
    assert run_shards(jobs(3), cluster, tmp_path, resume=True, merge=merger(merged)) == 0
    assert cluster.started == [("a", 2)]
    assert len(merged[0][0]) == 3


def test_a_folder_with_shards_is_refused_without_resume_and_with_another_run(tmp_path):
    run_shards(jobs(2), FakeCluster(["a"]), tmp_path, resume=False, merge=merger([]))
    idle = FakeCluster(["a"])
    with pytest.raises(ConfigError, match="give --resume"):
        run_shards(jobs(2), idle, tmp_path, resume=False, merge=merger([]))
    for other, word in ((jobs(3), "shards"), (jobs(2, questions=("q", b"x")), "questions"), (jobs(2, Path("b")), "co")):
        with pytest.raises(ConfigError, match=f"another run: its {word}"):
            run_shards(other, idle, tmp_path, resume=True, merge=merger([]))
    assert idle.started == []


def test_interrupted_shards_are_stopped_and_the_others_kept(tmp_path, capsys):
    cluster = FakeCluster(["a", "b"], {2: KeyboardInterrupt()})
    cluster.sent[2] = Outcome("b", 130, "interrupted", run_folder(False, 5))
    assert run_shards(jobs(4), cluster, tmp_path, resume=False, merge=merger([])) == 130
    assert cluster.stopped == [2, 3]
    assert (tmp_path / "shard-1-of-4" / "run.json").is_file()
    assert len((tmp_path / "shard-2-of-4" / "records" / "plain.jsonl").read_bytes().splitlines()) == 5
    assert "--resume" in capsys.readouterr().err


def test_the_words_of_a_shard():
    own = ["--ray", "h:1", "--shards", "4", "--out=D", "--questions", "q", "--resume", "--retry-errors"]
    assert shard_words(["bench", "specbench", *own, "--seed", "7"]) == ["bench", "specbench", "--seed", "7"]


def test_on_the_node_the_command_gets_its_own_folder_and_threads(tmp_path, monkeypatch):
    script = "import os, sys; sys.exit('OMP ' + os.environ.get('OMP_NUM_THREADS', 'free') + ' ' + sys.argv[-1])"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    outcome = run_job(Job(Shard(1, 2), ("-c", script), ("q.jsonl", b"")))
    assert (outcome.code, outcome.message, outcome.files) == (1, "OMP free 1/2", {})


def test_a_node_with_another_version_says_so():
    outcome = run_job(Job(Shard(1, 1), ("-c", ""), ("q", b""), version="0.0.0"))
    assert outcome.spoils_node
    assert "the run is of 0.0.0" in outcome.message


# Says that it runs with one file, and that it was interrupted with another.
PATIENT = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    out.mkdir()
    (out / "run.json").write_text("half")
    pathlib.Path(sys.argv[2]).touch()
"""


def patient(folder: Path) -> tuple[Job, Path, Path]:
    ready, ended = folder / "ready", folder / "ended"
    return Job(Shard(1, 1), ("-c", PATIENT, str(ready), str(ended)), ("q", b"")), ready, ended


def await_file(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)


def test_an_interrupt_reaches_the_command_of_the_shard(tmp_path):
    job, ready, ended = patient(tmp_path)

    def interrupt() -> None:
        await_file(ready)
        _thread.interrupt_main()  # as Ray does it

    threading.Thread(target=interrupt, daemon=True).start()
    outcome = run_job(job)
    assert ended.exists()
    assert (outcome.code, outcome.message, outcome.files) == (130, "interrupted", {"run.json": b"half"})


def test_a_folder_is_replaced_whole_and_nothing_is_written_beside_it(tmp_path):
    write_folder(tmp_path / "d", {"a/b": b"1", "c": b"2"})
    write_folder(tmp_path / "d", {"c": b"3"})
    assert cluster_module.read_folder(tmp_path / "d") == {"c": b"3"}
    with pytest.raises(OSError, match="outside"):
        write_folder(tmp_path / "d", {"../e": b""})
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    write_folder(tmp_path / "d", {"a": b"1"})
    rename = Path.rename

    def failing(self, target):
        if self.name == "new":
            raise OSError("no room")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no room"):
        write_folder(tmp_path / "d", {"a": b"2"})
    assert cluster_module.read_folder(tmp_path / "d") == {"a": b"1"}


def test_a_damaged_plan_is_named(tmp_path):
    for shards in ("4", True, 0):
        (tmp_path / "cluster.json").write_text(json.dumps({"shards": shards}))
        with pytest.raises(ConfigError, match=r"cluster\.json is damaged"):
            ray_cluster._shards_before(tmp_path)


QUESTION = '{"question_id": 1, "category": "qa", "turns": ["Why?"]}\n'


def command(folder: Path, **changes) -> argparse.Namespace:
    """What the command's parser gives for one question."""
    (folder / "q.jsonl").write_text(QUESTION)
    parser = argparse.ArgumentParser()
    specbench.add_arguments(parser, int)
    args = parser.parse_args(["--questions", str(folder / "q.jsonl"), "--out", str(folder / "o"), "--ray", "local"])
    return argparse.Namespace(**{**vars(args), **changes})


def test_no_ray_is_said_with_the_extra_to_install(tmp_path, monkeypatch):
    whole = builtins.__import__

    def without_ray(name, *rest, **more):
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return whole(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(ConfigError, match=r"pip install 'edgespec\[ray\]'"):
        ray_cluster.run(command(tmp_path), [])


def test_what_is_wrong_is_refused_before_any_cluster_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "RayCluster", lambda address: pytest.fail("asked the cluster"))
    (tmp_path / "file").write_text("")
    for changes, words in (
        ({"shard": "1/2"}, "no --shard"),
        ({"questions": str(tmp_path / "none")}, "none"),
        ({"categories": ["cooking"]}, "no question is of 'cooking'"),
        ({"out": str(tmp_path / "file" / "o")}, "cannot be written"),
    ):
        with pytest.raises(EdgespecError, match=words):
            ray_cluster.run(command(tmp_path, **changes), [])


class Inside(FakeCluster):
    """A cluster as the command opens one."""

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def test_the_command_makes_a_shard_for_each_node_but_none_without_a_question(tmp_path, monkeypatch):
    cluster, merged = Inside(["a", "b"]), []
    monkeypatch.setattr(ray_cluster, "RayCluster", lambda address: cluster)
    monkeypatch.setattr(ray_cluster, "_merge", merger(merged))
    with pytest.raises(ConfigError, match="there are only 1 questions"):
        ray_cluster.run(command(tmp_path, shards=2), [])
    assert ray_cluster.run(command(tmp_path), ["bench", "specbench", "--ray", "local", "--seed", "3"]) == 0
    assert [folders for folders, _ in merged] == [["shard-1-of-1"]]
    assert cluster.jobs[0].command == ("-m", "edgespec", "bench", "specbench", "--seed", "3")
    assert cluster.jobs[0].questions == ("q.jsonl", QUESTION.encode())


def test_an_address_where_nobody_listens_is_refused_at_once():
    pytest.importorskip("ray")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"--ray {address}: no Ray cluster can be reached there"):
            RayCluster(address)
    with pytest.raises(ConfigError, match="HOST:PORT"):
        RayCluster("somewhere")


@pytest.mark.slow
def test_on_a_real_local_cluster(tmp_path, capsys):
    pytest.importorskip("ray")
    out, luck, merged = tmp_path / "out", tmp_path / "luck", []
    out.mkdir()
    with RayCluster("local") as cluster:
        assert len(cluster.nodes()) == 1
        assert run_shards(jobs(3, luck), cluster, out, resume=False, merge=merger(merged)) == 1
        assert f"shard 2/3 on {socket.gethostname()} failed: out of luck (code 3)" in capsys.readouterr().err
        luck.touch()
        assert run_shards(jobs(3, luck), cluster, out, resume=True, merge=merger(merged)) == 0
        broken = Job(Shard(1, 1), ("-c", ""), ("no/such/folder", b""))  # raises on the node
        _, outcome = cluster.wait([cluster.start(cluster.nodes()[0], broken)])
        assert outcome.lost
        assert "FileNotFoundError" in outcome.message
        job, ready, ended = patient(tmp_path)
        handle = cluster.start(cluster.nodes()[0], job)
        await_file(ready)
        ((stopped, sent),) = cluster.stop([handle])
        assert ended.exists()
        assert (stopped, sent.files) == (handle, {"run.json": b"half"})
    assert [len(folders) for folders, _ in merged] == [3, 3]
    assert (out / "shard-2-of-3" / "records" / "plain.jsonl").read_text() == "text 2/3"
    assert not (out / "shard-1-of-3" / "lock").exists()
