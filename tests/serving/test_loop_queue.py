"""Where the queue meets the loop: what is refused, and what only seems to wait."""

from __future__ import annotations

import threading

import pytest

from edgespec.errors import QueueFullError
from tests.serving.stage import WAIT, Stage
from tests.support.scripted import PROMPT


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    stage = Stage(most=1, queue=2)
    stage.gate.clear()
    with stage.serving():
        first = stage.submit(PROMPT, max_new_tokens=3)
        while stage.admitted != [first.id] or stage.queue.free:
            threading.Event().wait(0.001)
        more = [stage.submit(PROMPT, max_new_tokens=3) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait already") as caught:
            stage.submit(PROMPT, max_new_tokens=3)
        assert 0 < caught.value.retry_after_s <= 60
        stage.gate.set()
        for request in (first, *more):
            assert len(request.result(WAIT).token_ids) == 3
        assert len(stage.submit(PROMPT, max_new_tokens=3).result(WAIT).token_ids) == 3


def test_a_burst_on_an_idle_engine_fills_its_sessions_and_the_queue() -> None:
    stage = Stage(most=2, queue=2)
    stage.gate.clear()
    with stage.serving():
        requests = [stage.submit(PROMPT, max_new_tokens=3) for _ in range(4)]
        while stage.queue.free == 2:  # the loop has not taken any yet
            threading.Event().wait(0.001)
        with pytest.raises(QueueFullError, match="requests wait already"):
            requests += [stage.submit(PROMPT, max_new_tokens=3) for _ in range(2)]
        stage.gate.set()
        for request in requests:
            assert len(request.result(WAIT).token_ids) == 3
        while stage.queue.free < 2:
            threading.Event().wait(0.001)
