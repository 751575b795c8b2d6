"""A stretch over time."""

from __future__ import annotations

import pytest

from edgespec.bench.load.records import Sample, Stretch
from edgespec.bench.load.series import series


def sample(time: float, seconds: float, sequences: int, gamma: float | None, elastic: str = "") -> Sample:
    return Sample(time, seconds, sequences, sequences, 0, gamma, 0, 0, 0, 0.5, 2, elastic)


def test_a_batch_counts_as_long_as_it_is_and_idle_time_is_idle() -> None:
    made = Stretch("us", 1.0, 0, 0, 10.0, 1.0, ended=10.0)
    made.samples = [sample(2.0, 2.0, 4, 2.0), sample(2.5, 0.5, 8, None), sample(3.0, 0.25, 2, 1.0, "lend")]
    found = series(made, 10)
    assert found["time"] == pytest.approx([n + 0.5 for n in range(10)])
    assert found["sequences"] == pytest.approx([4, 4, (8 * 0.5 + 2 * 0.25) / 0.75, *[0] * 7], abs=1e-4)
    assert found["gamma"] == [2.0, 2.0, 1.0, *[None] * 7]
    assert found["elastic"] == [[3.0, "lend"]]
    assert found["window"] == [1.0, 10.0]


def test_nothing_ran() -> None:
    found = series(Stretch("us", 1.0, 0, 0, 10.0, 1.0), 5)
    assert found["sequences"] == [0.0] * 5
    assert found["kv_free"] == [None] * 5
