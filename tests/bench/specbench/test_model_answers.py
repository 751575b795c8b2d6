"""model_answer: read in the way in which Spec-Bench's own evaluation reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.specbench.folder import read_run
from edgespec.bench.specbench.model_answers import write_answers
from edgespec.bench.specbench.questions import Question
from tests.bench.specbench.fakes import FakeTexts, question
from tests.support.runs import failed, record, write_run

QUESTIONS = [question(1, "a", "b"), question(2), question(3, id="x-3")]


def turns(repeat: int, **changes: Any) -> list[Any]:
    return [record(1, turn=0, repeat=repeat, **changes), record(1, turn=1, repeat=repeat, rounds=[4, 1], **changes)]


def answers(folder: Path, name: str, questions: Sequence[Question] = QUESTIONS) -> list[dict[str, Any]]:
    write_answers(read_run(folder), questions, FakeTexts().text, now=12.5)
    file = folder / "model_answer" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_schema_is_spec_benchs_own(tmp_path: Path) -> None:
    found = answers(write_run(tmp_path, {"a:b@4": [*turns(0), *turns(1), record("x-3", rounds=[2, 3])]}), "a_b_4")
    assert [list(line) for line in found] == [
        ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
    ] * 2
    assert [line["question_id"] for line in found] == [1, "x-3"]  # a number stays a number
    first = found[0]["choices"]
    assert [choice["index"] for choice in first] == [0, 1]
    assert list(first[0]) == ["index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"]
    assert first[0]["new_tokens"] == [11, 6]
    assert first[0]["decoding_steps"] == [10, 2]
    assert first[0]["turns"][1] == "5 6 7 8 9 10"
    assert first[0]["accept_lengths"] == [1] * 11 + [1, 4, 1]
    assert sum(first[0]["accept_lengths"]) == sum(first[0]["new_tokens"])
    assert (found[0]["tstamp"], found[0]["model_id"]) == (12.5, "tiny-a:b@4")


def test_its_speed_is_ours(tmp_path: Path) -> None:
    """As evaluation/speed.py: the mean over questions of new tokens / wall time, of the first choice."""
    runs = {"plain": [record(1), record(2)], "fast": [record(1, rounds=[5, 5]), record(2, rounds=[10])]}
    folder, questions = write_run(tmp_path, runs), [question(1), question(2)]
    firsts = {name: [line["choices"][0] for line in answers(folder, name, questions)] for name in runs}
    speeds = {name: [sum(c["new_tokens"]) / sum(c["wall_time"]) for c in found] for name, found in firsts.items()}
    assert speeds["plain"] == pytest.approx([11 / 0.2] * 2)
    assert speeds["fast"] == pytest.approx([11 / 0.12, 11 / 0.11])


def test_questions_with_an_error_or_half_a_repeat_are_left_out(tmp_path: Path) -> None:
    records = [*turns(0), *turns(1)[:1], record(2), failed(2, repeat=1), failed("x-3")]
    found = answers(write_run(tmp_path, {"plain": records}), "plain")
    assert [(line["question_id"], len(line["choices"])) for line in found] == [(1, 1)]


def test_plain_of_several_groups_is_there_once_and_keeps_its_ids(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"plain": [record(2), record("x-3"), record(2, group=1, rounds=[7])]})
    once, again = answers(folder, "plain"), answers(folder, "plain")
    assert [line["choices"][0]["new_tokens"] for line in once] == [[11], [11]]
    assert once == again


def test_what_an_engine_does_not_tell_is_not_made_up(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"peer:x": [record(2, round_tokens=()), record("x-3", token_ids=(), round_tokens=())]})
    found = answers(folder, "peer_x")
    assert [line["choices"][0]["accept_lengths"] for line in found] == [[], []]
    assert [line["choices"][0]["new_tokens"] for line in found] == [[11], [0]]


def test_what_was_run_later_in_another_group_is_there_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"late": [record("x-3", group=1, rounds=[7]), record(2), record("x-3", repeat=1)]})
    found = answers(folder, "late")
    assert [[choice["new_tokens"] for choice in line["choices"]] for line in found] == [[[11]], [[8], [11]]]
