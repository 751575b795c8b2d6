"""Arms side by side: pairs, medians, intervals, and the verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.bench.load import compare, output, tables


def row(arm: str, rate: float, repeat: int, throughput: float | None) -> dict[str, Any]:
    return {"arm": arm, "rate": rate, "repeat": repeat, "figures": {"throughput": throughput}}


def test_ratios_are_of_pairs_so_that_drift_cancels() -> None:
    speeds = {0: 100.0, 1: 50.0, 2: 200.0}  # the machine drifts wildly from repeat to repeat
    rows = [row("none", 1.0, r, v) for r, v in speeds.items()] + [row("us", 1.0, r, 1.2 * v) for r, v in speeds.items()]
    found = compare.ratios(rows, [1.0], ["none", "us"], "none")["arms"]["us"]
    assert found["value"] == pytest.approx(1.2)
    assert (found["low"], found["high"]) == (pytest.approx(1.2), pytest.approx(1.2))


def test_the_mean_over_rates_has_the_same_rates_for_all() -> None:
    rows = [row("none", rate, 0, 100.0) for rate in (1.0, 2.0)]
    rows += [row("us", 1.0, 0, 150.0), row("us", 2.0, 0, 100.0), row("fixed:1", 1.0, 0, 110.0)]
    found = compare.ratios(rows, [1.0, 2.0], ["none", "us", "fixed:1"], "none")
    assert found["rates"] == [1.0]  # fixed:1 has nothing at 2.0
    assert found["arms"]["us"]["value"] == pytest.approx(1.5)
    assert found["arms"]["us"]["by_rate"]["2"]["value"] == pytest.approx(1.0)


def test_an_interval_needs_two_and_holds_the_median() -> None:
    assert compare.median([3.0]) == {"value": 3.0, "low": None, "high": None, "n": 1}
    found = compare.median([1.0, 2.0, None, 9.0])
    assert found == {"value": 2.0, "low": 1.0, "high": 9.0, "n": 3}
    few = compare.median([1.0, 2.0, 3.0, 9.0])
    assert (few["low"], few["high"]) == (1.0, 9.0), "of four values 95% would be a guess"
    five = compare.median([1.0, 2.0, 3.0, 4.0, 9.0])
    assert 1.0 <= five["low"] < five["value"] < five["high"] <= 9.0
    many = compare.median([float(n) for n in range(100)])
    assert 35 < many["low"] < many["value"] < many["high"] < 65


def test_verdicts() -> None:
    speeds = {"none": (100, 100), "fixed:1": (150, 70), "fixed:3": (120, 90), "us": (140, 98)}
    rows = [row(arm, rate, 0, value) for arm, pair in speeds.items() for rate, value in zip((1.0, 2.0), pair)]
    (found,) = compare.verdicts(rows, [1.0, 2.0], list(speeds))
    assert found["best_fixed"] == "fixed:1"  # mean 1.10, fixed:3 has 1.05
    assert found["to_none"]["value"] == pytest.approx((1.4 + 0.98) / 2)
    assert found["to_fixed"]["value"] == pytest.approx((140 / 150 + 98 / 70) / 2)
    assert found["worst"] == {"rate": 1.0, "value": pytest.approx(140 / 150)}  # at 2.0 none is better, 0.98
    assert found["fixed"] == ["fixed:1", "fixed:3"]
    assert found["worst_by_rate"] == found["worst"]


def test_the_best_fixed_gamma_may_be_another_one_at_each_rate() -> None:
    speeds = {"none": (100, 100), "fixed:1": (150, 110), "fixed:3": (100, 140), "us": (149, 112)}
    rows = [row(arm, rate, 0, value) for arm, pair in speeds.items() for rate, value in zip((1.0, 2.0), pair)]
    (found,) = compare.verdicts(rows, [1.0, 2.0], list(speeds))
    assert found["best_fixed"] == "fixed:1"
    assert found["worst"] == {"rate": 1.0, "value": pytest.approx(149 / 150)}
    assert found["worst_by_rate"] == {"rate": 2.0, "value": pytest.approx(112 / 140)}
    (line,) = tables.verdicts([found]).rows
    assert line[-2:] == ["0.993 at 1/s", "0.800 at 2/s"]
    text = output.headline({"verdicts": [found], "simulated": False})
    assert "times that of fixed:1, the best of fixed:1, fixed:3." in text


def test_no_verdict_without_a_reference() -> None:
    assert compare.verdicts([row("us", 1.0, 0, 1.0)], [1.0], ["us"]) == []


def test_a_handful_of_requests_makes_no_headline() -> None:
    speeds = {"none": 100, "us": 140}
    rows = [row(arm, 1.0, 0, value) for arm, value in speeds.items()]
    (found,) = compare.verdicts(rows, [1.0], list(speeds))
    for asked, told in ((4, ""), (5, "us: 1.40 times the throughput of no speculation, mean over 1 rate.")):
        places = [{"requests": {"asked": count}} for count in (9, asked)]
        assert output.headline({"verdicts": [found], "simulated": False, "table": places}) == told


def test_the_interval_of_a_mean_over_rates_holds_the_least_and_the_most_of_few_repeats() -> None:
    rates = [1.0, 2.0, 3.0, 4.0]
    rows = [row("none", rate, repeat, 100.0) for rate in rates for repeat in range(3)]
    rows += [row("us", rate, repeat, 100.0 + 20 * repeat) for rate in rates for repeat in range(3)]
    found = compare.ratios(rows, rates, ["none", "us"], "none")["arms"]["us"]
    assert [found[key] for key in ("value", "low", "high")] == pytest.approx([1.2, 1.0, 1.4]), "resamples are narrower"
