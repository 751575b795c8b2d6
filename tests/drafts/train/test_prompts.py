"""Prompt files: what is read, what is skipped with its name, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafts.train.errors import TrainingError
from drafts.train.prompts import LEAST_PROMPTS, PromptSet, chosen, load_prompts
from edgespec.errors import PromptError
from tests.drafts.train.support import records, text, write_prompts


def encode(words: str) -> list[int]:
    return list(words.encode())


def read(*files: Path, longest: int = 200, **options) -> PromptSet:
    return load_prompts(files, encode, longest, domain="code", **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "code.jsonl"


def test_prompts_are_read_and_split_the_same_way_every_time(file: Path) -> None:
    write_prompts(file, records(100))
    found = read(file)
    assert len(found.train) == 96
    assert len(found.held_out) == 4
    assert {p.key for p in found.train}.isdisjoint(p.key for p in found.held_out)
    first = found.train[0]
    assert (first.key, first.group, first.source, first.licence) == ("code/p-0000", "code", "owner/repo:p", "MIT")
    assert first.ids == encode(text(0))
    assert found.sources() == {("owner/repo:p", "MIT"): 100}
    write_prompts(file, list(reversed(records(100))))
    assert {p.key for p in read(file).held_out} == {p.key for p in found.held_out}


def test_more_prompts_move_few_of_the_held_out_ones(file: Path) -> None:
    write_prompts(file, records(100))
    before = {p.key for p in read(file).held_out}
    write_prompts(file, records(110))
    assert len(before & {p.key for p in read(file).held_out}) >= 3


def test_id_source_and_licence_are_optional_and_text_is_a_prompt(file: Path) -> None:
    write_prompts(file, [{"text": text(n)} for n in range(20)])
    found = read(file)
    prompts = [*found.train, *found.held_out]
    assert len({p.key for p in prompts}) == 20
    assert {(p.source, p.licence) for p in prompts} == {("code.jsonl", "unknown")}


def test_several_files_are_groups_by_their_names(tmp_path: Path) -> None:
    write_prompts(tmp_path / "code.jsonl", records(20))
    write_prompts(tmp_path / "math.jsonl", [{"id": f"p-{n:04d}", "prompt": text(n + 100)} for n in range(20)])
    found = read(tmp_path / "code.jsonl", tmp_path / "math.jsonl")
    assert found.groups == ["code", "math"]
    assert {p.group for p in found.held_out} == {"code", "math"}
    (tmp_path / "other").mkdir()
    again = write_prompts(tmp_path / "other" / "code.jsonl", records(20))
    with pytest.raises(TrainingError, match="two prompt files are named code"):
        read(tmp_path / "code.jsonl", again)


def test_bad_lines_are_skipped_with_counts_and_names(file: Path) -> None:
    good = records(20)
    bad = [
        "not json",
        "[1, 2]",
        {"id": "x", "question": "?"},
        {"id": "empty", "prompt": "  \n"},
        {"id": "p-0003", "prompt": "another text with a known id"},
        {"id": "copy", "prompt": text(5)},
        {"id": "long", "prompt": "long " * 100},
        '{"prompt": ' + "[" * 5000,
    ]
    write_prompts(file, [*good, *bad])
    found = read(file)
    assert len(found.train) + len(found.held_out) == 20
    lines = "\n".join(found.skipped.lines())
    assert found.skipped.count == 8
    assert "4 lines without a JSON object that has a text" in lines
    assert "code.jsonl:21" in lines
    assert "1 empty prompts: code.jsonl:24 (empty)" in lines
    assert "2 duplicates of earlier prompts or ids: code.jsonl:25 (p-0003), code.jsonl:26 (copy)" in lines
    assert "1 too long for the target (more than 200 tokens): code.jsonl:27 (long): 500" in lines


def test_what_the_template_refuses_is_skipped(file: Path) -> None:
    def refusing(words: str) -> list[int]:
        if words.endswith(" 3"):
            raise PromptError("too much")
        return encode(words)

    write_prompts(file, records(20))
    found = load_prompts([file], refusing, 200, domain="code")
    assert found.skipped.count == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no prompt is usable; a draft needs at least 8"),
        (b"\n\n \n", "no prompt is usable"),
        (b'{"prompt": "one line"}\n', "one prompt is usable; a draft needs at least 8"),
        (b"plain text\nof a book\n", "no prompt is usable.*2 lines without a JSON object"),
        (b"GGUF\x03\x00\x00\x00", "is a binary file"),
        (b'{"prompt": "caf\xe9"}\n', "line 1 is not UTF-8"),
    ],
)
def test_useless_files_are_refused(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(TrainingError, match=message) as caught:
        read(file)
    assert "code.jsonl" in str(caught.value)


def test_missing_files_and_folders_are_refused(file: Path) -> None:
    with pytest.raises(TrainingError, match="cannot be read"):
        read(file)
    with pytest.raises(TrainingError, match="cannot be read"):
        read(file.parent)


def test_a_byte_order_mark_and_surrogates_are_no_harm(file: Path) -> None:
    lines = [json.dumps(r) for r in records(20)] + ['{"id": "odd", "prompt": "half a \\ud83d pair"}']
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    found = load_prompts([file], lambda words: [1, 2, 3], 200, domain="code")
    assert len(found.train) + len(found.held_out) == 21


def test_limit_takes_a_part_that_does_not_depend_on_the_order(file: Path) -> None:
    write_prompts(file, records(60))
    keys = {p.key for p in read(file, limit=20).train}
    write_prompts(file, list(reversed(records(60))))
    assert {p.key for p in read(file, limit=20).train} == keys
    assert len(keys) == 17


QUESTION = "Write one function that takes a list of numbers and returns the median of all of them quickly"


def test_prompts_that_share_thirteen_words_with_excluded_questions_are_dropped(file: Path, tmp_path: Path) -> None:
    turns = [{"question_id": 1, "category": "coding", "turns": [QUESTION, "Now do it faster!"]}]
    exclude = write_prompts(tmp_path / "bench.jsonl", turns)
    shared = "Please: " + QUESTION.upper().replace(" ", ", ", 3) + " and then sort it."
    short = " ".join(QUESTION.split()[:12])
    more = [
        {"id": "shared", "prompt": shared},
        {"id": "short", "prompt": short},
        {"id": "whole", "prompt": "now do it FASTER"},
        {"id": "category", "prompt": "coding"},
    ]
    write_prompts(file, [*records(20), *more])
    found = read(file, exclude=exclude)
    names = "\n".join(found.skipped.lines())
    assert found.skipped.count == 2
    assert "(shared)" in names
    assert "(whole)" in names
    assert "bench.jsonl" in names


def test_all_prompts_excluded_is_refused(file: Path) -> None:
    write_prompts(file, records(20))
    with pytest.raises(TrainingError, match="give other prompts"):
        read(file, exclude=file)


@pytest.mark.parametrize(("content", "message"), [("", "holds no text"), ("words", "line 1 is not JSON")])
def test_a_useless_exclude_file_is_refused(file: Path, tmp_path: Path, content: str, message: str) -> None:
    write_prompts(file, records(20))
    exclude = tmp_path / "bench.jsonl"
    exclude.write_text(content)
    with pytest.raises(TrainingError, match=message):
        read(file, exclude=exclude)


def test_the_least_number_is_enough(file: Path) -> None:
    write_prompts(file, records(LEAST_PROMPTS))
    found = read(file)
    assert (len(found.train), len(found.held_out)) == (LEAST_PROMPTS - 3, 3)


def test_the_share_picked_by_hash() -> None:
    picked = [key for key in map(str, range(2000)) if chosen(key, 0.3)]
    assert 500 < len(picked) < 700
    assert set(picked) <= {key for key in map(str, range(2000)) if chosen(key, 0.5)}
    assert not any(chosen(key, 0.0) for key in picked)
