"""What the callbacks, watchers and drafts of somebody else may do in the thread that serves."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from drafts.ngram import NgramDraft
from edgespec.errors import EdgespecError
from edgespec.serving.request import Request
from predictor.planner import FixedPlanner, Observation
from tests.serving.stage import WAIT, Stage
from tests.support.scripted import PROMPT, ScriptedDraft, ToyDecoder, plain_greedy

RAISED = [RuntimeError("bad"), SystemExit(3), asyncio.CancelledError("bad"), KeyboardInterrupt()]


def text(prompt: list[int], count: int) -> list[int]:
    return plain_greedy(ToyDecoder(), prompt, count)


@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
def test_a_callback_that_raises_and_a_watcher_that_raises_are_no_fault_of_the_loop(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    seen: list[Request] = []

    def bad(thing: Any) -> None:
        raise raised

    request = stage.submit(PROMPT, max_new_tokens=5)
    request.on_done(bad)
    request.on_done(seen.append)
    with stage.serving():
        assert stage.loop is not None
        stage.loop.watchers = (bad, stage.records.append)
        for one in (request, stage.submit(PROMPT, max_new_tokens=5)):
            assert list(one.result(WAIT).token_ids) == text(PROMPT, 5)
    assert seen == [request]
    assert stage.records
    assert len([record for record in caplog.records if record.exc_info]) == 2  # one each
    request.on_done(seen.append)  # it is over: called at once
    assert seen == [request, request]
    with pytest.raises(type(raised)):
        request.on_done(bad)


@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("raised", RAISED[1:], ids=lambda error: type(error).__name__)
def test_a_draft_that_raises_what_is_no_exception_fails_its_own_request(raised: BaseException, beside: int) -> None:
    def script(tokens: Any, gamma: int) -> list[int]:
        if tokens[0] == 50:
            raise raised
        return [2] * gamma

    stage = Stage(None, [ScriptedDraft(script)], load="fixed:2" if beside else "edgespec")
    bad = stage.submit([50, 6], max_new_tokens=20)
    good = [stage.submit([5 + i, 6], max_new_tokens=20) for i in range(beside)]
    with stage.serving():
        with pytest.raises(EdgespecError, match=f"the request failed: {type(raised).__name__}"):
            bad.result(WAIT)
        good.append(stage.submit([5 + beside, 6], max_new_tokens=20))
        for i, request in enumerate(good):
            assert list(request.result(WAIT).token_ids) == text([5 + i, 6], 20)


def test_a_planner_that_raises_what_is_no_exception_fails_its_own_request() -> None:
    class Bad(FixedPlanner):
        def observe(self, observation: Observation) -> None:
            raise SystemExit(3)

    planners = iter([Bad(None, 2), FixedPlanner(None, 2), FixedPlanner(None, 2)])
    stage = Stage(None, [NgramDraft()], planner=lambda: next(planners))
    bad, *good = (stage.submit([5 + i, 6], max_new_tokens=20) for i in range(3))
    with stage.serving():
        with pytest.raises(EdgespecError, match="the request failed: SystemExit"):
            bad.result(WAIT)
        for i, request in enumerate(good):
            assert list(request.result(WAIT).token_ids) == text([6 + i, 6], 20)


@pytest.mark.parametrize("where", ["target", "between"])
@pytest.mark.parametrize("raised", RAISED[1:], ids=lambda error: type(error).__name__)
def test_what_is_no_exception_in_a_batch_fails_those_that_run_and_the_next_work(
    raised: BaseException, where: str
) -> None:
    target = ToyDecoder()
    stage = Stage(target)
    requests = [stage.submit(PROMPT, max_new_tokens=9) for _ in range(2)]

    def fail() -> None:
        target.before = lambda: None
        raise raised

    if where == "target":
        target.before = fail
    else:
        stage.before_batch[2] = fail
    with stage.serving():
        for request in requests:
            with pytest.raises(EdgespecError, match=type(raised).__name__):
                request.result(WAIT)
        assert list(stage.submit(PROMPT, max_new_tokens=9).result(WAIT).token_ids) == text(PROMPT, 9)


def test_closing_from_a_callback_does_not_wait_for_itself() -> None:
    stage = Stage()
    first = stage.submit(PROMPT, max_new_tokens=3)
    second = stage.submit(PROMPT, max_new_tokens=50)
    with stage.serving():
        first.on_done(lambda request: stage.loop.close())  # type: ignore[union-attr]
        assert len(first.result(WAIT).token_ids) == 3
        with pytest.raises(EdgespecError, match="the engine was closed"):
            second.result(WAIT)


def test_a_callback_that_waits_for_another_request_is_told_so() -> None:
    """The thread would wait for itself, for ever, and all requests with it."""
    stage, told = Stage(), list[str]()
    first = stage.submit(PROMPT, max_new_tokens=3)
    others = [stage.submit(PROMPT, max_new_tokens=50) for _ in range(2)]
    rescue = threading.Timer(WAIT / 4, lambda: [other.fail(RuntimeError("it waited")) for other in others])

    def wait(over: Request) -> None:
        assert len(over.result().token_ids) == 3
        waits: list[Callable[[], Any]] = [others[0].result, lambda: list(others[1])]
        for waiting in waits:
            try:
                waiting()
            except EdgespecError as error:
                told.append(str(error))

    first.on_done(wait)
    rescue.start()
    for result in stage.ran(first, *others)[1:]:
        assert list(result.token_ids) == text(PROMPT, 50)
    rescue.cancel()
    assert len(told) == 2
    assert all("in the very thread that answers it" in words for words in told)


def test_ctrl_c_in_a_callback_of_a_thread_that_closes_is_for_that_thread(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    stage = Stage()
    request = stage.submit(PROMPT)

    def interrupted(request: Request) -> None:
        raise KeyboardInterrupt

    request.on_done(interrupted)
    with pytest.raises(KeyboardInterrupt):
        request.fail(EdgespecError("closed"))
    assert request.status == "failed"
    assert not caplog.records
