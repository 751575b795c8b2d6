"""What Prometheus and the page are told."""

from __future__ import annotations

import html.parser
import re
import time
from importlib import resources
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from edgespec.memory.states import DraftState, State
from edgespec.results import GenerationResult, GenerationStats
from edgespec.server import timeline
from edgespec.server.metrics import Metrics
from edgespec.server.page import page
from tests.server.conftest import Running, Start
from tests.server.fakes import FULL, FakeEngine, Script


def metric(server: Running, name: str) -> float:
    lines = server.ask("/metrics").body.decode().splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")))


def test_metrics(start: Start) -> None:
    server = start()
    assert server.ask("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    server.engine.batch()
    server.engine.batch(gammas=(), drafted=(), accepted=(), emitted=())
    server.chat()
    server.chat(stream=True)
    server.chat(n=2)
    server.engine.script = Script(submit_error=FULL)
    server.chat()
    server.ask("/" + "x" * 50)
    server.ask("/v1/models/a")
    expected = {
        'edgespec_http_requests_total{method="POST",path="/v1/chat/completions",status="200"}': 2,
        'edgespec_http_requests_total{method="GET",path="other",status="404"}': 1,
        'edgespec_http_requests_total{method="GET",path="/v1/models/{model}",status="404"}': 1,
        'edgespec_requests_total{outcome="stop"}': 2,
        'edgespec_requests_total{outcome="queue_full"}': 1,
        "edgespec_generated_tokens_total": 24,
        "edgespec_prompt_tokens_total": 4,
        "edgespec_prompt_tokens_reused_total": 4,
        "edgespec_batches_total": 2,
        "edgespec_drafted_tokens_total": 5,
        "edgespec_accepted_tokens_total": 2,
        "edgespec_time_to_first_token_seconds_count": 2,
        "edgespec_time_per_token_seconds_count": 2,
        "edgespec_running": 1,
        "edgespec_queued": 2,
        'edgespec_kv_blocks{state="free"}': 60,
        'edgespec_draft_resident{draft="code"}': 1,
        'edgespec_draft_resident{draft="maths"}': 0,
        "edgespec_memory_bytes": 123456,
        "edgespec_drafts_lent": 0,
    }
    assert {name: metric(server, name) for name in expected} == expected
    server.engine.serving = None  # before the first request
    assert server.ask("/metrics").status == 200
    assert server.ask("/edgespec/timeline").json["serving"]["pool"] is None


def test_a_request_that_ends_in_the_queue_has_no_prompt_and_no_first_token() -> None:
    metrics = Metrics()
    metrics.finished(GenerationResult("", (), "cancelled", 7, GenerationStats(prompt_tokens=7)))
    text = metrics.text().decode()
    assert 'edgespec_requests_total{outcome="cancelled"} 1.0' in text
    assert "edgespec_prompt_tokens_total 0.0" in text
    assert "edgespec_time_to_first_token_seconds_count 0.0" in text


def test_metrics_without_times_of_creation_beside_those_of_others(start: Start) -> None:
    others = CollectorRegistry()
    Counter("others", "Not ours", registry=others)
    server = start()
    server.chat()
    assert b"_created" not in server.ask("/metrics").body
    assert b"others_created" in generate_latest(others)


def now_at(start: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time line's clock stands still, at what the list holds."""
    now = [start]
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_timeline(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    now_at(22.0, monkeypatch)
    server = start()
    server.engine.batch()
    server.engine.batch(resident=("code", "maths"), elastic="lend")
    seen = server.ask("/edgespec/timeline").json
    rows = [dict(zip(seen["fields"], row, strict=True)) for row in seen["rows"]]
    assert [row["ticket"] for row in rows] == [1, 2]
    assert (rows[0]["gamma"], rows[0]["drafted"], rows[0]["accepted"], rows[0]["emitted"]) == (2.5, 5, 2, 4)
    assert seen["loads"] == [["code", 9.5, 10.0]]
    assert seen["resident"] == [["code", 10.0, None]]
    assert [kind for _at, kind in seen["elastic"]] == ["lend"]
    assert [(draft["name"], draft["state"]) for draft in seen["drafts"]] == list(FakeEngine().drafts.items())
    assert server.ask("/edgespec/timeline?after=1").json["rows"][0][0] == 2
    assert server.ask("/edgespec/timeline?after=2").json["rows"] == []
    assert len(server.ask("/edgespec/timeline?after=99").json["rows"]) == 2  # of an earlier server
    assert len(server.ask("/edgespec/timeline").json["loads"]) == 1  # once each
    server.engine.states["code"] = DraftState(State.COLD, "", 20.0, 0.5, None)
    server.engine.states["maths"] = DraftState(State.RESIDENT, "", 21.0, 1.0, 0)
    seen = server.ask("/edgespec/timeline").json
    assert seen["resident"] == [["code", 10.0, 20.0], ["maths", 21.0, None]]
    assert seen["loads"] == [["code", 9.5, 10.0], ["maths", 20.0, 21.0]]
    for wrong in ("-1", "x", "9" * 30, "%C2%B2"):
        assert server.ask(f"/edgespec/timeline?after={wrong}").status == 400


def test_the_timeline_sees_what_comes_and_goes_while_nobody_looks() -> None:
    engine = FakeEngine()
    line = timeline.Timeline(engine, lambda *_: None)
    engine.watch(line.batch)
    begin = time.perf_counter()
    engine.states = {"code": DraftState(State.RESIDENT, "", begin, 0.5, 0)}
    engine.batch(resident=("code",))
    engine.states = {"code": DraftState(State.COLD, "", begin + 1, 0.5, None)}
    engine.batch(resident=())
    engine.states = {"code": DraftState(State.RESIDENT, "", begin + 2, 0.25, 0)}
    engine.batch(resident=("code",))
    seen = line.since(0)
    assert seen["loads"] == [("code", begin - 0.5, begin), ("code", begin + 1.75, begin + 2)]
    assert seen["resident"] == [("code", begin, begin + 1), ("code", begin + 2, None)]


def test_what_no_page_shows_any_more_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    now = now_at(100.0, monkeypatch)
    line = timeline.Timeline(engine, lambda *_: None)
    engine.watch(line.batch)
    engine.states = {"code": DraftState(State.RESIDENT, "", 99.0, 0.5, 0)}
    engine.batch(elastic="lend")
    engine.states = {"code": DraftState(State.COLD, "", 100.0, 0.5, None)}
    engine.batch(resident=())
    seen = line.since(0)
    assert [len(seen[name]) for name in ("loads", "resident", "elastic")] == [1, 1, 1]
    now[0] += timeline.SHOWN_SECONDS
    seen = line.since(0)
    assert [len(seen[name]) for name in ("loads", "resident", "elastic")] == [0, 0, 0]


class Page(html.parser.HTMLParser):
    """Which tags and attributes the page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def test_the_page_needs_nothing_from_elsewhere(server: Running) -> None:
    answer = server.ask("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/]{43}='", policy)) == 2
    text = answer.body.decode()
    for tag, attributes in Page(text).tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")}, tag
        assert tag != "link" or (attributes["href"] or "").startswith("data:")
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text)
    # What a model writes is never markup.
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert way not in text
    assert bytes(page().body) == resources.files("edgespec.server").joinpath("page.html").read_bytes()
