"""The event ring and the Chrome trace."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ConfigError
from edgespec.telemetry import NULL_TRACER, Tracer


def timed(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_a_written_trace_loads_and_its_spans_nest(tmp_path: Path) -> None:
    tracer = Tracer()
    with tracer.span("round", number=1):
        with tracer.span("propose"):
            time.sleep(0.001)
        with tracer.span("verify", width=np.int64(4)) as span:
            span.note(accepted=2)
    trace = json.loads(tracer.write(tmp_path / "trace.json").read_text())
    outer, first, second = timed(trace)
    assert [event["name"] for event in (outer, first, second)] == ["round", "propose", "verify"]
    assert second["args"] == {"width": 4, "accepted": 2}
    assert first["dur"] >= 1000  # microseconds
    for inner in (first, second):
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3
    assert first["ts"] + first["dur"] <= second["ts"] + 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_lanes_have_names_and_one_line_each() -> None:
    tracer = Tracer()
    tracer.event("power", 0, 1, lane="device")
    tracer.event("load code", 1_000, 9_000, lane="loads", bytes=5)
    tracer.event("verify", 2_000, 3_000)
    trace = tracer.chrome()
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert list(names.values()) == ["rounds", "loads", "device"]
    assert {event["name"]: names[event["tid"]] for event in timed(trace)} == {
        "power": "device",
        "load code": "loads",
        "verify": "rounds",
    }


def test_equal_beginnings_put_the_longer_event_first() -> None:
    tracer = Tracer()
    tracer.event("inner", 100, 200)
    tracer.event("outer", 100, 300)
    assert [event["name"] for event in timed(tracer.chrome())] == ["outer", "inner"]


def test_the_ring_keeps_the_latest_and_counts_the_rest() -> None:
    tracer = Tracer(capacity=10)
    for number in range(25):
        tracer.event(str(number), number, number + 1)
    assert [event.name for event in tracer.events()] == [str(number) for number in range(15, 25)]
    assert tracer.dropped == 15
    assert tracer.chrome()["otherData"] == {"dropped_events": 15}
    tracer.clear()
    assert (tracer.events(), tracer.dropped) == ([], 0)
    with pytest.raises(ConfigError):
        Tracer(capacity=0)


def test_a_span_that_fails_is_kept_and_says_so() -> None:
    tracer = Tracer()
    with pytest.raises(KeyError), tracer.span("load", lane="loads"):
        raise KeyError("x")
    assert tracer.events()[0].args == {"error": "KeyError"}


def test_threads_record_without_loss() -> None:
    tracer = Tracer(capacity=100_000)

    def record() -> None:
        for _ in range(2_000):
            with tracer.span("step"):
                pass

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tracer.events()) == 8_000
    assert tracer.dropped == 0


def test_reading_while_another_thread_records() -> None:
    tracer = Tracer(capacity=2_000)
    stop = threading.Event()

    def record() -> None:
        while not stop.is_set():
            tracer.event("step", 0, 1)

    thread = threading.Thread(target=record)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # makes an unguarded iteration fail at once
    thread.start()
    try:
        for _ in range(200):
            assert len(tracer.events()) <= 2_000
            assert tracer.dropped >= 0
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the trace to .*--trace"):
        Tracer().write(tmp_path / "none" / "trace.json")


def test_the_null_tracer_keeps_nothing() -> None:
    with NULL_TRACER.span("verify", lane="loads", width=1) as span:
        span.note(accepted=1)
    NULL_TRACER.event("x", 0, 1, lane="rounds", a=1)
    NULL_TRACER.clear()
    assert NULL_TRACER.events() == []
    assert not NULL_TRACER.enabled
    assert Tracer().enabled
    assert NULL_TRACER.span("a") is NULL_TRACER.span("b")
