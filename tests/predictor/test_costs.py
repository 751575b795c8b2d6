"""CostTable: interpolation, samples, saving."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest

import predictor.costs as costs_module
from predictor import CostTable

MEASURED = {1: 9.0e-3, 2: 12.0e-3, 4: 17.2e-3, 8: 28.4e-3}


def test_measured_widths_come_back_and_others_lie_between() -> None:
    table = CostTable(MEASURED)
    assert [table.verify(w) for w in MEASURED] == pytest.approx(list(MEASURED.values()))
    assert table.verify(3) == pytest.approx((12.0e-3 + 17.2e-3) / 2)
    assert table.verify(10) == pytest.approx(28.4e-3 + 2 * (28.4e-3 - 17.2e-3) / 4)


def test_never_falls_with_the_width() -> None:
    table = CostTable({1: 2.0, 2: 5.0, 3: 1.0, 6: 4.0})
    curve = [table.verify(w) for w in range(1, 20)]
    assert curve == sorted(curve)
    assert min(curve) > 0


def test_asking_in_any_order_gives_the_same_curve() -> None:
    forwards, backwards = CostTable(MEASURED), CostTable(MEASURED)
    assert [forwards.verify(w) for w in range(1, 17)] == [backwards.verify(w) for w in range(16, 0, -1)][::-1]


def test_one_measured_width_scales_the_guess_and_an_unknown_draft_costs_a_part_of_a_step() -> None:
    guess, table = CostTable(), CostTable({2: 0.5})
    assert table.verify(2) == 0.5
    assert table.verify(5) / table.verify(1) == pytest.approx(guess.verify(5) / guess.verify(1))
    assert 0 < table.draft("unknown") < table.verify(1)
    assert CostTable({1: 1.0}, {"ngram": 0.0}).draft("ngram") == 0.0


def test_samples_move_their_width_towards_the_truth_and_the_others_along() -> None:
    table = CostTable({1: 1.0, 4: 2.0})
    for _ in range(200):
        table.observe_verify(1, 2.0)
    assert table.verify(1) == pytest.approx(2.0, rel=0.01)
    assert 2.0 < table.verify(4) < 4.0
    for _ in range(100):
        table.observe_draft("a", 0.1)
    assert table.draft("a") == pytest.approx(0.1)


def test_one_outlier_hardly_moves_anything_and_what_is_no_time_nothing() -> None:
    table = CostTable({1: 1.0}, {"a": 0.1})
    table.observe_verify(1, 1000.0)
    table.observe_draft("a", 1000.0)
    assert table.verify(1) < 1.2
    assert table.draft("a") < 0.13
    before = table.to_json()
    for nonsense in (math.nan, math.inf, -1.0, 0.0):
        table.observe_verify(1, nonsense)
    for nonsense in (math.nan, math.inf, -1.0):
        table.observe_draft("a", nonsense)
    table.observe_verify(0, 1.0)
    assert table.to_json() == before


def test_measure_takes_the_median_and_leaves_the_first_call_out() -> None:
    now, calls = [0.0], []
    seconds = {1: iter([100.0, 1.0, 50.0, 2.0]), 3: iter([100.0, 5.0, 4.0, 6.0])}

    def forward(width: int) -> None:
        calls.append(width)
        now[0] += next(seconds[width])

    table = CostTable({2: 77.0}, {"a": 0.5})
    table.measure(forward, [1, 3], repeats=3, clock=lambda: now[0])
    assert calls == [1] * 4 + [3] * 4
    assert table.to_json() == {"verify": {"1": 2.0, "3": 5.0}, "drafts": {"a": 0.5}}


def test_saved_and_loaded() -> None:
    table = CostTable(MEASURED, {"a": 0.001})
    again = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again.to_json() == table.to_json()
    assert again.verify(3) == table.verify(3)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"verify": [], "drafts": {}},
        {"verify": {"x": 1.0}, "drafts": {}},
        {"verify": {"1": "fast"}, "drafts": {}},
        {"verify": {"0": 1.0}, "drafts": {}},
        {"verify": {"1": -1.0}, "drafts": {}},
        {"verify": {"1": math.nan}, "drafts": {}},
        {"verify": {"1": 1.0}, "drafts": {"a": math.inf}},
        None,
    ],
)
def test_damaged_files_are_refused(data: object) -> None:
    with pytest.raises(ValueError):
        CostTable.from_json(data)  # type: ignore[arg-type]


def test_drafts_that_take_the_same_time_are_timed_together() -> None:
    table = CostTable({1: 1.0}, {"head-32": 0.04})
    assert not table.knows("code")
    for name in ("code", "math"):
        table.file_under(name, "head-32")
        assert table.knows(name)
    for _ in range(50):
        table.observe_draft("code", 0.08)
    assert table.draft("math") == pytest.approx(0.08, rel=0.02)
    assert table.to_json()["drafts"].keys() == {"head-32"}
    assert table.draft("other") == 0.1


def test_one_busy_moment_at_the_start_does_not_last() -> None:
    table = CostTable({1: 1.0})
    table.observe_draft("code", 0.5)
    for _ in range(5):
        table.observe_draft("code", 0.05)
    assert table.draft("code") < 0.2


# Loads, catch-up, switches


def test_loads_are_medians_that_drafts_of_one_architecture_share() -> None:
    table = CostTable({1: 1.0})
    assert table.load("code") == 3.0  # a few plain steps, until one was seen
    table.file_under("code", "head-32")
    for seconds in (0.1, 0.12, 5.0, 0.11, math.nan, -1.0):
        table.observe_load("code", seconds)
    assert table.load("code") == 0.11  # one load that stalled moves nothing
    assert table.load("head-32") == 0.11
    assert table.load("other") == 0.11  # as the slowest known
    for _ in range(9):
        table.observe_load("code", 0.3)
    assert table.load("code") == 0.3


def test_catch_up_is_priced_by_token() -> None:
    table = CostTable({1: 1.0}, {"a": 0.08})
    assert table.catch_up("a", 0) == table.catch_up("a", -3) == 0.0
    assert table.catch_up("a", 10) == pytest.approx(0.2)  # a guess: a quarter of a step
    table.observe_catch_up("a", 100, 0.5)
    table.observe_catch_up("a", 0, 0.5)
    assert table.catch_up("a", 10) == pytest.approx(0.05)


def test_loads_are_saved_and_older_files_read() -> None:
    table = CostTable(MEASURED, {"a": 0.001}, loads={"a": 0.1}, catch_up={"a": 1e-5})
    data = json.loads(json.dumps(table.to_json()))
    again = CostTable.from_json(data)
    assert again.to_json() == data
    assert (again.load("a"), again.catch_up("a", 100)) == (0.1, pytest.approx(1e-3))
    older = CostTable.from_json({"verify": data["verify"], "drafts": data["drafts"]})
    assert older.to_json().keys() == {"verify", "drafts"}


@pytest.mark.parametrize(
    "more",
    [
        {"loads": {"a": -1.0}},
        {"loads": {"a": math.nan}},
        {"loads": {"a": 1e9}},
        {"loads": 3},
        {"catch_up": {"a": "slow"}},
        {"catch_up": {"a": math.inf}},
    ],
)
def test_damaged_loads_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        CostTable.from_json({"verify": {"1": 1.0}, "drafts": {}, **more})


def test_a_sample_as_expected_keeps_the_curve_and_another_does_not() -> None:
    table = CostTable(MEASURED)
    before = list(table.curve(9))
    table.observe_verify(4, MEASURED[4])
    assert list(table.curve(9)) == before
    table.observe_verify(4, 2 * MEASURED[4])
    assert table.curve(9)[3] > before[3]


def test_threads_may_read_a_table_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that comes while the curve is worked out is taken in after it."""
    table = CostTable({1: 1.0, 2: 2.0})
    sampling = threading.Thread(target=table.observe_verify, args=(1, 1.5))
    interpolated = costs_module._interpolated

    def interrupted(*known: Any) -> list[float]:
        if sampling.ident is None:
            sampling.start()
            sampling.join(0.05)
        return interpolated(*known)

    monkeypatch.setattr(costs_module, "_interpolated", interrupted)
    assert table.curve(3)[:3] == [1.0, 2.0, 3.0]
    sampling.join()
    assert table.verify(1) > 1.0


def test_a_width_that_is_new_bends_a_curve_that_was_asked_for() -> None:
    table = CostTable({1: 1.0, 5: 5.0})
    assert table.curve(9)[:5] == [1.0, 2.0, 3.0, 4.0, 5.0]
    table.observe_verify(3, 4.0)
    assert table.curve(9)[:5] == [1.0, 2.5, 4.0, 4.5, 5.0]
    ticks = iter([0.0, 2.0, 2.0, 6.0])
    table = CostTable({1: 1.0, 5: 5.0})
    assert table.verify(3) == 3.0
    table.measure(lambda width: None, (2, 4), repeats=1, clock=lambda: next(ticks))
    assert table.verify(3) == 3.0
    assert table.verify(2) == 2.0
