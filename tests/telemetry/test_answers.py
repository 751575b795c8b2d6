"""The engine's answers carry their energy, and what slowed the device down; without a rail they say None."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.telemetry import sampler
from edgespec.telemetry.sampler import LANE
from edgespec.telemetry.trace import Tracer
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import GREEDY, QUESTION, SHAPE, load


class Source:
    name = "made-up"
    interval = 0.002

    def __init__(self) -> None:
        self.now: float | None = 20.0
        self.closed = False

    def watts(self) -> float | None:
        return self.now

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "target", **SHAPE)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path_factory.getbasetemp() / "telemetry-home"))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    found = Source()
    monkeypatch.setattr(sampler, "find_power", lambda root: found)
    return found


@pytest.fixture
def engine(folder: Path, source: Source) -> Iterator[Any]:
    with load(folder, drafts=["ngram"], gamma=2, tracer=Tracer()) as made:
        yield made


def test_an_answer_has_its_energy(engine: Any) -> None:
    begin = time.perf_counter()
    stream = engine.stream(QUESTION, GREEDY)
    next(stream)
    time.sleep(0.05)  # so that it is long enough for several samples
    for _ in stream:
        pass
    seconds, stats = time.perf_counter() - begin, stream.result.stats
    assert 20 * 0.05 < stats.energy_joules <= 20 * seconds
    assert stats.joules_per_token == stats.energy_joules / stats.new_tokens
    assert stats.to_dict()["energy_joules"] == stats.energy_joules
    time.sleep(0.02)
    assert stream.result.stats.energy_joules == stats.energy_joules  # it grows no more
    assert any(event.name == "20.0 W" and event.lane == LANE for event in engine.tracer.events())


def test_a_chat_keeps_it_too(engine: Any) -> None:
    chat = engine.conversation()
    stream = chat.stream("x", GREEDY)
    next(stream)
    time.sleep(0.05)
    for _ in stream:
        pass
    assert chat.stats.energy_joules == stream.result.stats.energy_joules > 0


def test_a_rail_that_never_tells(engine: Any, source: Source) -> None:
    source.now = None
    assert engine.generate(QUESTION, GREEDY).stats.energy_joules is None


def test_what_slows_the_device_is_in_the_answer(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "throttling", lambda root, rails: ("the GPU is too hot",))
    assert engine.generate(QUESTION, GREEDY).stats.device_notes == ["throttled: the GPU is too hot"]


def test_a_stream_that_is_left_is_measured_no_more(engine: Any) -> None:
    stream = engine.stream(QUESTION, GREEDY)
    next(stream)
    assert len(engine._sampler._meters) == 1
    stream.close()
    assert not engine._sampler._meters


def test_closing_the_engine_ends_the_thread(folder: Path, source: Source) -> None:
    with load(folder, drafts=["ngram"], gamma=2) as engine:
        engine.generate(QUESTION, GREEDY)
        assert any(thread.name == "edgespec-power" for thread in threading.enumerate())
    assert source.closed
    assert not any(thread.name == "edgespec-power" for thread in threading.enumerate())


def test_without_a_rail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "find_power", lambda root: None)
    with load(folder, drafts=["ngram"], gamma=2) as engine:
        stats = engine.generate(QUESTION, GREEDY).stats
        assert stats.energy_joules is None
        assert stats.joules_per_token is None
        assert not any(thread.name == "edgespec-power" for thread in threading.enumerate())
