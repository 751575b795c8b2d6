"""Regret, memory along the run, and what is left out of a report, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.bench.reporting.document import build
from edgespec.bench.reporting.series import left_out
from edgespec.bench.specbench.folder import ArmInfo, Record, read_run
from tests.bench.reporting.samples import part_of
from tests.support.runs import failed, record, write_run


def test_regret_by_hand(tmp_path: Path) -> None:
    def steps(*seconds: float) -> list[Record]:
        return [record(number + 1, step=step) for number, step in enumerate(seconds)]

    records = {
        "plain": steps(0.01, 0.01, 0.01),
        "static:a@3": steps(0.002, 0.01, 0.005),  # ahead at first
        "static:b@3": steps(0.004, 0.005, 0.005),  # the fewest in all
        "memspec": steps(0.002, 0.005, 0.005),  # fewer still, and not fixed
        "edgespec": steps(0.002, 0.01, 0.002),
    }
    found = part_of(tmp_path, records)["regret"]
    assert (found["questions"], found["tokens"]) == (["1", "2", "3"], [10, 20, 30])
    assert found["best_fixed"] == "static:b@3"
    assert found["arms"]["static:b@3"] == [0.0, 0.0, 0.0]
    assert found["arms"]["static:a@3"] == pytest.approx([-0.02, 0.03, 0.03])
    assert found["arms"]["edgespec"] == pytest.approx([-0.02, 0.03, 0.0])
    assert found["arms"]["plain"] == pytest.approx([0.06, 0.11, 0.16])
    assert found["plain_seconds"] == pytest.approx(0.3)


def test_regret_is_charged_for_plains_tokens_and_over_common_questions(tmp_path: Path) -> None:
    # The arm wrote half as much at twice the speed: of plain's ten tokens it is charged for all.
    records = {
        "plain": [record(1), record(2), record(3)],
        "ngram": [record(1, rounds=(1,) * 5, step=0.005), failed(2), record(3)],
    }
    found = part_of(tmp_path, records)["regret"]
    assert (found["questions"], found["tokens"], found["best_fixed"]) == (["1", "3"], [10, 20], "ngram")
    assert found["arms"]["plain"] == pytest.approx([0.05, 0.05])


def test_memory(tmp_path: Path) -> None:
    records = {
        "plain": [  # each takes 0.2 s; before the last lies a --resume
            record(1, rss_bytes=100, at=1000.2), record(2, rss_bytes=300, at=1010.0),
            record(3, rss_bytes=250, at=5000.2, session=1),
        ],
        "arm": [record(1, rss_bytes=200, at=1005.0), failed(2)],
    }  # fmt: skip
    part = part_of(tmp_path, records, arms={"plain": ArmInfo("policy", peak_memory_bytes=900)})
    assert part["memory"] == {
        "arms": {"plain": [(0.2, 100), (10.0, 300), (10.2, 250)], "arm": [(5.0, 200)]},
        "begins": [0.0, 10.0],
        "left_out": None,
    }
    assert part["arms"]["plain"]["peak_memory_bytes"] == 900
    assert part["arms"]["arm"]["peak_memory_bytes"] == 200


def test_shards_come_one_after_the_other(tmp_path: Path) -> None:
    shards = [
        read_run(write_run(tmp_path / name, {"plain": [record(name, rss_bytes=size, at=at)]}))
        for name, size, at in (("1", 100, 1000.0), ("2", 200, 900.0))
    ]
    (part,) = build(shards)["parts"]
    assert part["memory"]["arms"]["plain"] == [(0.2, 100), (0.4, 200)]
    assert part["memory"]["begins"] == [0.0, 0.2]


def test_what_earlier_versions_did_not_write_is_left_out_and_said(tmp_path: Path) -> None:
    old = [record(1, stats={"proposed_tokens": 4, "accepted_tokens": 2}), record(2, at=1000.0)]
    plain = [record(1, at=1000.0), record(2, at=1001.0)]
    for one in (*old, *plain):
        del one.stats["by_draft"]
    part = part_of(tmp_path, {"plain": plain, "edgespec": old})
    assert (part["draft_map"]["drafts"], part["memory"]["arms"]) == ({}, {})
    assert left_out(part) == [
        "Acceptance by draft and domain is left out: 1 answer, of an earlier version, does not say what came of each "
        "draft's blocks.",
        "Memory over time is left out: 1 turn of run, of an earlier version, does not say when it was measured.",
    ]
    assert left_out(part_of(tmp_path / "2", {"plain": [record(1, at=1000.0)]})) == []
