"""Folders that belong together, and those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("sha256", "1" * 64), ("policies", ["plain"])])
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    one, two = shard(tmp_path, "a", (1,)), shard(tmp_path, "b", (2,), settings={name: value})
    with pytest.raises(ConfigError, match=f"do not belong together: {name} is"):
        build([one, two])


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
