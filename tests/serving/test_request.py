"""The handle and the queue by themselves: what they say, and that nothing which comes between two lines stops them."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable
from queue import Empty
from typing import Any

import pytest

from edgespec.decoding.params import SamplingParams
from edgespec.errors import EdgespecError, ParameterError, QueueFullError
from edgespec.results import GenerationResult, GenerationStats, TextDelta
from edgespec.serving import request as handle
from edgespec.serving.queue import RequestQueue
from edgespec.serving.request import Request
from tests.serving.stage import WAIT
from tests.support.loadables import Clock

OURS = ("edgespec.serving.request", "edgespec.serving.queue")
PIECE = TextDelta("a", (5,), None, 0)


def request(**settings: Any) -> Request:
    return Request([5, 6], SamplingParams(), began_ns=0, **settings)


def result(reason: Any = "stop") -> GenerationResult:
    return GenerationResult("ab", (5, 6), reason, 2, GenerationStats())


def interrupted(call: Callable[[], Any], action: Callable[[], object]) -> Any:
    """What `call` returns in a thread where `action` comes before each line of handle and queue.

    So do signal handlers, and destructors that the collector runs.
    """
    returned: list[Any] = []

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_globals["__name__"] not in OURS:
            return None
        if event == "line":
            action()
        return tracer

    def run() -> None:
        sys.settrace(tracer)
        try:
            returned.append(call())
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive(), "it waits for itself"
    return returned[0]


def at(moment: int, action: Callable[[], object]) -> Callable[[], None]:
    """Do this the `moment`th time, and only then."""
    times = itertools.count()

    def act() -> None:
        if next(times) == moment:
            action()

    return act


# The queue


def test_the_time_to_come_back_is_that_of_a_place() -> None:
    clock = Clock()
    queue = RequestQueue(2, clock)
    for _ in range(2):
        queue.put(request())
    with pytest.raises(QueueFullError) as caught:
        queue.put(request())
    assert caught.value.retry_after_s == 1.0  # nothing is known yet
    queue.take(queue.first())
    for _ in range(30):
        queue.put(request())
        clock.now += 4.0
        queue.take(queue.first())
    queue.put(request())
    with pytest.raises(QueueFullError, match=r"try again in 4\.0 s"):
        queue.put(request())
    for _ in range(2):
        clock.now += 4.0
        queue.take(queue.first())
    clock.now += 10_000.0  # nobody came: that says nothing about waiting
    for _ in range(2):
        queue.put(request())
    queue.take(queue.first())
    queue.put(request())
    with pytest.raises(QueueFullError, match=r"try again in 4\.0 s"):
        queue.put(request())


def test_what_is_due_leaves_the_queue_and_a_cancel_wakes_it() -> None:
    queue = RequestQueue(10)
    kept, late, left = request(deadline=6.0), request(deadline=5.0), request(wake=queue.wake)
    for each in (kept, late, left):
        queue.put(each)
    queue.wait(10)
    woken = threading.Thread(target=left.cancel, args=("left",))
    woken.start()
    queue.wait(10)  # until the cancel
    woken.join()
    assert queue.withdraw(5.0) == [late, left]
    assert (late.cancel_reason, left.cancel_reason) == ("deadline", "left")
    assert queue.first() is kept
    assert queue.close() == [kept]
    with pytest.raises(EdgespecError, match="closed"):
        queue.put(kept)


def test_closing_while_those_that_are_due_are_looked_for() -> None:
    queue = RequestQueue(10)
    late = request(deadline=5.0, wake=lambda: queue.close())
    queue.put(late)
    assert queue.withdraw(5.0) == []  # whoever closes has them
    assert not queue.take(late)


def test_a_signal_handler_may_cancel_and_submit_while_its_thread_uses_the_queue() -> None:
    queue, put = RequestQueue(1000), list[Request]()

    def use() -> None:
        put.append(request())
        queue.put(put[-1])
        queue.wait(0)
        queue.withdraw(0.0)

    def handler() -> None:
        put.append(request(wake=queue.wake))
        queue.put(put[-1])
        if len(put) % 2:
            put[-1].cancel()

    interrupted(use, handler)
    kept = [each for each in put if each.cancel_reason is None]
    queue.withdraw(0.0)
    waiting = queue.close()
    assert len(put) > 10
    assert sorted(map(id, waiting)) == sorted(map(id, kept)), "one was lost"


# The handle


def test_a_request_is_over_once_and_says_how() -> None:
    one = request(keep=object())
    told: list[str] = []
    one.on_done(lambda r: told.append(r.status))
    with pytest.raises(TimeoutError, match=r"request-\d+ is not over after 0.01 seconds"):
        one.result(0.01)
    one.push(TextDelta("ab", (5, 6), None, 0, "stop"))
    one.end(result())
    one.fail(RuntimeError("too late"))
    one.cancel("too late")
    one.become("running")
    assert (one.status, one.cancel_reason, told) == ("finished", None, ["finished"])
    assert one.result().text == "ab"
    assert [delta.text for delta in one] == ["ab"]


def test_a_cancel_that_comes_too_late_leaves_no_reason() -> None:
    one = request()
    one.cancel("left")
    one.cancel("again")
    assert one.cancel_reason == "left"
    one.end(result())
    assert (one.status, one.cancel_reason) == ("finished", None)


def test_the_pieces_before_a_failure_are_read_before_it() -> None:
    one = request()
    one.push(PIECE)
    one.fail(EdgespecError("no memory left"))
    pieces = iter(one)
    assert next(pieces).text == "a"
    with pytest.raises(EdgespecError, match="no memory left"):
        next(pieces)


@pytest.mark.parametrize("read", [list, Request.result, lambda one: asyncio.run(awaited(one))])
def test_a_signal_handler_may_cancel_what_its_thread_reads(read: Callable[[Request], Any]) -> None:
    queue = RequestQueue(1)
    one, handled = request(wake=queue.wake), threading.Event()

    def handler() -> None:
        one.cancel("told to")
        handled.set()

    def answer() -> None:
        assert handled.wait(WAIT)
        one.push(PIECE)
        one.end(result("cancelled"))

    answering = threading.Thread(target=answer)
    answering.start()
    read_by_then = interrupted(lambda: read(one), handler)
    answering.join(WAIT)
    assert read_by_then in ([PIECE], result("cancelled"))
    assert (one.status, one.cancel_reason) == ("cancelled", "told to")
    assert queue._bell.qsize() == 1  # the loop is woken


async def awaited(one: Request) -> GenerationResult:
    return await one


def answered(one: Request) -> None:
    one.push(PIECE)
    one.end(result())


def read_and_ended_at(moment: int) -> bool:
    """Whether there are so many lines until who reads waits, if the end comes before one of them."""
    one, late = request(), threading.Event()

    def rescue() -> None:
        if not one.over:
            late.set()
            answered(one)

    timer = threading.Timer(0.5, rescue)
    timer.start()
    assert interrupted(lambda: list(one), at(moment, lambda: late.is_set() or answered(one))) == [PIECE]
    timer.cancel()
    return not late.is_set()


def test_whenever_the_end_comes_who_reads_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it comes in the thread that reads, from a signal handler that closes the engine."""
    monkeypatch.setattr(handle, "_LOOK_SECONDS", 2 * WAIT)  # it must not be this that wakes
    assert next(moment for moment in itertools.count() if not read_and_ended_at(moment)) > 5


