"""Questions: what is read, what is left out and why, and in what order they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.specbench.questions import Question, chosen, ordered, read_questions, task_of
from edgespec.errors import ConfigError, PromptError

LINES: list[Any] = [
    {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
    {"question_id": "x-2", "category": "math_reasoning", "turns": ["c"]},
    "not json",
    {"question_id": 3, "turns": ["no category"]},
    {"category": "qa", "turns": ["no id"]},
    {"question_id": 81, "category": "qa", "turns": ["the id of the first"]},
    {"question_id": 4, "category": "qa", "turns": []},
    {"question_id": True, "category": "qa", "turns": ["no id either"]},
    {"question_id": 5, "category": "qa"},
    {"question_id": 6, "category": "coding", "turns": ["d"]},
    {"question_id": 7, "category": "writing", "turns": ["e"]},
    {"question_id": 8, "category": "writing", "turns": ["f"]},
]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def read(path: Path, order: str = "file", seed: int = 0) -> list[Question]:
    items, ids, _ = read_questions(path)
    return ordered(items, ids, order, seed)


def test_lines_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    _, _, skipped = read_questions(write(tmp_path / "q.jsonl", LINES))
    assert [(one.line, one.reason) for one in skipped] == [
        (3, "it is not JSON"),
        (4, "it has no 'category'"),
        (5, "it has no 'question_id'"),
        (6, "its question_id is that of line 1"),
        (7, "'turns' must be a list of texts"),
        (8, "'question_id' must be a whole number or a word"),
        (9, "it has neither 'prompt' nor 'turns'"),
    ]


def test_half_characters_are_found_before_anything_is_run(tmp_path: Path) -> None:
    texts = [
        {"question_id": "\ud800", "category": "qa", "turns": ["x"]},
        {"question_id": 2, "category": "\ud800", "turns": ["y"]},
        {"id": "a", "question_id": "\ud800", "category": "qa", "turns": ["z"]},
        {"question_id": 4, "category": "qa", "turns": ["w"]},
    ]
    items, ids, skipped = read_questions(write(tmp_path / "q.jsonl", texts))
    assert [ids[item.line] for item in items] == [4]
    assert [(one.line, "half a character" in one.reason) for one in skipped] == [(1, True), (2, True), (3, True)]


def test_questions_keep_their_ids_and_all_their_turns(tmp_path: Path) -> None:
    found = read(write(tmp_path / "q.jsonl", LINES))
    assert [q.id for q in found] == [81, "x-2", 6, 7, 8]
    assert found[0].turns == ("a", "b")
    assert [(q.domain, q.task) for q in found[:3]] == [
        ("chat", "mt-bench"),
        ("math", "math_reasoning"),
        ("code", "mt-bench"),
    ]
    assert task_of("rag") == "rag"


def test_a_file_of_nothing_usable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"line 1: it has no 'category'"):
        read_questions(write(tmp_path / "q.jsonl", LINES[3:5]))
    with pytest.raises(PromptError, match="cannot be read"):
        read_questions(tmp_path / "absent.jsonl")


def test_categories_and_tasks_are_chosen_by_name(tmp_path: Path) -> None:
    items, ids, _ = read_questions(write(tmp_path / "q.jsonl", LINES))

    def of(names: list[str] | None, limit: int | None = None) -> list[int | str]:
        return [ids[item.line] for item in chosen(items, names, limit)]

    assert of(["mt-bench"]) == [81, 6, 7, 8]
    assert of(["coding", "math_reasoning"]) == ["x-2", 6]
    assert of(None, 2) == [81, 7, "x-2", 6]  # of each category, evenly spread
    assert of(["writing"], 1) == [81]
    with pytest.raises(ConfigError, match="no question is of 'codng'; did you mean coding"):
        of(["codng"])
    with pytest.raises(ConfigError, match="known are coding, math_reasoning, mt-bench, writing"):
        of(["zzz"])


def test_the_order_is_the_files_or_shuffled_by_the_seed_alone_or_one_of_each_domain(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", LINES)
    assert [q.order for q in read(path)] == [0, 1, 2, 3, 4]
    assert [q.id for q in read(path, "interleaved")] == [81, "x-2", 6, 7, 8]
    seeds = [[q.id for q in read(path, "shuffled", seed)] for seed in (1, 1, 2, 3, 4)]
    assert seeds[0] == seeds[1]
    assert len({tuple(ids) for ids in seeds}) > 1
    assert all(sorted(map(str, ids)) == ["6", "7", "8", "81", "x-2"] for ids in seeds)
