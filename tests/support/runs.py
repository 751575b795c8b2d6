"""Run folders for tests, written by the writer that real runs use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.bench.specbench.folder import ArmInfo, Record, RunFolder, RunWriter
from edgespec.results import GenerationStats

SETTINGS: dict[str, Any] = {
    "questions": "question.jsonl",
    "sha256": "0" * 64,
    "model": "tiny",
    "fingerprint": "f" * 16,
    "policies": ["plain", "edgespec"],
    "order": "file",
    "seed": 0,
    "categories": None,
    "limit": None,
    "max_new_tokens": 64,
    "temperature": 0.0,
    "repeats": 1,
    "shard": "1/1",
    "weight_format": "exact",
    "threads": 2,
    "resident": 2,
    "load_rate": None,
    "drafts": "auto",
    "context": 2048,
}
MACHINE: dict[str, Any] = {"cpu": "a processor", "cores": 2, "threads": 2, "memory_bytes": 8 << 30, "versions": {}}


def record(question: int | str = 1, *, rounds: Sequence[int] = (), step: float = 0.01, **changes: Any) -> Record:
    """One turn: a prefill of 0.1 s that emits one token, then `rounds` (tokens each) of `step` seconds.

    Without `rounds`, ten of one token. Fields may be given, `stats` as some of GenerationStats' own.
    """
    emitted = tuple(rounds) or (1,) * 10
    tokens, decode = sum(emitted), step * len(emitted)
    stats = GenerationStats(
        prompt_tokens=20,
        new_tokens=tokens + 1,
        rounds=len(emitted),
        decode_seconds=decode,
        prefill_seconds=0.1,
        time_to_first_token_s=0.1,
        draft_share={"plain": len(emitted)},
    )
    whole = Record(
        question_id=str(question),
        category="writing",
        domain="chat",
        task="mt-bench",
        repeat=0,
        turn=0,
        order=int(question) - 1 if str(question).isdigit() else 0,
        prompt_tokens=20,
        token_ids=tuple(range(5, 6 + tokens)),
        round_tokens=emitted,
        first_token_s=0.1,
        decode_tokens=tokens,
        decode_s=decode,
        seconds=0.1 + decode,
        stats=stats.to_dict() | changes.pop("stats", {}),
        rss_bytes=300 << 20,
        disturbance=0.0,
    )
    return dataclasses.replace(whole, **changes)


def failed(question: int | str = 1, message: str = "ValueError: too difficult", **changes: Any) -> Record:
    """A turn that has no answer."""
    place = record(question, **changes)
    names = ("question_id", "category", "domain", "task", "repeat", "turn", "order", "group")
    return Record(**{name: getattr(place, name) for name in names}, error=message)


def write_run(
    path: Path,
    records: Mapping[str, Iterable[Record]],
    *,
    settings: Mapping[str, Any] | None = None,
    machine: Mapping[str, Any] | None = None,
    arms: Mapping[str, ArmInfo] | None = None,
    skipped: Sequence[dict[str, Any]] = (),
    finished: bool = True,
) -> Path:
    """A folder with these records by arm. arms: those that differ from a policy that is ok (or have no records)."""
    found = {name: list(of_arm) for name, of_arm in records.items()}
    infos = {name: ArmInfo("peer" if name.startswith("peer:") else "policy", weights="the file's") for name in found}
    questions = {r.question_id for of_arm in found.values() for r in of_arm}
    path.mkdir(parents=True, exist_ok=True)
    run = RunFolder(
        path=path,
        settings={**SETTINGS, "policies": list(found), **(settings or {})},
        machine={**MACHINE, **(machine or {})},
        command="edgespec bench specbench --questions question.jsonl",
        started="2030-01-01T00:00:00+00:00",
        version="0",
        arms=infos | dict(arms or {}),
        skipped=list(skipped),
        questions=len(questions),
    )
    writer = RunWriter(run)
    for name, of_arm in found.items():
        for one in of_arm:
            writer.append(name, one)
    writer.save(finished=finished)
    writer.close()
    return path
