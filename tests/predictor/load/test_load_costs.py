"""A batch's measured seconds: between points, kept current, from run to run, and what is no measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from predictor.costs import CostTable
from predictor.load import BatchCosts
from predictor.load.costs import CONTEXT

POINTS = {(1, 0): 0.02, (1, 3): 0.026, (8, 0): 0.056, (8, 8): 0.076, (8, 24): 0.125}


def test_points_are_met_and_what_lies_between_is_interpolated() -> None:
    costs = BatchCosts(POINTS)
    for (n, further), seconds in POINTS.items():
        assert costs.seconds(n, n + further) == pytest.approx(seconds)
    assert costs.seconds(8, 8 + 16) == pytest.approx((0.076 + 0.125) / 2)
    low, high = costs.seconds(1, 1), costs.seconds(8, 8)
    assert costs.seconds(4, 4) == pytest.approx(low + (high - low) * 3 / 7)
    assert costs.seconds(8, 8 + 40) == pytest.approx(0.125 + 16 * (0.125 - 0.076) / 16)
    assert costs.seconds(16, 16) > costs.seconds(8, 8)


def test_it_never_falls_with_rows_and_curves_agree_with_single_values() -> None:
    costs = BatchCosts({(1, 0): 0.02, (1, 1): 0.018, (1, 3): 0.03})
    curve = costs.curve(1, 0, 200)
    assert curve == sorted(curve)
    assert len(curve) == 201
    assert curve[150] == costs.seconds(1, 151)
    assert costs.curve(1, 5, 2) == curve[5:8]


def test_context_takes_time() -> None:
    costs = BatchCosts(POINTS, per_position=1e-6)
    usual = 8 * CONTEXT
    assert costs.seconds(8, 8, usual) == pytest.approx(costs.seconds(8, 8))
    assert costs.seconds(8, 8, usual + 1000) == pytest.approx(costs.seconds(8, 8) + 0.001)
    assert costs.curve(8, 0, 1, usual + 1000)[1] == costs.seconds(8, 9, usual + 1000)


def test_it_follows_what_really_ran_and_an_outlier_moves_little() -> None:
    costs = BatchCosts(POINTS)
    for _ in range(100):
        costs.observe(8, 16, 8 * CONTEXT, 0.152)
    assert costs.seconds(8, 16) == pytest.approx(0.152, rel=0.05)
    assert costs.seconds(1, 1) > 0.025  # a slower device is slower everywhere
    before = costs.seconds(8, 16)
    costs.observe(8, 16, 8 * CONTEXT, 60.0)
    assert costs.seconds(8, 16) < 1.3 * before


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_time_is_ignored(seconds: float) -> None:
    costs = BatchCosts(POINTS)
    before = costs.to_json()
    costs.observe(8, 16, 100, seconds)
    costs.observe_drafting(0.001, seconds)
    costs.observe_overhead(8, seconds or -1.0)
    assert costs.to_json() == before


def test_what_drafting_takes_too_much_is_forgotten_where_nothing_drafts_and_no_more_than_that() -> None:
    costs = BatchCosts(POINTS, drafting=6.0)
    costs.observe_drafting(0.0, 0.0)
    assert 5.9 < costs.drafting < 6.0
    for _ in range(500):
        costs.observe_drafting(0.0, 0.0)
    assert costs.drafting == pytest.approx(1.0, abs=0.05)
    for _ in range(100):
        costs.observe_drafting(0.004, 0.002)
    assert costs.drafting == pytest.approx(0.5, abs=0.01)
    known = costs.drafting
    costs.observe_drafting(0.0, 0.0)
    assert costs.drafting == known, "side by side stays what it was"


class Device:
    """A clock that forwards move on."""

    def __init__(self, tick: float = 1.0) -> None:
        self.now, self.tick = 0.0, tick
        self.calls: list[tuple[tuple[int, ...], int]] = []

    def run(self, widths: Sequence[int], context: int) -> None:
        self.calls.append((tuple(widths), context))
        self.now += self.tick * (0.02 + 0.004 * (len(widths) - 1) + 0.002 * (sum(widths) - len(widths)))
        self.now += self.tick * 1e-6 * (context - CONTEXT) * len(widths)


def test_measuring_finds_a_devices_seconds_within_two_of_them() -> None:
    device, costs = Device(), BatchCosts.guessed(CostTable())
    costs.measure(device.run, 8, clock=lambda: device.now)
    assert device.now < 2.2
    assert costs.seconds(8, 8) == pytest.approx(0.048)
    assert costs.seconds(5, 15) == pytest.approx(0.02 + 4 * 0.004 + 10 * 0.002, rel=0.01)
    assert costs.seconds(8, 72) == pytest.approx(0.048 + 64 * 0.002)
    assert costs.to_json()["per_position"] == pytest.approx(1e-6, rel=0.01)
    assert max(len(widths) for widths, _ in device.calls) == 8


def test_a_slow_device_is_measured_less_and_a_clock_that_stands_still_changes_nothing() -> None:
    slow, costs = Device(tick=20.0), BatchCosts(POINTS)
    costs.measure(slow.run, 8, clock=lambda: slow.now)
    assert len(slow.calls) <= 6
    assert costs.seconds(1, 1) == pytest.approx(0.4)
    still, kept = Device(), BatchCosts(POINTS)
    kept.measure(still.run, 8, clock=lambda: 0.0)
    assert kept.to_json() == BatchCosts(POINTS).to_json()


def test_from_run_to_run() -> None:
    costs = BatchCosts(POINTS, per_position=1e-7, drafting=0.6, overhead=0.001)
    costs.observe(8, 16, 2000, 0.1)
    again = BatchCosts.from_json(json.loads(json.dumps(costs.to_json())))
    assert again.seconds(8, 16, 4000) == pytest.approx(costs.seconds(8, 16, 4000), rel=0.02)
    assert (again.drafting, again.overhead) == (costs.drafting, costs.overhead)


@pytest.mark.parametrize(
    "data",
    [
        None, [], {}, {"points": []}, {"points": [[1, 0, -1]], "per_position": 0, "drafting": 1, "overhead": 0},
        {"points": [[1, 0, 1.0]], "per_position": "x", "drafting": 1, "overhead": 0},
        {"points": [[1, 0, math.nan]], "per_position": 0, "drafting": 1, "overhead": 0},
        {"points": [[0, 0, 1.0]], "per_position": 0, "drafting": 1, "overhead": 0},
        {"points": [[1, 0]], "per_position": 0, "drafting": 1, "overhead": 0},
    ],
)  # fmt: skip
def test_damaged_files_are_errors(data: object) -> None:
    with pytest.raises(ValueError):
        BatchCosts.from_json(data)
