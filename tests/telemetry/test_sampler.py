"""Energy between the begin and the end of an answer, and what is noted of heat and memory meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.telemetry.power import SensorPower
from edgespec.telemetry.rails import find_rails
from edgespec.telemetry.sampler import LANE, Meter, Sampler
from edgespec.telemetry.trace import Tracer
from tests.support import boards


class Source:
    """Watts that a test sets. reads: how often it was asked."""

    name = "made-up"
    interval = 0.005

    def __init__(self, watts: float | None = 10.0) -> None:
        self.now = watts
        self.reads = 0
        self.closed = False

    def watts(self) -> float | None:
        self.reads += 1
        return self.now

    def close(self) -> None:
        self.closed = True


def until(happened: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def power_threads() -> int:
    return sum(thread.name == "edgespec-power" for thread in threading.enumerate())


def test_the_area_under_the_samples() -> None:
    meter = Meter(begin=100.0, most_gap=1.0)
    meter.add(100.5, 4.0)  # 0.5 s at 4 W
    assert meter.joules is None  # one sample says little
    meter.add(101.0, 8.0)  # 0.5 s at 6 W on average
    meter.add(101.5, 8.0)
    assert meter.joules == pytest.approx(2 + 3 + 4)
    meter.close(102.0)
    assert meter.joules == pytest.approx(13.0)


@pytest.mark.parametrize("times", [(101.5, 102.0), (100.5, 102.0), (100.2, 100.4)])
def test_a_gap_anywhere_makes_the_energy_unknown(times: tuple[float, float]) -> None:
    meter = Meter(begin=100.0, most_gap=1.0)
    for now in times:
        meter.add(now, 5.0)
    meter.close(102.0)
    assert meter.joules is None


def test_samples_out_of_order_take_nothing_back() -> None:
    meter = Meter(begin=0.0, most_gap=1.0)
    for now, joules in ((0.5, None), (0.4, 1.0), (1.0, 2.0)):
        meter.add(now, 2.0)
        assert meter.joules == (None if joules is None else pytest.approx(joules))


def test_an_answer_s_energy() -> None:
    source = Source(10.0)
    sampler = Sampler(source, floor=0)
    begin = time.perf_counter()
    meter = sampler.begin()
    until(lambda: source.reads > 3)
    sampler.end(meter)
    seconds = time.perf_counter() - begin
    assert meter.joules is not None
    assert 0.5 * 10 * seconds < meter.joules <= 10 * seconds
    assert list(meter.notes) == []
    sampler.close()
    assert source.closed
    assert power_threads() == 0


def test_two_answers_at_once_have_each_their_own() -> None:
    source = Source(10.0)
    sampler = Sampler(source, floor=0)
    long = sampler.begin()
    until(lambda: source.reads > 3)
    short = sampler.begin()
    before = source.reads
    until(lambda: source.reads > before + 3)
    sampler.end(short)
    sampler.end(long)
    assert short.joules is not None
    assert long.joules is not None
    assert short.joules < long.joules
    sampler.close()


def test_nothing_runs_between_answers_and_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    sampler = Sampler(source, floor=0)
    assert power_threads() == 0
    sampler.end(sampler.begin())
    time.sleep(0.03)
    before, turns, whole = source.reads, [], sampler._sample
    monkeypatch.setattr(sampler, "_sample", lambda: (turns.append(1), whole()))
    time.sleep(0.1)
    assert source.reads == before
    assert len(turns) < 2  # nor does it spin
    meter = sampler.begin()
    until(lambda: source.reads > before + 2)  # and it wakes again
    sampler.end(meter)
    sampler.close()


def test_without_a_rail_there_is_no_thread_and_no_energy() -> None:
    sampler = Sampler(None, floor=0)
    meter = sampler.begin()
    assert power_threads() == 0
    sampler.end(meter)
    assert meter.joules is None
    sampler.close()


def test_a_rail_that_vanishes_in_an_answer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("edgespec.telemetry.sampler._MOST_GAP", 0.05)
    source = Source(10.0)
    sampler = Sampler(source, floor=0)
    meter = sampler.begin()
    until(lambda: source.reads > 2)
    source.now = None
    with caplog.at_level(logging.WARNING):
        time.sleep(0.1)
    source.now = 10.0
    before = source.reads
    until(lambda: source.reads > before + 2)
    sampler.end(meter)
    assert meter.joules is None
    assert len(caplog.records) == 1
    assert "made-up does not tell the power any more" in caplog.text
    sampler.close()


def test_closed_in_the_middle_of_an_answer() -> None:
    source = Source(10.0)
    sampler = Sampler(source, floor=0)
    meter = sampler.begin()
    until(lambda: source.reads > 3)
    sampler.close()
    assert meter.joules is None
    sampler.end(meter)
    after = sampler.begin()
    sampler.end(after)
    assert after.joules is None


def test_from_a_board_s_files(tmp_path: Path) -> None:
    root = boards.NANO_8.write(tmp_path)
    sampler = Sampler(SensorPower(find_rails(root)), root=root)
    meter = sampler.begin()
    time.sleep(0.15)
    sampler.end(meter)
    assert meter.joules == pytest.approx(5.97 * 0.15, rel=0.5)
    sampler.close()


def test_heat_current_and_short_memory_are_noted_and_traced(tmp_path: Path) -> None:
    throttled = boards.replace(boards.NANO_8, throttled=("gpu-throttle-alert",), free=100)
    root = throttled.write(tmp_path)
    (find_rails(root)[0].folder / "curr1_max_alarm").write_text("1\n")
    tracer = Tracer()
    source = Source()
    sampler = Sampler(source, root=root, tracer=tracer)
    meter = sampler.begin()
    until(lambda: source.reads > 2)
    boards.put(root, "proc/meminfo", "MemTotal: 7789568 kB\nMemAvailable: 51200 kB\n")
    sampler.end(meter)
    notes = list(meter.notes.values())
    assert "throttled: the GPU is too hot" in notes
    assert "throttled: VDD_IN draws too much" in notes
    assert [note for note in notes if note.startswith("memory")] == ["memory low: 100 MiB left"]  # the first
    assert not any("fan" in note or "CPU" in note for note in notes)
    names = {event.name for event in tracer.events() if event.lane == LANE}
    assert names >= {"10.0 W", "throttled: the GPU is too hot", "memory low: 50 MiB left"}
    sampler.close()


def test_how_busy_the_gpu_is(tmp_path: Path) -> None:
    root, tracer = boards.NANO_8.write(tmp_path), Tracer()
    sampler = Sampler(None, root=root, tracer=tracer)
    meter = sampler.begin()
    assert meter.gpu_load is None
    sampler._look([meter])
    next(root.glob("sys/class/devfreq/*/device/load")).write_text("130\n")
    sampler.end(meter)
    assert meter.gpu_load == pytest.approx((0.63 + 0.13) / 2)
    names = [event.name for event in tracer.events() if event.lane == LANE]
    assert names == ["GPU 63% at 306 MHz", "GPU 13% at 306 MHz"]
    assert [event.args["gpu_load"] for event in tracer.events()] == [0.63, 0.13]


def test_an_answer_that_ends_while_it_is_measured() -> None:
    """As the collector does with a stream that nobody ended, in the thread that measures."""
    source = Source()
    sampler = Sampler(source, floor=0)
    meter, other = sampler.begin(), sampler.begin()
    watts, ended = source.watts, []

    def collected() -> float | None:
        if not ended:
            ended.append(meter)
            sampler.end(meter)
        return watts()

    source.watts = collected  # type: ignore[method-assign]
    until(lambda: bool(ended))
    sampler.end(other)
    sampler.close()
    assert power_threads() == 0


def test_a_cool_board_notes_nothing(tmp_path: Path) -> None:
    sampler = Sampler(None, root=boards.NANO_8.write(tmp_path))
    meter = sampler.begin()
    sampler.end(meter)
    assert list(meter.notes) == []
