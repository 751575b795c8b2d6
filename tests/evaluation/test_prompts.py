"""Prompt files: both forms, and everything that is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.errors import PromptError
from edgespec.evaluation.prompts import MAX_LINE, limited, read_prompts


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_our_own_form(tmp_path: Path) -> None:
    file = write(tmp_path / "code.jsonl", {"id": "a", "prompt": "one"}, {"prompt": "two"})
    items, skipped = read_prompts([file])
    assert [(i.name, i.domain, i.category, i.turns, i.line) for i in items] == [
        ("a", "code", "code", ("one",), 1),
        ("code:2", "code", "code", ("two",), 2),
    ]
    assert skipped == []
    assert read_prompts([file], domain="maths")[0][0].domain == "maths"


def test_questions_are_grouped(tmp_path: Path) -> None:
    categories = ["coding", "writing", "stem", "math_reasoning", "math", "translation", "extraction"]
    lines = [
        {"question_id": n, "category": c, "turns": [f"first {n}", f"second {n}"]} for n, c in enumerate(categories)
    ]
    file = write(tmp_path / "question.jsonl", *lines)
    items, _ = read_prompts([file])
    assert [item.domain for item in items] == ["code", "chat", "chat", "math", "math", "translation", "extraction"]
    assert [item.category for item in items] == categories
    assert items[0].turns == ("first 0",)
    assert items[0].name == "0"
    assert read_prompts([file], all_turns=True)[0][0].turns == ("first 0", "second 0")


def test_bad_lines_are_skipped_with_their_number(tmp_path: Path) -> None:
    bad = [
        "not json",
        "[1]",
        "{}",
        {"prompt": ""},
        {"prompt": " \n"},
        {"prompt": 5},
        {"turns": []},
        {"turns": "text"},
        {"turns": [None]},
        {"turns": ["x"], "category": 5},
        '{"prompt": "\\ud800"}',
        "[" * 10000,
        {"prompt": "good"},  # the same as the first line
        json.dumps({"prompt": "x" * MAX_LINE}),
    ]
    file = write(tmp_path / "code.jsonl", {"prompt": "good"}, "", *bad, {"prompt": "last"})
    items, skipped = read_prompts([file])
    assert [item.turns for item in items] == [("good",), ("last",)]
    assert [entry.line for entry in skipped] == list(range(3, 3 + len(bad)))
    assert items[1].line == 3 + len(bad)
    reasons = [entry.reason for entry in skipped]
    assert "not JSON" in reasons[0]
    assert "JSON object" in reasons[1]
    assert "neither" in reasons[2]
    assert "empty" in reasons[3]
    assert "int, not text" in reasons[5]
    assert "surrogate" in reasons[10]
    assert "same prompt" in reasons[12]
    assert "bytes" in reasons[13]
    assert str(skipped[0]).startswith(f"{file}, line 3: ")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "code.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "marked"}\r\n{"prompt": "\xff"}\n\x00\n{"prompt": "no newline"}')
    items, skipped = read_prompts([file])
    assert [item.turns[0] for item in items] == ["marked", "no newline"]
    assert [entry.line for entry in skipped] == [2, 3]


@pytest.mark.parametrize("content", ["", "\n\n \n", "plain text\n", "{}\n"])
def test_a_file_without_a_prompt_is_refused(tmp_path: Path, content: str) -> None:
    good = write(tmp_path / "good.jsonl", {"prompt": "x"})
    file = tmp_path / "empty.jsonl"
    file.write_text(content)
    with pytest.raises(PromptError, match=r"empty\.jsonl has no prompt"):
        read_prompts([good, file])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path, "with\0nul"):
        with pytest.raises(PromptError, match="cannot be read"):
            read_prompts([path])


def test_a_limit_is_by_domain_and_spread(tmp_path: Path) -> None:
    code = write(tmp_path / "code.jsonl", *({"prompt": f"c{n}"} for n in range(10)))
    math = write(tmp_path / "math.jsonl", {"prompt": "m"})
    items, _ = read_prompts([code, math])
    assert [item.turns[0] for item in limited(items, 4)] == ["c0", "c2", "c5", "c7", "m"]
    assert limited(items, None) == items
    assert limited(items, 100) == items
