"""Validation: a run that was itself made by the replay is reproduced; one that was not is said to differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.simulation.scenario import Base, Setting, simulate
from edgespec.bench.simulation.validate import matched, run_costs, validated
from edgespec.bench.specbench.folder import Record, read_run
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from tests.bench.simulation import made
from tests.support.runs import record, write_run

ARMS = ("plain", "static:left@3", "static:right@2", "memspec@3", "edgespec")
OVERHEAD = 0.0005


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return made.base(tmp_path_factory.mktemp("validate") / "traces")


def turns(base: Base, arm: str, slower: float = 1.0) -> list[Record]:
    """What a run would have kept of the replay of one policy."""
    device = replace(base, overhead=OVERHEAD)
    outcome = simulate(device, Setting(arm, order="file"))
    found = []
    for number, (text, of_text) in enumerate(zip(base.corpus.texts, outcome.texts)):
        answer = tuple(base.corpus.answers[text.name])
        gamma = 0 if arm == "plain" else int(arm.split("@")[1]) if arm.startswith("static") else 3
        idle = of_text.share.get("plain", 0)
        drafted = of_text.rounds - idle
        target = idle * base.costs.verify(1) + drafted * base.costs.verify(gamma + 1)
        drafts = gamma * drafted * 0.0004
        stats: dict[str, Any] = {
            "rounds": of_text.rounds,
            "target_seconds": target,
            "draft_seconds": drafts,
            "catch_up_seconds": of_text.seconds - target - drafts - OVERHEAD * of_text.rounds,
            "draft_share": dict(of_text.share),
            "gamma_histogram": {"0": idle, str(gamma or 1): drafted},
        }
        found.append(
            record(
                number + 1, prompt_tokens=text.prompt_length, token_ids=answer, decode_tokens=len(answer) - 1,
                decode_s=of_text.seconds * slower, domain=text.domain, stats=stats,
            )
        )  # fmt: skip
    return found


def run_folder(base: Base, path: Path, **slower: float) -> Path:
    records = {arm: turns(base, arm, slower.get(arm.split(":")[0].split("@")[0], 1.0)) for arm in ARMS}
    return write_run(path, records, settings={"resident": 2})


def test_costs_are_found_again(base: Base, tmp_path: Path) -> None:
    found = matched(base.corpus, read_run(run_folder(base, tmp_path / "run")))
    assert [text.name for text in found.texts] == [text.name for text in base.corpus.texts]
    costs, overhead = run_costs(found, base.corpus, base.costs)
    assert costs.verify(1) == pytest.approx(0.010)
    assert costs.verify(4) == pytest.approx(0.0115, rel=0.02)
    assert costs.draft("left") == pytest.approx(0.0004, rel=0.05)
    assert overhead == pytest.approx(OVERHEAD, rel=0.2)


def test_a_run_of_the_replay_is_reproduced_and_a_slower_one_is_not(base: Base, tmp_path: Path) -> None:
    found = validated(base, read_run(run_folder(base, tmp_path / "run")))
    assert [row["arm"] for row in found["rows"]] == list(ARMS[1:])
    assert found["agree"] == 4, [(row["arm"], row["error"]) for row in found["rows"]]
    assert max(abs(row["error"]) for row in found["rows"]) < 0.05
    slower = validated(base, read_run(run_folder(base, tmp_path / "slow", edgespec=1.2)))
    errors = {row["arm"]: row["error"] for row in slower["rows"]}
    assert errors["edgespec"] > 0.1
    assert abs(errors["memspec@3"]) < 0.05
    assert slower["agree"] == 3


def test_only_turns_that_were_recorded_are_compared(base: Base, tmp_path: Path) -> None:
    records = {arm: turns(base, arm) for arm in ("plain", "static:left@3")}
    first = records["plain"][0]
    records["plain"][0] = replace(first, token_ids=(*first.token_ids[:-1], 9999))  # another text
    records["static:left@3"][1] = replace(records["static:left@3"][1], error="it fell over")
    found = matched(base.corpus, read_run(write_run(tmp_path / "run", records)))
    assert [text.name for text in found.texts] == [text.name for text in base.corpus.texts[2:]]


def test_runs_that_say_nothing_are_refused(base: Base, tmp_path: Path) -> None:
    other = {"plain": [replace(turn, prompt_tokens=999) for turn in turns(base, "plain")]}
    with pytest.raises(ConfigError, match="bench record"):
        validated(base, read_run(write_run(tmp_path / "other", other)))
    with pytest.raises(ConfigError, match="static"):
        validated(base, read_run(write_run(tmp_path / "plain", {"plain": turns(base, "plain")})))


def test_costs_of_drafts_without_a_static_arm_are_guessed_from_the_others(base: Base, tmp_path: Path) -> None:
    records = {arm: turns(base, arm) for arm in ("plain", "static:left@3")}
    found = matched(base.corpus, read_run(write_run(tmp_path / "run", records)))
    costs, _ = run_costs(found, base.corpus, CostTable({1: 1.0}))
    assert costs.draft("right") == pytest.approx(costs.draft("left"))
