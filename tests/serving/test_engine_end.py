"""Requests on a real engine with a tiny model: asyncio, interruption, faults of the target, the end."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, SamplingParams
from edgespec.errors import EdgespecError, ModelError
from edgespec.serving import engine_part
from tests.serving.engines import GREEDY, PROMPTS, WAIT, load


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def waits_for_ever(request: Any, ready: threading.Event) -> None:
    ready.set()
    request.result(WAIT)
    threading.Event().wait(WAIT)


# asyncio


def test_iterating_awaiting_and_leaving_in_asyncio(engine: Engine) -> None:
    expected = engine.generate(PROMPTS[0], GREEDY)

    async def read(request: Any) -> tuple[int, ...]:
        return tuple([token async for delta in request for token in delta.token_ids])

    async def leave(request: Any) -> None:
        async for _ in request:
            break

    async def work() -> None:
        requests = [engine.submit(PROMPTS[0], GREEDY) for _ in range(4)]
        left = asyncio.create_task(read(requests[3]))
        await asyncio.sleep(0)
        left.cancel()  # of the consumer: the request goes on
        texts = await asyncio.gather(*(read(request) for request in requests[:2]))
        assert texts == [expected.token_ids] * 2
        await leave(requests[2])
        for request in requests:
            assert (await request).token_ids == expected.token_ids
            assert request.status == "finished"
        gone = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=400, ignore_eos=True))
        gone.cancel("left")
        assert (await gone).finish_reason == "cancelled"

    asyncio.run(work())


def test_an_event_loop_that_was_closed_does_not_disturb_the_others(engine: Engine) -> None:
    request = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=60, ignore_eos=True))

    async def begin() -> None:
        async for _ in request:
            return

    asyncio.run(begin())
    assert len(request.result(WAIT).token_ids) == 60


# Interruption and the end


def test_ctrl_c_in_the_main_thread_leaves_the_requests_alone(engine: Engine) -> None:
    engine.start_serving()
    expected = engine.generate(PROMPTS[0], GREEDY).token_ids
    asked = SamplingParams(max_new_tokens=100, ignore_eos=True)
    main = threading.main_thread().ident
    assert main is not None
    ready, fired = threading.Event(), list[int]()

    def interrupt(record: Any) -> None:
        if not fired and record.requests:
            fired.append(1)
            assert ready.wait(WAIT)
            signal.pthread_kill(main, signal.SIGINT)

    end = engine.watch(interrupt)
    request = engine.submit(PROMPTS[0], asked)
    try:
        with pytest.raises(KeyboardInterrupt):
            waits_for_ever(request, ready)
    finally:
        end()
    assert request.result(WAIT).token_ids[:24] == expected
    assert engine.submit(PROMPTS[0], GREEDY).result(WAIT).token_ids == expected


def test_ctrl_c_in_generate_cancels_all_of_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    main, fired, requests = threading.main_thread().ident, list[int](), list[Any]()
    assert main is not None
    submit = engine.submit

    def noted(*args: Any, **settings: Any) -> Any:
        requests.append(submit(*args, **settings))
        return requests[-1]

    def interrupt(record: Any) -> None:
        if not fired and len(record.requests) == 3:
            fired.append(1)
            signal.pthread_kill(main, signal.SIGINT)
            until(lambda: requests[-1].cancel_reason)

    monkeypatch.setattr(engine, "submit", noted)
    end = engine.watch(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:3], SamplingParams(max_new_tokens=300, ignore_eos=True))
    finally:
        end()
    quick = submit(PROMPTS[0], GREEDY)
    quick.result(WAIT)
    assert [request.status for request in requests] == ["cancelled"] * 3
    assert {request.cancel_reason for request in requests} == {"another of the prompts failed"}


def test_a_target_that_fails_fails_those_that_run_and_the_next_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(PROMPTS[0], GREEDY).token_ids
    batch, calls = engine._target.decoder.forward_batch, []

    def failing(parts: Any) -> Any:
        calls.append(len(parts))
        if len(calls) == 4:
            raise ModelError("no memory left")
        return batch(parts)

    monkeypatch.setattr(engine._target.decoder, "forward_batch", failing)
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=80, ignore_eos=True)) for prompt in PROMPTS]
    failed = 0
    for request in requests:
        try:
            assert len(request.result(WAIT).token_ids) == 80
        except ModelError:
            failed += 1
    assert failed >= 1
    assert engine.submit(PROMPTS[0], GREEDY).result(WAIT).token_ids == expected
    assert engine.serving is not None
    assert engine.serving.pool is not None
    assert engine.serving.pool.used == 0


def test_closing_the_engine_ends_everything(folder: Path) -> None:
    before = set(threading.enumerate())
    engine = load(folder)
    running = threading.Event()

    def watch(record: Any) -> None:
        if len(record.requests) == 8:
            running.set()
            until(lambda: engine._closed and requests[-1].over)

    engine.watch(watch)
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=400, ignore_eos=True)) for prompt in PROMPTS * 4]
    assert running.wait(WAIT)
    engine.close()
    for request in requests:
        assert request.status == "failed"
        with pytest.raises(EdgespecError, match="the engine was closed"):
            request.result()
    assert not set(threading.enumerate()) - before
    with pytest.raises(EdgespecError, match="the engine is closed"):
        engine.submit("a")
    with pytest.raises(EdgespecError, match="the engine is closed"):
        engine.generate(["a", "b"])
    engine.close()


def test_an_engine_that_nobody_has_any_more_ends_its_threads(folder: Path) -> None:
    before = set(threading.enumerate())
    engine = load(folder)
    request = engine.submit("a", SamplingParams(max_new_tokens=30, ignore_eos=True))
    del engine  # the request keeps it until it is over
    gc.collect()
    assert len(request.result(WAIT).token_ids) == 30
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT)
    assert not set(threading.enumerate()) - before


def test_a_deadline_counts_from_the_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from when the prompt was encoded, which may take as long."""
    clock, encode = [100.0], engine.encode

    def slowly(*args: Any, **options: Any) -> Any:
        clock[0] += 50.0
        return encode(*args, **options)

    monkeypatch.setattr(engine_part, "monotonic", lambda: clock[0])
    monkeypatch.setattr(engine, "encode", slowly)
    request = engine.submit(PROMPTS[0], GREEDY, deadline_s=7)
    assert request.deadline == 107.0
    request.result(WAIT)


def test_a_watcher_that_asks_for_several_answers_is_told_so(engine: Engine) -> None:
    engine.start_serving()
    told: list[str] = []

    def ask(record: Any) -> None:
        if not told:
            told.append("")
            try:
                engine.generate(PROMPTS[:2], GREEDY)
            except EdgespecError as error:
                told[0] = str(error)

    end = engine.watch(ask)
    try:
        engine.submit(PROMPTS[0], GREEDY).result(WAIT)
    finally:
        end()
    assert "waits for the thread that answers them, and was called in that very thread" in told[0]


def test_a_fork_is_told_that_the_engine_is_not_its_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads are not there, so it would wait for ever."""
    engine.start_serving()
    chat = engine.conversation()
    monkeypatch.setattr(engine, "_process", 1)  # as in a fork of process 1
    ways: list[Callable[[], Any]] = [
        lambda: engine.submit(PROMPTS[0]),
        lambda: engine.generate(PROMPTS[:2]),
        lambda: engine.generate(PROMPTS[0]),
        lambda: chat.send(PROMPTS[0]),
    ]
    for way in ways:
        with pytest.raises(EdgespecError, match="this process is a fork of process 1"):
            way()
