"""Which run folders belong together, and how: shards of one run, or the same questions on several machines."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from edgespec.bench.reporting.pairs import Part
from edgespec.bench.specbench.folder import RunFolder, differing
from edgespec.errors import ConfigError

# Settings that each shard may have for itself. Policies: an arm of one of them is compared with plain there.
_OWN = ("shard", "policies")
_MACHINES_OWN = ("threads",)  # and each machine
_MADE_OF_AUTO = {"context": "context", "slots": "drafts in memory at once"}  # by a machine, of its free memory


def parts(runs: Sequence[RunFolder]) -> list[Part]:
    """One part for shards of one run; one a machine where several machines had the same questions.

    Raises ConfigError if settings differ, or if a question is in two folders of one machine.
    """
    if not runs:
        raise ConfigError("Give the folder of a run to report on.")
    for run in runs[1:]:
        _same_settings(runs[0], run)
    machines: dict[Hashable, list[RunFolder]] = {}
    for run in runs:
        machines.setdefault(machine_key(run.machine), []).append(run)
    for group in machines.values():
        _disjoint(group)
    if len(machines) == 1 or not _overlapping(runs):
        return [Part(runs)]
    return [Part(group) for group in machines.values()]


def machine_key(machine: dict[str, Any]) -> Hashable:
    """What tells machines apart: processor, cores, threads, memory (which a kernel counts a little differently)."""
    memory = machine.get("memory_bytes") or 0
    return *(machine.get(name) for name in ("cpu", "cores", "threads", "device")), round(memory / 2**28)


def _same_settings(one: RunFolder, other: RunFolder) -> None:
    free = set(_OWN)
    names = list({**one.settings, **other.settings})  # as they are written: the questions and the model come first
    pairs = [(name, one.settings.get(name), other.settings.get(name)) for name in names]
    if machine_key(one.machine) != machine_key(other.machine):
        free.update(_MACHINES_OWN)
    else:
        known = [name for name in _MADE_OF_AUTO if name in one.machine and name in other.machine]
        pairs += [(_MADE_OF_AUTO[name], one.machine[name], other.machine[name]) for name in known]
    for name, left, right in pairs:
        if name not in free and left != right:
            first, second = differing(left, right)
            raise ConfigError(
                f"{one.path} and {other.path} do not belong together: {name} is {first} in the first and {second} in "
                "the second. Report on each by itself."
            )


def _ids(run: RunFolder) -> set[str]:
    return {record.question_id for records in run.records.values() for record in records}


def _disjoint(runs: Sequence[RunFolder]) -> None:
    seen: dict[str, RunFolder] = {}
    for run in runs:
        ids = _ids(run)
        twice = sorted(ids & seen.keys())
        if twice:
            more = f" (and {len(twice) - 1} more)" if len(twice) > 1 else ""
            raise ConfigError(
                f"Question {twice[0]}{more} is in {seen[twice[0]].path} and in {run.path}, on the same machine: give "
                "folders of different shards, each once."
            )
        seen.update(dict.fromkeys(ids, run))


def _overlapping(runs: Sequence[RunFolder]) -> bool:
    ids = [_ids(run) for run in runs]
    return sum(map(len, ids)) > len(set().union(*ids))
