"""`bench specbench --ray ADDRESS --shards N`: the shards of a run on the nodes of a Ray cluster, then merged.

DIR/shard-I-of-N is the run folder of a shard as its node wrote it; DIR/cluster.json is what was asked for, so that
--resume runs the missing shards of the same run and no other. What a shard that failed had measured is merged too; run
again, it starts anew: half of it on one machine and half on another could not be compared. Of two that failed, the one
with more answers is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec.bench.reporting.terminal import shown
from edgespec.bench.specbench import preparing
from edgespec.bench.specbench.cluster import (
    INTERRUPTED,
    LAST_WORDS,
    SECONDS_TO_END,
    Cluster,
    Job,
    Outcome,
    read_folder,
    run_job,
    spread,
    worth,
    write_folder,
)
from edgespec.bench.specbench.folder import RUN, has_run, locked, read_run
from edgespec.bench.specbench.schedule import Shard
from edgespec.errors import ConfigError
from edgespec.files import write_text

FAILED = 1
LOCAL, AUTO = "local", "auto"
PLAN = "cluster.json"
SECONDS_TO_CONNECT = 10.0

Merge = Callable[[Sequence[Path], Path], int]


def add_arguments(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """The arguments of a run on a cluster. count: converts a whole number from 1 up."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run the shards on the nodes of this Ray cluster: HOST:PORT of its head, 'auto' for the one that this "
        "machine is part of, 'local' for this machine alone; edgespec, the model and every file that the command "
        "names, but for the questions, must be on each node",
    )
    parser.add_argument("--shards", type=count, metavar="N", help="with --ray: number of shards (one for each node)")


def run(args: argparse.Namespace, words: Sequence[str] | None = None) -> int:
    """Run the shards that are missing, bring them back, merge; 1 if one failed, 130 after Ctrl-C.

    words: the command line without the program (sys.argv[1:]), of which each shard gets its own form.
    """
    if args.shard:
        raise ConfigError("--ray makes the shards itself: give --shards N, and no --shard")
    asked, out = preparing.asked(args), Path(args.out).expanduser()
    questions = (asked.path.name, asked.path.read_bytes())
    command = ("-m", "edgespec", *shard_words(sys.argv[1:] if words is None else words))
    with locked(out), RayCluster(args.ray) as cluster:
        count = args.shards or _shards_before(out) or min(len(cluster.nodes()), len(asked.whole))
        if count > len(asked.whole):
            raise ConfigError(f"--shards {count}: there are only {len(asked.whole)} questions")
        jobs = [Job(Shard(index, count), command, questions) for index in range(1, count + 1)]
        return run_shards(jobs, cluster, out, resume=args.resume, merge=_merge, retry_errors=args.retry_errors)


def shard_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without those that a shard has of its own."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--ray", "--shards", "--out", "--questions"):
        own.add_argument(name)
    for name in ("--resume", "--retry-errors"):
        own.add_argument(name, action="store_true")
    return own.parse_known_args(list(words))[1]


def run_shards(
    jobs: Sequence[Job], cluster: Cluster, out: Path, *, resume: bool, merge: Merge, retry_errors: bool = False
) -> int:
    """Run the jobs whose folder in `out` is not finished, and merge all that are there; returns the exit code.

    retry_errors: also those in which something failed, whole.
    """
    _check_plan(jobs, out, resume)
    folders = {job.shard: out / f"shard-{job.shard.index}-of-{job.shard.count}" for job in jobs}
    missing = [job for job in jobs if not _finished(folders[job.shard], without_errors=retry_errors)]
    done: set[Shard] = set()
    faulty: set[Shard] = set()

    def report(job: Job, node: str, outcome: Outcome | None) -> None:
        if outcome is None:
            _say(f"shard {job.shard} runs on {node}")
            return
        message = _keep(folders[job.shard], outcome)
        if outcome.files and _finished(folders[job.shard]):
            _say(f"shard {job.shard} is done" + (f", with errors: {message}" if message else ""))
            done.add(job.shard)
            faulty.update([job.shard] if message else [])
            return
        where = f" on {outcome.host or node}" if outcome.host or node else ""
        _say(f"shard {job.shard}{where} failed: {message or 'its run is not finished'}")

    try:
        spread(missing, cluster, report)
    except KeyboardInterrupt:
        _say(f"interrupted; what was measured is in {out}, and --resume runs the shards that are not done")
        return INTERRUPTED
    there = [folder for folder in folders.values() if has_run(folder)]
    failed = [str(job.shard) for job in missing if job.shard not in done]
    if failed:
        _say(f"{len(failed)} of {len(jobs)} shards are not finished ({', '.join(failed)}); --resume runs them anew")
    merged = merge(there, out) if there else FAILED
    return FAILED if failed or faulty else merged


def _keep(folder: Path, outcome: Outcome) -> str:
    """Write what a node sent, unless what is there is worth more, and return what is to be said about it."""
    try:
        if outcome.files and worth(outcome.files) >= worth(read_folder(folder)):
            write_folder(folder, outcome.files)
    except OSError as error:
        return f"{folder} cannot be written ({error})"
    return f"{outcome.message} (code {outcome.code})" if outcome.code and not outcome.lost else outcome.message


def _say(text: str) -> None:
    print(shown(text), file=sys.stderr, flush=True)


