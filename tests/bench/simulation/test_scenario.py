"""Settings and sweeps: what each of them changes, and that processes change nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgespec.bench.simulation.scenario import (
    Base,
    Setting,
    adjusted,
    baseline,
    costs_from,
    row_of,
    simulate,
    spec,
    trace_costs,
)
from edgespec.bench.simulation.sweep import run_all, sweep
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from predictor.replay import TextTrace
from tests.bench.simulation import made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return made.base(tmp_path_factory.mktemp("simulation") / "traces")


def ignore(_: int) -> None:
    pass


def test_costs_come_from_the_traces(base: Base) -> None:
    costs = trace_costs(base.corpus)
    assert (costs.verify(3), costs.draft("left"), costs.load("right")) == (0.011, 0.0004, 0.02)
    with pytest.raises(ConfigError, match="--device-profile"):
        trace_costs(replace(base.corpus, costs={}))


def test_a_setting_changes_the_costs_it_names(base: Base) -> None:
    def costs(**changes: float) -> CostTable:
        return adjusted(base.costs, Setting(**changes), ["left", "right"], ["words"])  # type: ignore[arg-type]

    assert costs(load_ratio=3.0).load("left") == pytest.approx(0.03)
    assert costs(draft_cost=0.1).draft("left") == pytest.approx(0.001)
    assert costs(draft_cost=0.1).draft("words") == costs().draft("ngram") == 1e-5
    flat, steep = costs(steepness=0.0), costs(steepness=2.0)
    assert (flat.verify(1), flat.verify(4)) == pytest.approx((0.010, 0.010))
    assert (steep.verify(1), steep.verify(4)) == pytest.approx((0.010, 0.013))


def test_a_table_filed_by_architecture_serves_all_drafts() -> None:
    stored = CostTable({1: 0.01}, {"head-9": 0.002, "ngram": 1e-5}, loads={"head-9": 0.5}, catch_up={"head-9": 1e-4})
    table = costs_from(json.dumps(stored.to_json()), ["left", "right"])
    assert (table.draft("left"), table.load("right"), table.catch_up("left", 10)) == pytest.approx((0.002, 0.5, 1e-3))
    own = CostTable({1: 0.01}, {"left": 0.003})
    assert costs_from(json.dumps(own.to_json()), ["left"]).draft("left") == 0.003


def test_the_interval_reaches_every_policy(base: Base) -> None:
    assert spec(Setting("memspec@3", interval=8)) == "memspec@3,n=8"
    assert spec(Setting("memspec,n=2", interval=8)) == "memspec,n=2"
    assert spec(Setting("edgespec", interval=8)) == "edgespec"  # has no option: the replay keeps to it
    assert spec(Setting("static:left@3", interval=8)) == "static:left@3"
    asked: list[int] = []

    def ranks(text: TextTrace, position: int, seen: object) -> dict[str, float]:
        asked.append(position)
        return {"left": 0.5, "right": 0.4}

    def points(interval: int) -> int:
        asked.clear()
        ranked = replace(base, corpus=replace(base.corpus, rankings=ranks))  # type: ignore[arg-type]
        simulate(ranked, Setting("edgespec", interval=interval, resident=1))
        return len(asked)

    texts = len(base.corpus.texts)
    assert points(1) > points(4) > points(16) >= 2 * texts  # before the prompt, behind it, and every N rounds


def test_figures_say_what_a_policy_gained(base: Base) -> None:
    plain, ours = simulate(base, Setting()), simulate(base, Setting("static:left@3"))
    found = row_of(Setting("static:left@3"), ours, plain)
    assert found["speedup"] == pytest.approx(plain.seconds / ours.seconds)
    assert found["by_domain"]["left"] > found["by_domain"]["right"]  # its draft is the good one there
    assert found["low"] < found["speedup"] < found["high"]
    assert found["tokens"] == plain.tokens
    json.dumps(found, allow_nan=False)
    assert row_of(Setting(), plain, plain)["speedup"] == 1.0


def test_a_better_policy_is_better_here_too(base: Base) -> None:
    def speed(policy: str) -> float:
        return simulate(base, Setting(policy, resident=1, load_ratio=1.0)).speed

    assert speed("oracle-static") > max(speed("static:left@3"), speed("static:right@3")) > speed("plain")


def test_a_policy_that_cannot_be_made_is_named(base: Base) -> None:
    with pytest.raises(ConfigError, match="did you mean left"):
        simulate(base, Setting("static:lefd@3"))


def test_two_processes_find_what_one_finds(base: Base) -> None:
    settings = [Setting(policy) for policy in ("plain", "edgespec", "memspec@3", "oracle-dynamic", "hedge@3")]
    steps: list[int] = []
    alone, together = run_all(base, settings, steps.append, jobs=1), run_all(base, settings, steps.append, jobs=2)
    assert alone.rows == together.rows
    assert [row["policy"] for row in alone.rows] == [setting.policy for setting in settings]
    assert alone.rounds == together.rounds == sum(row["rounds"] for row in alone.rows[1:])  # plain ones are cheap
    assert set(alone.rates) == {setting.policy for setting in settings[1:]}
    assert min(alone.rates.values()) > 0
    assert sum(steps) == 2 * len(settings)


def test_sweeps_vary_one_thing() -> None:
    start = Setting(resident=1)
    resident = sweep("resident", ["edgespec", "memspec"], start, 3, 40)
    assert [(value, line, s.resident) for value, line, s in resident.settings][:3] == [
        (1, "edgespec", 1), (1, "memspec", 1), (2, "edgespec", 2),
    ]  # fmt: skip
    assert [s.new_tokens for _, _, s in sweep("length", ["plain"], start, 3, 40).settings] == [16, 32, 40]
    assert [s.load_ratio for _, _, s in sweep("load-ratio", ["plain"], start, 3, 40).settings][-1] == 8.0
    assert [s.interval for _, _, s in sweep("interval", ["plain"], start, 3, 40).settings] == [2, 4, 8, 16]
    for _, _, setting in sweep("gamma", [], start, 3, 40).settings:
        assert baseline(setting).steepness == setting.steepness  # plain decoding is plain on that very device
    modes = [(value, s.ranked, s.prefetch) for value, line, s in sweep("prefetch", [], start, 3, 40).settings[:4]]
    assert modes == [
        ("neither", False, False), ("prediction only", True, False), ("prefetching only", False, True),
        ("both", True, True),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="resident"):
        sweep("colour", [], start, 3, 40)


def test_plain_decoding_is_of_the_same_texts(base: Base) -> None:
    short = run_all(base, [Setting("edgespec", new_tokens=10)], ignore, jobs=1).rows[0]
    assert short["tokens"] == 8 * 9
    assert 0.5 < short["speedup"] < 3


@pytest.mark.parametrize("policy", ["static:left@4", "static:ngram@16", "memspec", "edgespec@4", "oracle-dynamic@4"])
def test_longer_blocks_than_were_recorded_are_refused(base: Base, policy: str) -> None:
    with pytest.raises(ConfigError, match=r"4 tokens|16 tokens") as caught:
        simulate(base, Setting(policy))
    assert "at most 3" in str(caught.value)
    simulate(base, Setting("static:left@3"))


def test_a_table_that_does_not_say_whose_step_is_whose_is_refused() -> None:
    def table(**drafts: float) -> str:
        return json.dumps(CostTable({1: 0.01}, drafts).to_json())

    assert costs_from(table(head=0.002, words=1e-5), ["left", "right"], ["words"]).draft("right") == 0.002
    assert costs_from(table(head=0.002, left=0.004), ["left", "right"]).draft("left") == 0.004
    with pytest.raises(ValueError, match="left, right, its head, standalone may be any"):
        costs_from(table(head=0.002, standalone=0.02), ["left", "right"])
    with pytest.raises(ValueError, match="no step of right, nor one"):
        costs_from(table(left=0.002), ["left", "right"])


def test_damaged_costs_of_traces_are_named(base: Base) -> None:
    for damage in ({"verify": {"0": 1}}, {"verify": {"1": "x"}}, {"verify": {"1": 1}, "drafts": [1]}):
        with pytest.raises(ConfigError, match="costs of the traces are damaged"):
            trace_costs(replace(base.corpus, costs={"drafts": {}, **damage}))
