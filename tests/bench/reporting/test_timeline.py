"""From a Chrome trace to the stretch that is drawn."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.reporting.pairs import Part
from edgespec.bench.reporting.timeline import MOST_ROUNDS, PAUSE_S, Span, read, stretch, timelines, trace_file
from edgespec.bench.specbench.folder import read_run
from tests.support.runs import record, write_run


def event(name: str, lane: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": lane, "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": args}


def answer(begin: float, end: float, domain: str = "qa") -> dict[str, Any]:
    return event("answer", "answers", begin, end, domain=domain)


def a_round(begin: float, draft: str | None = None, seconds: float = 0.5) -> dict[str, Any]:
    return event("round", "rounds", begin, begin + seconds, draft=draft, gamma=2, accepted=1)


def trace(*events: dict[str, Any], dropped: int = 0) -> dict[str, Any]:
    meta = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "edgespec"}}
    return {"traceEvents": [meta, *events], "otherData": {"dropped_events": dropped}}


def test_the_time_of_other_arms_is_cut_out() -> None:
    found = read(trace(answer(10, 12), a_round(11, "code"), answer(60, 63), a_round(61), a_round(30)))
    assert found.answers == [Span(0, 2), pytest.approx(Span(2 + PAUSE_S, 5 + PAUSE_S))]
    assert [r.span.begin for r in found.rounds] == pytest.approx([1, 2 + PAUSE_S, 3 + PAUSE_S])
    assert [r.draft for r in found.rounds] == ["code", None, None]


def test_an_answer_of_which_a_part_was_dropped_is_left_out() -> None:
    events = (answer(0, 2), a_round(1), answer(3, 5), a_round(4))
    assert len(read(trace(*events)).answers) == 2
    assert read(trace(*events, dropped=3)).labels == ["qa"]


def test_what_is_resident_when() -> None:
    found = read(
        trace(
            answer(0, 10),
            a_round(1, "general"),
            event("evict general", "loads", 2, 2.1),
            event("load code", "loads", 2.1, 3, reason="worth more"),
            a_round(4, "code"),
            event("evict old", "loads", 5, 5.1),
            event("load general", "loads", 5.1, 6),
            event("warm math", "loads", 7, 8),
            a_round(8, "ngram"),
        )
    )
    assert found.resident == {
        "general": [Span(0, 2), Span(6, 8.5)],
        "code": [Span(3, 8.5)],
        "old": [Span(0, 5)],
        "ngram": [Span(0, 8.5)],
    }
    assert [(load.kind, load.draft, load.reason) for load in found.loads][1] == ("load", "code", "worth more")


def test_the_stretch_with_most_loads_is_shown() -> None:
    events = [answer(10.0 * i, 10.0 * i + 5) for i in range(5)]
    events += [a_round(10.0 * i + j * 0.08, seconds=0.08) for i in range(5) for j in range(MOST_ROUNDS // 3)]
    events += [event("load code", "loads", 31, 32), event("load math", "loads", 33, 34), event("load x", "loads", 1, 2)]
    found = stretch(read(trace(*events)))
    assert len(found["answers"]) == 3
    assert [load[3] for load in found["loads"]] == ["code", "math"]
    assert found["seconds"] == pytest.approx(15 + 2 * PAUSE_S)
    assert all(0 <= begin <= end <= found["seconds"] for begin, end, *_ in found["loads"])


def test_one_long_answer_is_cut() -> None:
    found = stretch(read(trace(answer(0, 1000), *(a_round(float(i), "code") for i in range(MOST_ROUNDS + 9)))))
    assert found["seconds"] == MOST_ROUNDS - 0.5
    assert len(found["rounds"]) == MOST_ROUNDS


def test_traces_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("plain", "edgespec", "memspec", "nightjar", "static:code@3")
    run = read_run(write_run(tmp_path / "run", {name: [record(1)] for name in names}))
    trace_file(run.path, "edgespec").write_text(
        json.dumps(trace(answer(0, 2), a_round(0, "code"), a_round(1, "ngram"))), encoding="utf-8"
    )
    trace_file(run.path, "static:code@3").write_text(
        json.dumps(trace(answer(0, 2), a_round(0, "code"))), encoding="utf-8"
    )
    endless = trace(answer(0, float("inf")), a_round(0, "code"), a_round(1, "ngram"))
    trace_file(run.path, "plain").write_text(json.dumps(endless), encoding="utf-8")
    trace_file(run.path, "memspec").write_text('{"traceEvents": [{"ph": "X"}]}', encoding="utf-8")
    trace_file(run.path, "nightjar").write_text("[" * 100_000, encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        found = timelines(Part([run]))
    assert list(found) == ["edgespec"], "an arm that always does the same has nothing to show"
    assert "memspec.json cannot be read" in caplog.text
    assert "nightjar.json cannot be read" in caplog.text
    assert "plain.json cannot be read" in caplog.text
