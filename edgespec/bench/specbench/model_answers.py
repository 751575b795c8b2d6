"""Answers in Spec-Bench's own form, so that its scripts read ours: model_answer/<arm>.jsonl, made from the records."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.bench.specbench.folder import ANSWERS, Record, RunFolder, file_name
from edgespec.bench.specbench.questions import Question
from edgespec.errors import ConfigError
from edgespec.files import write_text

_NAMESPACE = uuid.UUID("6f3c2d0a-8f5e-4f0e-9a52-6f2b1c1b7a10")  # so that an answer keeps its id when a run is resumed


def write_answers(
    run: RunFolder, questions: Sequence[Question], text: Callable[[Sequence[int]], str], *, now: float | None = None
) -> None:
    """One file for every arm with records, each written whole. text: of an answer's token ids."""
    for arm, records in run.records.items():
        if not records:
            continue
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(run, arm, questions, text, now)]
        file = run.path / ANSWERS / f"{file_name(arm)}.jsonl"
        try:
            write_text(file, "".join(lines))
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}.") from error


def _lines(
    run: RunFolder, arm: str, questions: Iterable[Question], text: Callable[[Sequence[int]], str], now: float | None
) -> Iterable[dict[str, Any]]:
    """The questions that the arm answered without an error, in order; each repeat from the first group that has it."""
    first: dict[tuple[str, int], int] = {}
    found: dict[str, dict[int, dict[int, Record]]] = {}
    for record in sorted(run.records[arm], key=lambda record: record.group):
        if first.setdefault((record.question_id, record.repeat), record.group) == record.group:
            found.setdefault(record.question_id, {}).setdefault(record.repeat, {})[record.turn] = record
    model = Path(str(run.settings.get("model", "model"))).name
    for question in questions:
        choices = _choices(found.get(question.key, {}), len(question.turns), text)
        if choices:
            yield {
                "question_id": question.id,
                "category": question.category,
                "answer_id": uuid.uuid5(_NAMESPACE, f"{run.started}/{arm}/{question.key}").hex,
                "model_id": f"{model}-{arm}",
                "choices": choices,
                "tstamp": time.time() if now is None else now,
            }


def _choices(
    repeats: Mapping[int, Mapping[int, Record]], turns: int, text: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """The repeats that are whole; none if any turn of any repeat has an error."""
    if any(record.error is not None for of_turn in repeats.values() for record in of_turn.values()):
        return []
    whole = [
        [of_turn[turn] for turn in range(turns)] for _, of_turn in sorted(repeats.items()) if len(of_turn) == turns
    ]
    return [_choice(index, records, text) for index, records in enumerate(whole)]


def _choice(index: int, records: Sequence[Record], text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """One repeat as Spec-Bench has it. As in its own baseline, `decoding_steps` are the target's forwards after the
    prefill's, and the prefill's token is the first of the turn's `accept_lengths`."""
    return {
        "index": index,
        "turns": [text(record.token_ids) for record in records],
        "decoding_steps": [len(record.round_tokens) for record in records],
        "new_tokens": [len(record.token_ids) for record in records],
        "wall_time": [record.seconds for record in records],
        "accept_lengths": [count for record in records for count in accept_lengths(record)],
    }


def accept_lengths(record: Record) -> list[int]:
    """Tokens of every forward of the target; nothing where the engine does not tell them."""
    tokens = len(record.token_ids)
    if tokens > 1 and not record.round_tokens:
        return []
    return [1, *record.round_tokens] if tokens else []
