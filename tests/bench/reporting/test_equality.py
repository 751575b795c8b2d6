"""Whether texts are plain's, and which differences are near ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.reporting.document import build
from edgespec.bench.reporting.equality import TIES, Difference, differences, read_ties, write_ties
from edgespec.bench.specbench.folder import Record, RunFolder, read_run
from edgespec.errors import ConfigError
from tests.support.runs import failed, record, write_run


def changed(one: Record, at: int, token: int = 999) -> Record:
    ids = list(one.token_ids)
    ids[at] = token
    return Record(**{**{f: getattr(one, f) for f in Record.__slots__}, "token_ids": tuple(ids)})


def run_of(path: Path, records: Mapping[str, Sequence[Record]], **settings: Any) -> RunFolder:
    return read_run(write_run(path / "run", records, settings=settings))


def equality_of(run: RunFolder, arm: str = "arm") -> dict[str, Any]:
    found: dict[str, Any] = build([run])["parts"][0]["arms"][arm]["equality"]
    return found


def test_rates_by_category(tmp_path: Path) -> None:
    plain = [record(i, category="qa" if i > 2 else "writing") for i in (1, 2, 3)]
    found = equality_of(run_of(tmp_path, {"plain": plain, "arm": [plain[0], changed(plain[1], 4), plain[2]]}))
    assert found["by_category"] == {"writing": {"equal": 1, "compared": 2}, "qa": {"equal": 1, "compared": 1}}
    assert (found["equal"], found["compared"], found["share"]) == (2, 3, pytest.approx(2 / 3))
    (difference,) = found["differences"]
    assert (difference["question"], difference["position"], difference["near_tie"]) == ("2", 4, None)
    assert found["not_judged"] == 1
    assert found["promised"]


def test_a_longer_answer_is_another_answer(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"plain": [record(1)], "arm": [record(1, rounds=(1,) * 11)]})
    assert equality_of(run)["differences"][0]["position"] == 11
    (difference,) = differences(run)
    assert (difference.arm_token, difference.plain_token, len(difference.before)) == (16, None, 11)


def test_later_turns_after_a_difference_had_another_prompt(tmp_path: Path) -> None:
    plain = [record(1), record(1, turn=1), record(2), record(2, turn=1)]
    arm = [changed(plain[0], 0), changed(plain[1], 0), plain[2], changed(plain[3], 5)]
    found = equality_of(run_of(tmp_path, {"plain": plain, "arm": arm}))
    assert (found["equal"], found["compared"]) == (1, 3)
    assert [(d["question"], d["turn"]) for d in found["differences"]] == [("1", 0), ("2", 1)]


def test_failed_answers_are_not_compared(tmp_path: Path) -> None:
    found = equality_of(run_of(tmp_path, {"plain": [record(1), failed(2)], "arm": [failed(1), record(2)]}))
    assert (found["equal"], found["compared"], found["share"]) == (0, 0, None)


def test_plain_of_the_same_group_is_the_reference(tmp_path: Path) -> None:
    plain = [record(1), changed(record(1, group=1), 0)]
    found = equality_of(run_of(tmp_path, {"plain": plain, "arm": [changed(record(1, group=1), 0)]}))
    assert (found["equal"], found["compared"]) == (1, 1)


def test_sampling_is_not_checked(tmp_path: Path) -> None:
    found = equality_of(run_of(tmp_path, {"plain": [record(1)], "arm": [changed(record(1), 0)]}, temperature=0.8))
    assert found == {"checked": False, "reason": "not checked (sampling)", "differences": []}


def test_other_engines_promise_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"plain": [record(1)], "peer:x": [changed(record(1), 0)]})
    assert not equality_of(run, "peer:x")["promised"]
    assert differences(run) == []


def test_near_ties_where_gaps_were_measured(tmp_path: Path) -> None:
    plain = [record(i) for i in (1, 2, 3, 4)]
    arm = [changed(plain[0], 3), changed(plain[1], 4), changed(plain[2], 5), record(4, rounds=(1,) * 9)]
    run = run_of(tmp_path, {"plain": plain, "arm": arm}, weight_format="float32")
    gaps = {"1": (0.0004, 0.0005), "2": (0.0004, 2.0)}
    asked = []

    def gap_of(difference: Difference) -> dict[str, float] | None:
        asked.append(difference)
        found = gaps.get(difference.record.question_id)
        return None if found is None else {"margin": found[0], "gap": found[1]}

    write_ties(run, gap_of)
    assert [(d.record.question_id, d.before, d.arm_token, d.plain_token) for d in asked] == [
        ("1", (5, 6, 7), 999, 8),
        ("2", (5, 6, 7, 8), 999, 9),
        ("3", (5, 6, 7, 8, 9), 999, 10),
    ], "the end of an answer has no token to measure"
    found = equality_of(run)
    assert [d["near_tie"] for d in found["differences"]] == [True, False, None, None]
    assert (found["near_ties"], found["faults"], found["not_judged"]) == (1, 1, 2)
    assert found["differences"][0]["gap"] == 0.0005


def test_a_measured_gap_belongs_to_its_place(tmp_path: Path) -> None:
    plain = [record(1)]
    run = run_of(tmp_path, {"plain": plain, "arm": [changed(plain[0], 3)]})
    write_ties(run, lambda difference: {"margin": 0.0, "gap": 0.0})
    run.records["arm"][:] = [changed(plain[0], 2)]  # measured anew since
    assert equality_of(run)["differences"][0]["near_tie"] is None


def test_damaged_gaps_are_named(tmp_path: Path) -> None:
    for gaps in (
        '{"margin": 0}',
        '{"margin": 0, "gap": NaN}',
        "[" * 100_000,
        '{"margin": 0, "gap": ' + "9" * 400 + "}",
    ):
        (tmp_path / TIES).write_text(f'["arm", 0, 0, "1", 0, 3, {gaps}]\n', encoding="utf-8")
        with pytest.raises(ConfigError, match="line 1 is damaged"):
            read_ties(tmp_path)
