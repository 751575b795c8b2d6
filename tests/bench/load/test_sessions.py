"""The closed loop: total speed, fairness, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from edgespec.bench.load import output, sessions
from edgespec.bench.load.records import Served, Stretch
from edgespec.bench.load.system import Arm
from tests.bench.load.fakes import FakeSystem, failing, virtual
from tests.bench.load.test_measuring import ABOUT, pool


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch):
    with virtual(monkeypatch):
        yield


def run(system: FakeSystem, counts: Sequence[int], **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"repeats": 2, "seconds": 20.0, "warm_up": 2.0, "limit_s": 200.0, "exact": False}
    kept: list[Stretch] = []
    found = sessions.run(
        system, [Arm("none"), Arm("us")], counts, pool(), say=lambda t: None, advance=lambda n: None, keep=kept.append,
        **{**values, **changes},
    )  # fmt: skip
    assert found == kept
    return sessions.build(found, ABOUT)


def entry(document: dict[str, Any], count: int, arm: str) -> dict[str, Any]:
    return next(e for e in document["table"] if (e["sessions"], e["arm"]) == (count, arm))


def test_total_speed_and_fairness() -> None:
    made = run(FakeSystem(max_sessions=4, speeds={"us": 2}), (1, 4))
    assert 3.2 < entry(made, 4, "none")["to_one"]["value"] < 4.4  # prompts of other lengths
    assert entry(made, 1, "none")["to_one"]["value"] == pytest.approx(1)
    assert entry(made, 4, "us")["throughput"]["value"] > 1.3 * entry(made, 4, "none")["throughput"]["value"]
    assert entry(made, 4, "none")["fairness"]["value"] == pytest.approx(1.0)
    assert entry(made, 4, "none")["lost"] == 0
    assert len(sessions.table(made).rows) == 4
    assert set(output.drawn(made, sessions.pictures)) == {"Sessions"}
    assert sessions.headline(made).startswith("4 sessions")


def test_a_stretch_that_was_interrupted_in_its_warm_up_is_left_out() -> None:
    whole = [Stretch("us", 1.0, repeat, repeat, 20.0, 2.0, ended=20.0) for repeat in range(2)]
    cut = Stretch("us", 1.0, 2, 2, 20.0, 2.0, ended=1.0, interrupted=True)
    made = sessions.build([*whole, cut], ABOUT)
    assert entry(made, 1, "us")["throughput"]["n"] == 2
    assert len(made["stretches"]) == 3


def test_more_sessions_than_places_wait_and_none_is_lost() -> None:
    made = run(FakeSystem(max_sessions=2), (20,), repeats=1)
    found = entry(made, 20, "none")
    assert found["asked"] == found["finished"] >= 20
    assert found["lost"] == found["failed"] == found["refused"] == 0
    assert found["fairness"]["value"] == pytest.approx(1.0)  # of pace: waiting is not in it, but in TTFT
    assert 0.2 < found["share"]["value"] < 0.95  # in this it is
    assert found["ttft_p99"]["value"] > 4


def test_what_does_not_end_in_time_is_lost_and_failures_are_counted() -> None:
    made = run(FakeSystem(max_sessions=1, faults={3: failing()}), (30,), repeats=1, limit_s=20.5)
    found = entry(made, 30, "none")
    assert found["failed"] == 1
    assert found["lost"] > 10


def test_requests_that_are_stuck_are_lost_and_said() -> None:
    system = FakeSystem(deaf=True, step=1000.0)
    stretch = Stretch("us", 2.0, 0, 0, 10.0, 1.0)
    sessions._one(system, stretch, pool(), 20.0, exact=False)
    assert stretch.interrupted
    assert "did not end within" in stretch.stuck
    assert sessions.figures(stretch)["lost"] == 2


def test_an_unfair_loop_is_seen() -> None:
    stretch = Stretch("none", 3.0, 0, 0, 10.0, 0.0, ended=10.0)
    for session, step in ((0, 0.1), (1, 0.2)):
        pieces = [(1.0 + step * n, 1) for n in range(11)]
        stretch.served.append(
            Served(session, "p", 0.0, 1, 0.0, pieces[-1][0], "finished", pieces=pieces, session=session)
        )
    assert sessions.figures(stretch)["fairness"] == pytest.approx(0.5)
    assert sessions.figures(stretch)["share"] == pytest.approx(1.0)
    stretch.served.append(Served(2, "p", 0.0, 1, 0.0, session=2))  # asked, and got nothing
    assert sessions.figures(stretch)["fairness"] == 0.0
    assert sessions.figures(stretch)["share"] == 0.0
    stretch.served[-1].pieces = [(11.0, 5), (11.1, 5)]  # too late to count
    assert sessions.figures(stretch)["fairness"] == 0.0
