"""The client: when requests are made, what is noted of them, and how a run ends."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from edgespec.bench.load import runner
from edgespec.bench.load.records import Ask, Stretch
from tests.bench.load.fakes import FakeSystem, answer, failing, virtual


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch):
    with virtual(monkeypatch):
        yield


def asks(*times: float, new: int = 8) -> list[Ask]:
    return [Ask(number, at, f"p{number}", (number + 1, 5, 6), new) for number, at in enumerate(times)]


def stretch(seconds: float = 10.0, warm_up: float = 0.0) -> Stretch:
    return Stretch("none", 1.0, 0, 0, seconds, warm_up)


def open_loop(system: FakeSystem, wanted: list[Ask], limit_s: float = 100.0, at: float | None = None) -> Stretch:
    found = stretch()

    async def work(stop: asyncio.Event) -> None:
        if at is not None:
            asyncio.get_running_loop().call_later(at, stop.set)
        await runner.open_loop(system, wanted, found, stop, limit_s=limit_s, params=runner.greedy)

    runner.run(work)
    return found


def test_arrivals_do_not_wait_for_answers() -> None:
    found = open_loop(FakeSystem(max_sessions=1), asks(0.0, 0.05, 0.1, 3.0))
    assert [one.submitted for one in found.served] == pytest.approx([0.0, 0.05, 0.1, 3.0])
    assert [one.outcome for one in found.served] == ["finished"] * 4
    assert [one.ids for one in found.served] == [answer((n + 1, 5, 6), 8) for n in range(4)]


def test_times_of_one_request() -> None:
    (one,) = open_loop(FakeSystem(), asks(1.0)).served
    assert one.ttft == pytest.approx(0.2)  # a batch of prompt, one with the first token
    assert one.tpot == pytest.approx(0.1)
    assert one.latency == pytest.approx(0.1 * (1 + len(one.ids)))
    assert one.pieces[0] == (pytest.approx(1.2), 1)
    assert (one.reached, one.stood) == ((2, 2), (2, 0))


def test_waiting_in_the_queue_counts() -> None:
    first, second = open_loop(FakeSystem(max_sessions=1), asks(0.0, 0.0)).served
    assert second.ttft == pytest.approx(first.latency + 0.2)


def test_failures_have_no_times() -> None:
    found = open_loop(FakeSystem(queue=2, max_sessions=1, faults={1: failing()}), asks(0.0, 0.0, 0.0, 0.0))
    assert [one.outcome for one in found.served] == ["finished", "failed", "refused", "refused"]
    assert "no more memory" in found.served[1].error
    assert found.served[1].finished is not None
    assert [one.finished for one in found.served[2:]] == [0.0, 0.0]
    assert all(one.latency is None and one.ttft is None for one in found.served[1:])


def test_time_is_up() -> None:
    found = open_loop(FakeSystem(max_sessions=1), asks(0.0, 0.0, 50.0), limit_s=0.75)
    assert [one.outcome for one in found.served] == ["unfinished"] * 3
    assert found.served[0].tokens == 6  # in the batch in which it was cancelled nothing is emitted
    assert found.served[1].submitted == 0.0
    assert found.served[2].submitted is None
    assert found.served[0].latency is None
    assert not found.interrupted
    assert found.ended < 2


def test_ctrl_c_keeps_what_was_measured() -> None:
    found = open_loop(FakeSystem(), asks(0.0, 0.0, 6.0), at=2.0)
    assert found.interrupted
    assert [one.outcome for one in found.served] == ["finished", "finished", "unfinished"]
    assert found.window == (0.0, pytest.approx(2.0, abs=0.1))
    assert len(found.counted()) == 2


def test_a_request_that_takes_no_notice_is_named() -> None:
    with pytest.raises(runner.Stuck, match=r"requests 0 \(running\) did not end"):
        open_loop(FakeSystem(deaf=True, step=1000.0), asks(0.0), limit_s=1.0)


def test_batches_and_memory_are_noted() -> None:
    found = open_loop(FakeSystem(), asks(0.0))
    assert [round(s.time, 3) for s in found.samples[:3]] == [0.1, 0.2, 0.3]
    assert sum(s.emitted for s in found.samples) == found.served[0].tokens
    assert found.rss[0][1] > 1 << 20


def test_a_closed_loop_asks_when_the_last_answer_has_ended() -> None:
    found, system = stretch(3.0), FakeSystem(max_sessions=2)
    source = (Ask(n, 0.0, "p", (n, 1), 4) for n in itertools.count())

    async def work(stop: asyncio.Event) -> None:
        await runner.closed_loop(
            system, source, found, stop, sessions=3, limit_s=50.0, params=runner.to_the_limit
        )  # fmt: skip

    runner.run(work)
    assert {one.outcome for one in found.served} == {"finished"}
    by_session = {n: [one for one in found.served if one.session == n] for n in range(3)}
    for mine in by_session.values():
        assert all(b.submitted >= a.finished for a, b in itertools.pairwise(mine))
        assert all(one.at == one.submitted for one in mine)
    assert max(s.sequences + s.queued for s in found.samples) == 3