def _finished(folder: Path, *, without_errors: bool = False) -> bool:
    if not (folder / RUN).exists():
        return False
    run = read_run(folder)
    if without_errors and any(arm.status == "error" for arm in run.arms.values()):
        return False
    if without_errors and any(record.error is not None for records in run.records.values() for record in records):
        return False
    return run.finished


def _merge(folders: Sequence[Path], out: Path) -> int:
    from edgespec.cli.main import main

    return main(["bench", "report", *map(str, folders), "--out", str(out)])


def _plan(jobs: Sequence[Job]) -> dict[str, Any]:
    first = jobs[0]
    return {
        "shards": first.shard.count,
        "command": list(first.command),
        "questions": hashlib.sha256(first.questions[1]).hexdigest(),
        "version": first.version,
    }


def _check_plan(jobs: Sequence[Job], out: Path, resume: bool) -> None:
    """Write what is asked for into the folder. ConfigError if another run is there, or this one and not `resume`."""
    wanted, known = _plan(jobs), _read_plan(out)
    if known is None:
        if (out / RUN).exists():
            raise ConfigError(f"{out} holds a run on this machine alone: give --out another folder.")
        try:
            write_text(out / PLAN, json.dumps(wanted, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"{out / PLAN} cannot be written: {error.strerror}.") from error
        return
    if not resume:
        raise ConfigError(f"{out} holds shards already: give --resume to run those that are missing, or another --out.")
    different = [key for key, value in wanted.items() if known.get(key) != value]
    if different:
        key = different[0]
        raise ConfigError(
            f"{out} holds another run: its {key} was {known.get(key)!r} and is {wanted[key]!r} now. "
            "Give --out another folder, or the same command as before."
        )


def _read_plan(out: Path) -> dict[str, Any] | None:
    try:
        plan = json.loads((out / PLAN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out / PLAN} cannot be read ({error}): give --out another folder.") from error
    if not isinstance(plan, dict):
        raise ConfigError(f"{out / PLAN} is damaged: give --out another folder.")
    return plan


def _shards_before(out: Path) -> int | None:
    plan = _read_plan(out)
    shards = plan.get("shards") if plan else None
    if shards is not None and (isinstance(shards, bool) or not isinstance(shards, int) or shards < 1):
        raise ConfigError(f"{out / PLAN} is damaged (shards is {shards!r}): give --out another folder.")
    return shards


class RayCluster:
    """The nodes of a Ray cluster, for as long as the `with` block lasts. ConfigError if it cannot be reached."""

    def __init__(self, address: str) -> None:
        # What a benchmark ran on is nobody else's business.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray needs Ray ({error}); install it with: pip install 'edgespec[ray]'") from error
        _reachable(address)
        own: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"--ray {address}: {' '.join(str(error).split())}") from error
        self._ray: Any = ray
        self._names: dict[str, str] = {}
        self._seen: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ray.shutdown()

    def nodes(self) -> list[str]:
        """Those that have processors to offer, by host, with a number where one host has several."""
        found = []
        for node in sorted(self._ray.nodes(), key=lambda one: str(one["NodeID"])):
            if node["Alive"] and node["Resources"].get("CPU"):
                name = self._names.setdefault(node["NodeID"], _unique(node["NodeManagerHostname"], self._names))
                self._seen[name] = node
                found.append(name)
        return found

    def start(self, node: str, job: Job) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        seen = self._seen[node]
        # All that the node has: nothing else of Ray may run beside what is timed.
        options = {"num_cpus": seen["Resources"]["CPU"], "num_gpus": seen["Resources"].get("GPU", 0)}
        there = NodeAffinitySchedulingStrategy(node_id=seen["NodeID"], soft=False)
        task = self._ray.remote(max_retries=0, scheduling_strategy=there, **options)(run_job)
        return task.remote(job)

    def wait(self, handles: Sequence[Any]) -> tuple[Any, Outcome]:
        (first, *_), _ = self._ray.wait(list(handles), num_returns=1)
        return first, self._outcome(first)

    def _outcome(self, handle: Any) -> Outcome:
        try:
            found: Outcome = self._ray.get(handle)
            return found
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            message = f"{type(error).__name__}: {lines[-1][:LAST_WORDS] if lines else 'no message'}"
            return Outcome(code=FAILED, message=message, lost=True)

    def stop(self, handles: Sequence[Any]) -> list[tuple[Any, Outcome]]:
        for handle in handles:
            self._ray.cancel(handle)  # an interrupt, which the shard's command gets too
        if not handles:
            return []
        ended, _ = self._ray.wait(list(handles), num_returns=len(handles), timeout=2 * SECONDS_TO_END)
        found = [(handle, self._outcome(handle)) for handle in ended]
        return [(handle, outcome) for handle, outcome in found if outcome.files]


def _unique(host: str, names: dict[str, str]) -> str:
    taken = sum(re.fullmatch(rf"{re.escape(host)}( \(\d+\))?", name) is not None for name in names.values())
    return f"{host} ({taken + 1})" if taken else host


def _reachable(address: str) -> None:
    """ConfigError where nobody listens: Ray itself would try for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if address in (LOCAL, AUTO):
        return
    if not separator or not port.isdigit():
        raise ConfigError(f"--ray wants HOST:PORT of a cluster's head, '{AUTO}' or '{LOCAL}', not {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray {address}: no Ray cluster can be reached there ({error})") from error
