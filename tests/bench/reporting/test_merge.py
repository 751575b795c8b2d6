"""Folders that belong together, and those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.reporting import tables
from edgespec.bench.reporting.document import build
from edgespec.bench.specbench.folder import ArmInfo, RunFolder, read_run
from edgespec.errors import ConfigError
from tests.support.runs import record, write_run


def shard(path: Path, name: str, questions: tuple[int, ...], *, step: float = 0.005, **changes: Any) -> RunFolder:
    """A run of plain (10 ms a step) and an arm."""
    records = {"plain": [record(q) for q in questions], "arm": [record(q, step=step) for q in questions]}
    return read_run(write_run(path / name, records, **changes))


def test_shards_are_one_run(tmp_path: Path) -> None:
    one = shard(tmp_path, "a", (1, 3), settings={"shard": "1/2"})
    two = shard(tmp_path, "b", (2, 4), step=0.01, settings={"shard": "2/2"})
    document = build([two, one])
    (part,) = document["parts"]
    assert part["questions"] == 4
    assert part["arms"]["arm"]["speedup"]["value"] == pytest.approx(0.4 / 0.3)
    assert [q["question"] for q in part["by_question"]] == ["1", "2", "3", "4"]
    assert part["runs"] == [0, 1]
    assert [run["shard"] for run in document["runs"]] == ["2/2", "1/2"]
    assert "shard" not in document["settings"]
    assert part["warnings"] == []
    (alone,) = build([one])["parts"]
    assert alone["warnings"] == ["only 1 of 2 shards of the run is here: 1/2"]


def test_shards_of_other_counts_are_the_whole_run_or_they_are_not(tmp_path: Path) -> None:
    names = ("1/2", "2/4", "4/4")
    runs = [shard(tmp_path, str(q), (q,), settings={"shard": name}) for q, name in enumerate(names, start=1)]
    assert build(runs)["parts"][0]["warnings"] == []
    text = "the shards that are here (1/2, 2/4) are not the whole run"
    assert build(runs[:2])["parts"][0]["warnings"] == [text]


def test_shards_of_several_machines_pair_within_each(tmp_path: Path) -> None:
    fast = {"plain": [record(1, step=0.001)], "arm": [record(1, step=0.0005)]}
    one = read_run(write_run(tmp_path / "a", fast, machine={"cpu": "fast"}))
    two = shard(tmp_path, "b", (2,), machine={"cpu": "slow", "threads": 4}, settings={"threads": 4})
    (part,) = build([one, two])["parts"]
    assert part["arms"]["arm"]["speedup"]["value"] == pytest.approx(2)
    assert any("different machines" in warning for warning in part["warnings"])


def test_the_same_questions_on_two_machines_stand_beside_each_other(tmp_path: Path) -> None:
    one = shard(tmp_path, "a", (1, 2), machine={"cpu": "left"})
    two = shard(tmp_path, "b", (1, 2), step=0.01, machine={"cpu": "right"})
    parts = build([one, two])["parts"]
    assert [part["machine"]["cpu"] for part in parts] == ["left", "right"]
    assert [part["arms"]["arm"]["speedup"]["value"] for part in parts] == [pytest.approx(2), pytest.approx(1)]
    assert [part["runs"] for part in parts] == [[0], [1]]


def test_a_question_twice_on_one_machine_is_refused(tmp_path: Path) -> None:
    one, two = shard(tmp_path, "a", (1, 2, 3)), shard(tmp_path, "b", (2, 3, 4))
    with pytest.raises(ConfigError, match=r"Question 2 \(and 1 more\) is in .*a and in .*b"):
        build([one, two])


def test_an_arm_of_one_shard_alone_is_compared_there(tmp_path: Path) -> None:
    """The second shard is measured on a machine that is twice as fast by then, and without the arm `more`."""
    first = {"plain": [record(q) for q in (1, 3)], "arm": [record(1, step=0.005), record(3, step=0.005)]}
    one = read_run(write_run(tmp_path / "a", {**first, "more": [record(q, step=0.004) for q in (1, 3)]}))
    two = shard(tmp_path, "b", (2, 4), step=0.01)
    document = build([one, two])
    (part,) = document["parts"]
    arms = part["arms"]
    assert document["settings"]["policies"] == ["plain", "arm", "more"]
    assert arms["more"]["speedup"]["value"] == pytest.approx(2.5)
    assert arms["arm"]["speedup"]["value"] == pytest.approx(0.4 / 0.3)
    assert part["common"] == 2
    same = {name: arms[name]["same_questions"]["value"] for name in ("arm", "more")}
    assert same == pytest.approx({"arm": 2, "more": 2.5})
    assert [arms[name]["questions"]["missing"] for name in ("arm", "more")] == [0, 0], "not asked the others"
    assert not [text for arm in arms.values() for text in arm["warnings"]]
    table = tables.summary(part)
    assert table.columns[3:5] == ["n", "same 2"]
    assert {row[0]: row[1:2] + row[3:5] for row in table.rows}["more"] == ["2.50", "2", "2.50"]
    assert {row[0]: row[1:2] + row[3:5] for row in table.rows}["arm"] == ["1.33", "4", "2.00"]
    assert any("not every arm has the same questions" in text for text in part["warnings"])
    assert build([two])["parts"][0]["common"] is None


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("sha256", "1" * 64), ("seed", 3)])
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    one, two = shard(tmp_path, "a", (1,)), shard(tmp_path, "b", (2,), settings={name: value})
    with pytest.raises(ConfigError, match=f"do not belong together: {name} is"):
        build([one, two])


def test_of_a_table_what_differs_is_named(tmp_path: Path) -> None:
    tables = [{"draft_fingerprints": {"code": "a" * 64, "math": digit * 64}, "fingerprint": "f"} for digit in "12"]
    one, two = (shard(tmp_path, str(q), (q,), settings=each) for q, each in enumerate(tables, start=1))
    with pytest.raises(ConfigError) as caught:
        build([one, two])
    assert "draft_fingerprints is {'math': '111" in str(caught.value)
    assert "aaaa" not in str(caught.value)
    with pytest.raises(ConfigError, match="model is 'other' in the first"):
        build([shard(tmp_path, "three", (3,), settings={**tables[0], "model": "other"}), two])


def test_other_threads_on_one_machine_are_another_setting(tmp_path: Path) -> None:
    one, two = shard(tmp_path, "a", (1,)), shard(tmp_path, "b", (2,), settings={"threads": 1})
    with pytest.raises(ConfigError, match="threads"):
        build([one, two])


def test_what_auto_came_to_is_compared_too(tmp_path: Path) -> None:
    one, two = (shard(tmp_path, str(q), (q,), machine={"slots": q}) for q in (1, 2))
    with pytest.raises(ConfigError, match="drafts in memory at once is 1 in the first and 2"):
        build([one, two])
    there = shard(tmp_path, "there", (3,), machine={"cpu": "other", "slots": 5})
    (part,) = build([one, there])["parts"]
    assert any("different numbers of drafts in memory: 1, 5" in warning for warning in part["warnings"])


def test_no_folder_at_all() -> None:
    with pytest.raises(ConfigError, match="Give the folder"):
        build([])


def test_an_arm_that_is_absent_in_one_shard_only(tmp_path: Path) -> None:
    gone = {"plain": [record(1)]}
    one = read_run(
        write_run(
            tmp_path / "a", gone, arms={"arm": ArmInfo("policy", "absent", "not here")},
            settings={"policies": ["plain", "arm"]},
        )
    )  # fmt: skip
    two = shard(tmp_path, "b", (2,), arms={"arm": ArmInfo("policy", peak_memory_bytes=7)})
    arm = build([one, two])["parts"][0]["arms"]["arm"]
    assert (arm["status"], arm["message"], arm["peak_memory_bytes"]) == ("ok", "not here", 7)
    assert arm["questions"] == {"counted": 1, "failed": [], "plain_failed": [], "missing": 1}


def test_several_versions_are_told(tmp_path: Path) -> None:
    one, two = shard(tmp_path, "a", (1,)), shard(tmp_path, "b", (2,))
    import dataclasses

    part = build([one, dataclasses.replace(two, version="9")])["parts"][0]
    assert any("several versions of edgespec: 0, 9" in warning for warning in part["warnings"])
    told = ((one, "ab"), (two, "cd"))
    codes = [dataclasses.replace(run, machine={**run.machine, "code": code}) for run, code in told]
    part = build(codes)["parts"][0]
    assert any("several versions of edgespec: 0 (code ab), 0 (code cd)" in warning for warning in part["warnings"])
