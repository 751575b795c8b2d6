"""What is run in which order, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.bench.load.arrivals import Arrival
from edgespec.bench.load.schedule import Capacity, Schedule, parse_arms
from edgespec.bench.load.system import Arm
from edgespec.errors import ConfigError

CAPACITY = Capacity(tokens_per_second=100.0, answer_tokens=50.0)


def schedule(**changes: Any) -> Schedule:
    values: dict[str, Any] = {
        "arms": (Arm("none"), Arm("fixed:1"), Arm("us")), "rates": (1.0, 2.0), "repeats": 2, "seconds": 10.0,
        "warm_up": 2.0, "limit_s": 30.0, "most_s": 600.0,
    }  # fmt: skip
    return Schedule(**{**values, **changes})


def test_arms_take_turns_on_the_same_arrivals() -> None:
    made = schedule()
    turns = made.turns()
    assert [turn.order for turn in turns] == list(range(made.stretches)) == list(range(12))
    groups = [turns[i : i + 3] for i in range(0, 12, 3)]
    assert all(len({(t.rate, t.repeat) for t in group}) == 1 for group in groups)
    assert {tuple(t.arm.planner for t in group) for group in groups} > {("none", "fixed:1", "us")}
    assert len({group[0].arm for group in groups}) == 3  # each is the first one somewhere
    assert made.arrivals(1.0, 0) == made.arrivals(1.0, 0)
    assert made.arrivals(1.0, 0) != made.arrivals(1.0, 1)


def test_rates_of_the_machine() -> None:
    assert schedule(rates=()).settled(CAPACITY).rates == (0.2, 0.8, 1.4, 2.0, 2.6)


def test_a_rate_that_never_ends_is_refused_with_one_that_does() -> None:
    assert schedule(rates=(6.0,)).settled(CAPACITY).rates == (6.0,)  # 60 requests at 2 a second: 30 s
    with pytest.raises(ConfigError, match=r"At 7 requests a second .* about 35 s .* Give a rate below 6"):
        schedule(rates=(7.0,)).settled(CAPACITY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warm_up": 10.0}, "--warm-up 10 leaves nothing"),
        ({"limit_s": 9.0}, "--limit 9 is less than the 10 s"),
        ({"rates": (1e4,)}, "100,000 requests in 10 s"),
        ({"most_s": 100.0}, r"12 stretches .* 2.0 minutes; --most-minutes allows 1.66667"),
        ({"rates": (), "most_s": 299.0}, "30 stretches"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_model_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(**changes).check()


def test_a_recorded_load_keeps_its_times_or_is_stretched() -> None:
    trace = (Arrival(0.0), Arrival(2.0), Arrival(8.0), Arrival(12.0))
    recorded = schedule(rates=(), trace=trace, repeats=1).settled(CAPACITY)
    (rate,) = recorded.rates
    assert recorded.arrivals(rate, 0) == list(trace[:3])  # what comes later than --seconds is left out
    assert recorded.stretches == 3
    assert [a.at for a in schedule(rates=(1.0,), trace=trace).arrivals(1.0, 0)] == pytest.approx([0, 2 / 3, 8 / 3, 4])


def test_elastic_memory_on_and_off_are_two_arms() -> None:
    assert [arm.name for arm in parse_arms(["none", "us"], "both")] == ["none", "none pinned", "us", "us pinned"]
    assert [arm.elastic for arm in parse_arms(["us"], "off")] == [False]
    with pytest.raises(ConfigError, match="us twice"):
        parse_arms(["us", "us"], "on")


def test_of_a_load_that_changes_each_part_counts_without_the_warm_up() -> None:
    made = schedule(kind="steps", seconds=30.0)
    assert [(part.name, part.begin, part.end) for part in made.parts()] == [
        ("low", 2, 10), ("high", 10, 20), ("low again", 20, 30),
    ]  # fmt: skip
    assert [part.times for part in made.parts()] == [0.25, 2.5, 0.25]
    assert [part.name for part in schedule(kind="steps", seconds=30.0, warm_up=10.0).parts()] == ["high", "low again"]
    assert schedule(kind="bursty").parts() == []
    assert len([a for a in made.arrivals(2.0, 0) if 10 <= a.at < 20]) > len(made.arrivals(2.0, 0)) / 2
