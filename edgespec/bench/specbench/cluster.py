"""The shards of a run on many machines: which node runs which, and what one node does with one shard.

Every node runs one shard at a time, as the plain command with --shard in a process of its own. So all times are taken
on the node, between arms that ran there one after the other. Nothing here knows Ray; ray_cluster.py does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import edgespec
from edgespec.bench.specbench.folder import LOCK, RUN
from edgespec.bench.specbench.schedule import Shard

WRONG_INPUT = 2  # exit code of a command that refuses what it was given
INTERRUPTED = 130
MOST_NODES = 3  # that a shard is given to, one after the other
LAST_WORDS = 400  # characters of a failed command's last line that are shown
SECONDS_TO_END = 30.0
POLL_SECONDS = 0.2
# Ray sets these for its own workers; a shard uses the whole node and decides by itself.
NOT_INHERITED = ("OMP_NUM_THREADS",)


@dataclass(frozen=True, slots=True)
class Job:
    """One shard as a command of Python, without its --questions, --out and --shard, which the node adds.

    questions: name and content of the question file. version: of edgespec, which the node must have too.
    """

    shard: Shard
    command: tuple[str, ...]
    questions: tuple[str, bytes]
    version: str = edgespec.__version__


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a shard ended. files: its folder, path -> content. lost: why nothing came back at all."""

    host: str = ""
    code: int = 0
    message: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    lost: bool = False

    @property
    def spoils_node(self) -> bool:
        """Whether the next shard would not fare better there."""
        return self.lost or self.code == WRONG_INPUT


class Cluster(Protocol):
    """Machines that run jobs."""

    def nodes(self) -> list[str]:
        """Those that are there now."""

    def start(self, node: str, job: Job) -> Any:
        """Run a job there; returns a handle."""

    def wait(self, handles: Sequence[Any]) -> tuple[Any, Outcome]:
        """The first of them that ends, and how."""

    def stop(self, handles: Sequence[Any]) -> list[tuple[Any, Outcome]]:
        """End them; returns those that still sent something."""


def spread(jobs: Iterable[Job], cluster: Cluster, report: Callable[[Job, str, Outcome | None], None]) -> None:
    """Run all jobs, one at a time on each node. report(job, node, outcome): when one starts (None) and when it ends.

    A node that was lost, or that refused its shard, gets no other one, and its shard goes to the next node that is free
    when all others were given out, MOST_NODES in all; jobs for which no node is left are lost. Interrupted, it reports
    what the running ones have measured so far.
    """
    waiting, spoilt, tried = deque(jobs), set[str](), Counter[Shard]()
    running: dict[Any, tuple[str, Job]] = {}
    try:
        while waiting or running:
            busy = {node for node, _ in running.values()}
            for node in cluster.nodes():
                if waiting and node not in busy | spoilt:
                    job = waiting.popleft()
                    report(job, node, None)
                    running[cluster.start(node, job)] = (node, job)
            if not running:
                break
            handle, outcome = cluster.wait(list(running))
            node, job = running.pop(handle)
            report(job, node, outcome)
            if outcome.spoils_node:
                spoilt.add(node)
                tried[job.shard] += 1
                if tried[job.shard] < MOST_NODES and set(cluster.nodes()) - spoilt:
                    waiting.append(job)
    except BaseException:
        for handle, outcome in cluster.stop(list(running)):
            node, job = running[handle]
            report(job, node, outcome)
        raise
    for job in waiting:
        report(job, "", Outcome(code=1, message="no node is left to run it", lost=True))


def run_job(job: Job) -> Outcome:
    """On the node: run the shard in a folder that is gone afterwards, and return what it wrote."""
    host = socket.gethostname()
    if job.version != edgespec.__version__:
        text = f"the node has edgespec {edgespec.__version__}, and the run is of {job.version}; install the same there"
        return Outcome(host, WRONG_INPUT, text)
    with tempfile.TemporaryDirectory(prefix="edgespec-shard-") as work:
        name, content = job.questions
        questions, out, log = Path(work) / name, Path(work) / "out", Path(work) / "log"
        questions.write_bytes(content)
        words = ["--questions", str(questions), "--out", str(out), "--shard", str(job.shard)]
        try:
            code = _run([sys.executable, *job.command, *words], log)
        except KeyboardInterrupt:  # Ray makes it of a cancelled task; what was measured goes home
            return Outcome(host, INTERRUPTED, "interrupted", read_folder(out))
        return Outcome(host, code, _last_words(log) if code else "", read_folder(out))


def _run(command: Sequence[str], log: Path) -> int:
    """Exit code of the command. When this process is interrupted, so is the command, and it is awaited."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    with log.open("wb") as stderr:
        # Ray's processes are started deaf to Ctrl-C, and so would theirs be.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)  # an interrupt by Ray is no signal, which would end a plain wait
            return process.returncode
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:LAST_WORDS] if lines else "it said nothing"


def read_folder(folder: Path) -> dict[str, bytes]:
    """All files in a folder by relative path, but for its lock; nothing if it is not there."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def worth(files: dict[str, bytes]) -> tuple[bool, int]:
    """Whether the run in these files is finished, and how many answers it has: more is worth more."""
    try:
        finished = bool(json.loads(files[RUN])["finished"])
    except (KeyError, ValueError, TypeError):
        finished = False
    answered = b'"error": null'  # as the records have it
    return finished, sum(content.count(answered) for name, content in files.items() if name.endswith(".jsonl"))


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Make a folder of these files, whole or not at all, in place of what was there. OSError if it cannot."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        fresh, old = Path(work) / "new", Path(work) / "old"
        fresh.mkdir()
        for name, content in files.items():
            path = fresh / name
            if not path.resolve().is_relative_to(fresh.resolve()):
                raise OSError(f"the node sent a file that would lie outside its folder: {name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if folder.exists():
            folder.rename(old)
        try:
            fresh.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