def ended_at(moment: int, call: Callable[[Request], Any], end: Callable[[Request], None]) -> tuple[str, list[str]]:
    """How it ends and what callbacks are told, if `end` comes before a certain line of `call`, or else after it."""
    one, told = request(), list[str]()
    one.on_done(lambda one: told.append(one.status))
    interrupted(lambda: call(one), at(moment, lambda: end(one)))
    if not one.over:
        end(one)
    return one.status, told


@pytest.mark.parametrize("moment", range(9))
def test_a_callback_is_called_once_whenever_the_end_comes(moment: int) -> None:
    told: list[Request] = []
    status, others = ended_at(moment, lambda one: one.on_done(told.append), answered)
    assert (len(told), others) == (1, [status])


@pytest.mark.parametrize("moment", range(9))
def test_it_is_over_once_whenever_it_is_closed(moment: int) -> None:
    status, told = ended_at(moment, lambda one: one.end(result()), lambda one: one.fail(EdgespecError("closed")))
    assert told == [status]
    assert status == ("failed" if moment < 2 else "finished")


# Where and how long one may wait


@pytest.mark.parametrize("forever", [None, float("inf"), 1e10, 10**400], ids=["none", "inf", "1e10", "huge"])
def test_a_time_without_end(forever: Any) -> None:
    one = request()
    threading.Timer(0.02, one.end, (result(),)).start()
    assert one.result(forever).text == "ab"


@pytest.mark.parametrize("over", [0, -1, -(10**400)], ids=["0", "-1", "huge"])
def test_a_time_that_is_over(over: Any) -> None:
    with pytest.raises(TimeoutError):
        request().result(over)


@pytest.mark.parametrize("wrong", [float("nan"), "5", [1]])
def test_what_is_no_time(wrong: Any) -> None:
    with pytest.raises(ParameterError, match=r"timeout is .*; allowed: None, or seconds"):
        request().result(wrong)


def test_who_waits_looks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come in the main thread, where that closes the engine, before it has woken all."""
    one, asked = request(), list[float]()

    class Bell:
        def get(self, timeout: float) -> None:
            asked.append(timeout)
            if len(asked) == 3:
                one.end(result())
            raise Empty

        def put(self, item: None) -> None:
            pass

    monkeypatch.setattr(handle, "SimpleQueue", Bell)
    assert one.result().text == "ab"
    assert asked == [1.0] * 3


async def pieces_of(one: Request) -> list[TextDelta]:
    return [piece async for piece in one]


@pytest.mark.parametrize(
    "way", [Request.result, list, lambda one: asyncio.run(awaited(one)), lambda one: asyncio.run(pieces_of(one))]
)
def test_nobody_waits_where_it_could_never_be_over(way: Callable[[Request], Any]) -> None:
    own, forked = request(served_here=lambda: True), request()
    forked._process = 1
    for one, words in ((own, "in the very thread that answers it"), (forked, "process 1, of which this one is a fork")):
        rescue = threading.Timer(WAIT / 4, one.fail, (RuntimeError("it waited"),))
        rescue.start()
        with pytest.raises(EdgespecError, match=words):
            way(one)
        rescue.cancel()
        answered(one)
        assert way(one) in ([PIECE], result())  # what is over can be had anywhere
