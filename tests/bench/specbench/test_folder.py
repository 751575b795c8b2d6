"""The run's folder: what is written is what is read, and what is damaged is named."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from edgespec.bench.specbench.folder import (
    ArmInfo,
    RunFolder,
    RunWriter,
    file_name,
    has_run,
    locked,
    read_run,
    records_file,
    unique_files,
)
from edgespec.errors import ConfigError
from tests.support.runs import MACHINE, SETTINGS, failed, record, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = {"plain": [record(1), record(2)], "static:code@4": [record(1, rounds=[3, 2, 5]), failed(2)]}
    skipped = [{"file": "q.jsonl", "line": 3, "reason": "it is not JSON"}]
    arms = {"peer:x": ArmInfo("peer", "absent", "not installed")}
    return write_run(tmp_path / "run", records, arms=arms, skipped=skipped)


def test_what_is_written_is_what_is_read(folder: Path) -> None:
    run = read_run(folder)
    assert run.records["plain"] == [record(1), record(2)]
    assert run.records["static:code@4"] == [record(1, rounds=[3, 2, 5]), failed(2)]
    assert run.records["peer:x"] == []
    assert (run.settings, run.machine) == ({**SETTINGS, "policies": ["plain", "static:code@4"]}, MACHINE)
    assert run.arms["peer:x"] == ArmInfo("peer", "absent", "not installed")
    assert (run.questions, run.finished, run.skipped[0]["line"]) == (2, True, 3)


def test_half_a_last_line_is_ignored_and_cut_off_when_the_run_goes_on(folder: Path) -> None:
    file = records_file(folder, "plain")
    whole = file.read_bytes()
    for cut in (1, 40, len(whole) // 2 - 1):
        file.write_bytes(whole[:-cut])
        assert [r.question_id for r in read_run(folder).records["plain"]] == ["1"]
    writer = RunWriter(read_run(folder))
    writer.append("plain", record(2))
    writer.close()
    assert file.read_bytes() == whole


def with_text(name: str, text: str) -> str:
    """A record in which the text of one value is another."""
    return json.dumps({**record(1).to_json(), name: "HERE"}).replace('"HERE"', text)


def damaged(file: Path, line: int, text: str) -> None:
    lines = file.read_text().splitlines()
    lines[line - 1] = text
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1 is damaged"),
        ("[]", "not a JSON object"),
        (json.dumps({"question_id": "1"}), "it has no 'category'"),
        (json.dumps({**record(1).to_json(), "decode_s": "fast"}), "'decode_s' is \"fast\""),
        (json.dumps({**record(1).to_json(), "token_ids": [1.5]}), "'token_ids'"),
        (json.dumps({**record(1).to_json(), "seconds": float("nan")}), "NaN is no number"),
        (with_text("seconds", "1e999"), "1e999 is no number"),
        (with_text("seconds", "9" * 400), "9999 is no number"),
        (with_text("prompt_tokens", "-5"), "'prompt_tokens' is -5"),
        (with_text("disturbance", "-0.5"), "'disturbance' is -0.5"),
        (with_text("category", '"\\ud800"'), "half a character"),
        (with_text("stats", "[" * 100_000), "nested too deeply"),
        (json.dumps(record(2).to_json()), "line 2 is damaged: the same turn as in line 1"),
    ],
)
def test_a_damaged_line_is_named(folder: Path, text: str, words: str) -> None:
    damaged(records_file(folder, "plain"), 1, text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_run(folder)
    assert "plain.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"arms": {"plain": {"kind": "tea"}}}, "arm 'plain'"),
        ({"questions": "many"}, "'questions'"),
        ({"settings": {"repeats": "3"}}, "'repeats' is"),
        ({"settings": {"temperature": "0"}}, "'temperature' is"),
        ({"settings": {"policies": "plain"}}, "'policies' is"),
        ({"machine": {"memory_bytes": "much"}}, "'memory_bytes' is"),
        ({"machine": {"cpu": ["a", "b"]}}, "'cpu' is"),
        ({"machine": {"groups": ["plain"]}}, "'groups' is"),
        ({"arms": {"a:b": {}, "a@b": {}}}, "arm 'a:b'"),
    ],
)
def test_a_damaged_description_is_named(folder: Path, change: dict[str, object], words: str) -> None:
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(ConfigError, match=words) as caught:
        read_run(folder)
    assert "run.json" in str(caught.value)


def test_any_whole_character_is_read_however_it_is_written(folder: Path) -> None:
    damaged(records_file(folder, "plain"), 1, with_text("category", '"\\ud83d\\ude00 \\\\ud800"'))
    assert read_run(folder).records["plain"][0].category == "\N{GRINNING FACE} \\ud800"
    file = records_file(folder, "plain")
    file.write_bytes(file.read_bytes().replace(b"writing", b"\xff"))
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        read_run(folder)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no run in"):
        read_run(tmp_path)
    assert not has_run(tmp_path)
    (tmp_path / "run.json").write_text("{half")
    with pytest.raises(ConfigError, match="not JSON"):
        read_run(tmp_path)
    assert has_run(tmp_path)


def test_records_without_what_tells_what_they_are_of(folder: Path) -> None:
    (folder / "run.json").unlink()
    assert has_run(folder)
    with pytest.raises(ConfigError, match=r"has records, but no run\.json"):
        read_run(folder)


def test_records_of_the_first_runs_are_read(folder: Path) -> None:
    new = {"session", "at"}
    lines = [json.dumps({k: v for k, v in r.to_json().items() if k not in new}) for r in (record(1), record(2))]
    records_file(folder, "plain").write_text("\n".join(lines) + "\n")
    assert read_run(folder).records["plain"] == [record(1), record(2)]


def test_an_answer_after_an_error_counts_instead_of_it(folder: Path) -> None:
    writer = RunWriter(read_run(folder))
    writer.append("static:code@4", record(2))
    writer.close()
    assert writer.run.records["static:code@4"] == [record(1, rounds=[3, 2, 5]), record(2)]
    assert read_run(folder).records["static:code@4"] == writer.run.records["static:code@4"]
    with records_file(folder, "static:code@4").open("a") as stream:
        stream.write(json.dumps(record(2).to_json()) + "\n")
    with pytest.raises(ConfigError, match="line 4 is damaged: the same turn as in line 3"):
        read_run(folder)


def test_two_runs_into_one_folder_are_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="Another run writes into"):
        locked(tmp_path / "run").__enter__()
    with locked(tmp_path / "run"):
        pass


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path / "file" / "run"):
        pass


def test_a_full_disk_loses_nothing_that_was_measured(tmp_path: Path) -> None:
    writer = RunWriter(RunFolder(tmp_path, {}, arms={"plain": ArmInfo("policy")}))
    writer.append("plain", record(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = os.path.getsize(records_file(tmp_path, "plain"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))  # Python ignores SIGXFSZ: the write is cut short
    try:
        with pytest.raises(ConfigError, match="--resume goes on from there"):
            writer.append("plain", record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.append("plain", record(3))
    writer.close()
    assert [r.question_id for r in read_run(tmp_path).records["plain"]] == ["1", "3"]


def test_names_of_files_are_of_one_arm_each() -> None:
    assert file_name("peer:llama.cpp") == "peer_llama.cpp"
    assert file_name("memspec@3,n=8,lookup=off") == "memspec_3_n_8_lookup_off"
    assert file_name("static:a/b") == "static_a_b"
    with pytest.raises(ConfigError, match="one file"):
        unique_files(["static:a@4", "static:a:4"])
