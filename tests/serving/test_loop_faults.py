"""The serving loop on a toy decoder: what fails, and the end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from edgespec.errors import EdgespecError, ModelError
from edgespec.serving import loop
from edgespec.serving.request import Request
from tests.serving.stage import WAIT, Stage
from tests.support.scripted import PROMPT, ScriptedDraft, ToyDecoder, anti, failing, plain_greedy

PROMPTS = [[5, 6, 7, 8], [9], [3, 4] * 20, [30, 31, 32], [5, 6, 7, 9], [40] * 70, [11, 12, 11, 12, 11], [50, 2]]


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def text(prompt: list[int], count: int) -> list[int]:
    return plain_greedy(ToyDecoder(), prompt, count)


# Faults


@pytest.mark.parametrize("late", [False, True])
def test_a_target_that_fails_fails_those_it_was_for_and_the_next_works(late: bool) -> None:
    target = ToyDecoder()
    stage = Stage(target, most=3)
    requests = [stage.submit([5 + i, 6], max_new_tokens=20) for i in range(5)]

    def fail() -> None:
        if len(target.calls) == 14:
            target.calls.append([])
            raise ModelError("no memory left")

    if late:
        target.after = fail
    else:
        target.before = fail
    with stage.serving():
        for request in requests[:3]:
            with pytest.raises(ModelError, match="no memory left"):
                request.result(WAIT)
            assert request.status == "failed"
            with pytest.raises(ModelError, match="no memory left"):
                list(request)
        for i in (3, 4):
            assert list(requests[i].result(WAIT).token_ids) == text([5 + i, 6], 20)
        assert list(stage.submit(PROMPT, max_new_tokens=9).result(WAIT).token_ids) == text(PROMPT, 9)
    assert stage.loop is not None
    assert (stage.loop.totals.failed, stage.loop.totals.finished) == (3, 3)


def test_a_fault_that_is_a_defect_is_wrapped_and_keeps_its_cause() -> None:
    target = ToyDecoder()
    stage = Stage(target)
    request = stage.submit(PROMPT)

    def fail() -> None:
        raise ZeroDivisionError("a defect")

    target.before = fail
    with stage.serving(), pytest.raises(EdgespecError, match="ZeroDivisionError: a defect") as caught:
        request.result(WAIT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_logits_that_are_none_fail_their_own_request_only() -> None:
    class Poisoned(ToyDecoder):
        def _row(self, entries: list[Any]) -> Any:
            row = super()._row(entries)
            if len(entries) == 61:  # only the long prompt gets there
                row[:] = float("nan")
            return row

    stage = Stage(Poisoned())
    bad = stage.submit([9] * 55, max_new_tokens=20)
    good = [stage.submit([5 + i, 6], max_new_tokens=20) for i in range(3)]
    with stage.serving():
        with pytest.raises(ModelError):
            bad.result(WAIT)
        for i, request in enumerate(good):
            assert list(request.result(WAIT).token_ids) == text([5 + i, 6], 20)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_draft_that_fails_while_eight_use_it_costs_nothing_but_speed(threads: int) -> None:
    calls: list[int] = []

    def fail() -> BaseException:
        calls.append(1)
        return RuntimeError("it broke")

    whole = [*PROMPT, *text(PROMPT, 40)]
    stage = Stage(None, [failing(fail), anti(whole, "other")], threads=threads)
    requests = [stage.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
    for prompt, result in zip(PROMPTS, stage.ran(*requests), strict=True):
        assert list(result.token_ids) == text(prompt, 20)
    assert stage.statuses[0].reason is not None
    assert stage.statuses[1].active
    assert len(calls) >= 3


def test_a_failure_between_the_requests_parts_fails_them_and_the_next_works(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    request = stage.submit(PROMPT)
    situation, failed = stage.situation, []

    def fail(queued: int) -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("the books are wrong")
        return situation(queued)

    monkeypatch.setattr(stage, "situation", fail)
    with stage.serving():
        with pytest.raises(EdgespecError, match="the books are wrong"):
            request.result(WAIT)
        assert list(stage.submit(PROMPT, max_new_tokens=9).result(WAIT).token_ids) == text(PROMPT, 9)


def test_what_fails_beside_the_batches_is_logged_once_and_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that is looked after, while nothing runs and after a batch."""
    stage, idles = Stage(), list[int]()

    def idle() -> None:
        idles.append(1)
        raise MemoryError("compaction")

    def after(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("the books are wrong")

    monkeypatch.setattr(stage, "idle", idle)
    monkeypatch.setattr(stage, "after", after)
    monkeypatch.setattr(loop, "_IDLE_SECONDS", 0.01)
    with stage.serving():
        until(lambda: len(idles) > 2)
        requests = [stage.submit(prompt, max_new_tokens=9) for prompt in PROMPTS]
        for prompt, request in zip(PROMPTS, requests, strict=True):
            assert list(request.result(WAIT).token_ids) == text(prompt, 9)
    assert len([record for record in caplog.records if record.exc_info]) == 2
    assert stage.records  # who watches is told all the same


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_piece_that_cannot_be_handed_on_fails_its_own_request(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    stage = Stage()
    bad, good = (stage.submit(PROMPT, max_new_tokens=9) for _ in range(2))

    def fail(delta: Any) -> None:
        raise kind("a listener")

    monkeypatch.setattr(bad, "push", fail)
    with stage.serving():
        with pytest.raises(EdgespecError, match="a listener"):
            bad.result(WAIT)
        assert list(good.result(WAIT).token_ids) == text(PROMPT, 9)


@pytest.mark.parametrize("what", ["account", "session"])
def test_one_that_cannot_be_closed_as_it_should_has_its_answer_and_gives_all_back(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stage, admit, closed = Stage(), Stage.admit, list[int]()

    def fail() -> None:
        closed.append(1)
        raise RuntimeError("it cannot be ended")

    def breaking(request: Request) -> Any:
        active = admit(stage, request)
        close = active.session.close
        monkeypatch.setattr(active._account, "end", fail if what == "account" else lambda: None)
        monkeypatch.setattr(active.session, "close", fail if what == "session" else lambda: (closed.append(1), close()))
        return active

    monkeypatch.setattr(stage, "admit", breaking)
    request = stage.submit(PROMPT, max_new_tokens=9)
    (result,) = stage.ran(request)
    assert list(result.token_ids) == text(PROMPT, 9)
    assert len(closed) == (2 if what == "account" else 1)
    assert stage.events == [f"released {request.id}", "ended"]


def test_a_handle_keeps_nothing_of_the_batch_that_failed() -> None:
    class Large:
        pass

    target, made = ToyDecoder(), list[weakref.ref[Large]]()
    stage = Stage(target)
    requests = [stage.submit(PROMPT) for _ in range(3)]

    def fail() -> None:
        large = Large()
        made.append(weakref.ref(large))
        raise ModelError("no memory left")

    target.before = fail
    errors = []
    with stage.serving():
        for request in (*requests, *requests):
            with pytest.raises(ModelError, match="no memory left") as caught:
                request.result(WAIT)
            errors.append(caught.value)
    assert len({id(error) for error in errors}) == 6, "one exception for several: its traceback grows"
    gc.collect()
    assert made
    assert [large() for large in made] == [None] * len(made)


def test_one_failure_of_each_of_eight_texts_is_not_three_in_a_row() -> None:
    failed: set[int] = set()

    def script(tokens: Any, gamma: int) -> list[int]:
        if tokens[0] not in failed:
            failed.add(tokens[0])
            raise RuntimeError("once")
        return [2] * gamma

    stage = Stage(None, [ScriptedDraft(script)])
    requests = [stage.submit([10 + i, 6], max_new_tokens=20) for i in range(8)]
    results = stage.ran(*requests)
    assert len(failed) == 8
    assert stage.statuses[0].active
    assert all(result.stats.draft_share["scripted"] for result in results)


# The end


def test_closing_fails_what_waits_and_what_runs_and_leaves_no_thread() -> None:
    stage = Stage(most=2)
    requests = [stage.submit(PROMPT, max_new_tokens=100, ignore_eos=True) for _ in range(5)]
    closer = threading.Thread(target=lambda: stage.loop.close())  # type: ignore[union-attr]

    def close() -> None:
        closer.start()
        until(lambda: stage.loop._closing and requests[-1].over)  # type: ignore[union-attr]

    stage.before_batch[6] = close
    stage.gate.clear()
    with stage.serving():
        closed = stage.loop
        assert closed is not None
        stage.gate.set()
        closed._thread.join(WAIT)
        closer.join(WAIT)
        assert not closed._thread.is_alive()
    for request in requests:
        assert request.status == "failed"
        with pytest.raises(EdgespecError, match="the engine was closed"):
            request.result(WAIT)
    assert stage.events[-1] == "ended"
    assert (closed.totals.failed, closed.totals.finished) == (5, 0)
    with pytest.raises(EdgespecError, match="the engine is closed"):
        stage.submit(PROMPT)


@pytest.mark.parametrize("error", [None, RuntimeError("no cache")])
def test_closing_while_one_is_admitted_fails_it_and_gives_back_what_it_has(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    stage, admit, inside, go = Stage(), Stage.admit, threading.Event(), threading.Event()

    def slow(request: Request) -> Any:
        inside.set()
        assert go.wait(WAIT)
        if error is not None:
            raise error
        return admit(stage, request)

    monkeypatch.setattr(stage, "admit", slow)
    request = stage.submit(PROMPT)
    with stage.serving():
        assert inside.wait(WAIT)
        closer = threading.Thread(target=stage.loop.close)  # type: ignore[union-attr]
        closer.start()
        until(lambda: request.over)
        go.set()
        closer.join(WAIT)
        assert not closer.is_alive()
    assert request.status == "failed"
    with pytest.raises(EdgespecError, match="the engine was closed"):
        request.result(WAIT)
    assert stage.events == ([] if error else [f"released {request.id}"]) + ["ended"]
    assert stage.loop is not None
    assert stage.loop.totals.failed == 1


def test_the_loop_ends_when_nobody_has_the_engine_any_more() -> None:
    stage = Stage()
    with stage.serving():
        stage.is_gone = True
        assert stage.loop is not None
        stage.loop._thread.join(WAIT)
        assert not stage.loop._thread.is_alive()
