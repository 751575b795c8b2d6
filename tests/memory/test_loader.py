"""What a load is handed: chunked reads, a rate, cancellation, names of short files; and the thread that runs loads."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafts.base import LoadCancelled
from edgespec.errors import DraftError
from edgespec.memory import loader
from edgespec.memory.loader import CHUNK_BYTES, Control, Loader, RateLimit, lower_priority, read_ahead
from tests.support.loadables import WAIT, Clock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(3 * CHUNK_BYTES + 17))
    return path


@pytest.fixture
def fd(file: Path) -> Iterator[int]:
    number = os.open(file, os.O_RDONLY)
    yield number
    os.close(number)


def test_a_read_is_what_is_in_the_file(file: Path, fd: int) -> None:
    control, into = Control([file]), bytearray(file.stat().st_size)
    control.read(fd, memoryview(into), 0)
    assert into == file.read_bytes()
    part = bytearray(100)
    control.read(fd, memoryview(part).cast("i").cast("B"), 1000)
    assert part == file.read_bytes()[1000:1100]
    assert control.bytes_read == file.stat().st_size + 100


def test_views_of_other_types_are_filled(file: Path, fd: int) -> None:
    import numpy as np

    array = np.zeros((5, 7), np.float32)
    Control([file]).read(fd, memoryview(array), 8)
    assert array.tobytes() == file.read_bytes()[8:148]


def test_reads_are_cut_into_chunks(file: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = loader._read_at
    monkeypatch.setattr(loader, "_read_at", lambda fd, into, at: asked.append(len(into)) or original(fd, into, at))
    Control([file]).read(fd, memoryview(bytearray(file.stat().st_size)), 0)
    assert asked == [CHUNK_BYTES] * 3 + [17]


def test_a_short_file_is_named_with_both_lengths(file: Path, fd: int) -> None:
    """B019: a file that is cut while it is read is an error that says which, what it should have and what it has."""
    os.truncate(file, 1000)
    with pytest.raises(DraftError, match=r"weights: is incomplete, 2010 bytes are expected but it has 1000; fetch it"):
        Control([file.with_name("other"), file]).read(fd, memoryview(bytearray(2000)), 10)
    with pytest.raises(DraftError, match="weights"):
        Control().read(fd, memoryview(bytearray(2000)), 10)


def test_an_unreadable_file_is_an_oserror(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="directory"):
        Control().read(folder, memoryview(bytearray(10)), 0)
    os.close(folder)


def test_cancelled_between_two_chunks(file: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control([file])
    original = loader._read_at

    def once(fd: int, into: memoryview, at: int) -> int:
        control.cancel()
        return original(fd, into, at)

    monkeypatch.setattr(loader, "_read_at", once)
    with pytest.raises(LoadCancelled):
        control.read(fd, memoryview(bytearray(file.stat().st_size)), 0)
    assert control.bytes_read == CHUNK_BYTES
    with pytest.raises(LoadCancelled):
        control.checkpoint()


def test_the_rate_is_kept_over_all_loads(file: Path, fd: int) -> None:
    size = file.stat().st_size
    limit = RateLimit(size / 0.1)
    begin = time.perf_counter()
    for _ in range(2):
        Control([file], limit).read(fd, memoryview(bytearray(size)), 0)
    assert 0.2 <= time.perf_counter() - begin < 1.0


def test_what_was_not_read_is_not_saved_up() -> None:
    clock = Clock()
    limit = RateLimit(100.0, clock)
    assert limit.pay(50, clock()) == 0.5
    assert limit.pay(50, clock()) == 1.0
    clock.now += 1000
    assert limit.pay(50, clock()) == 0.5
    assert RateLimit(None, clock).pay(10**12, clock()) == 0.0
    with pytest.raises(ValueError, match="a rate of 0"):
        RateLimit(0)


def test_cancelling_wakes_a_load_that_rests(file: Path, fd: int) -> None:
    """B145: within 50 ms, however slow the rate."""
    control = Control([file], RateLimit(1000.0))
    ended: list[float] = []

    def load() -> None:
        with pytest.raises(LoadCancelled):
            control.read(fd, memoryview(bytearray(file.stat().st_size)), 0)
        ended.append(time.perf_counter())

    thread = threading.Thread(target=load)
    thread.start()
    while not control.bytes_read:
        time.sleep(0.001)
    begin = time.perf_counter()
    control.cancel()
    thread.join(WAIT)
    assert ended[0] - begin < 0.05


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise")
def test_hints_to_the_page_cache(file: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are dropped after reading only where that was asked for; reading ahead covers each byte once."""
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, count, advice: told.append((at, count, advice)))
    size = file.stat().st_size
    Control([file]).read(fd, memoryview(bytearray(size)), 0)
    assert told == []
    Control([file], drop_cache=True).read(fd, memoryview(bytearray(size)), 0)
    assert {advice for *_, advice in told} == {os.POSIX_FADV_DONTNEED}
    assert sum(count for _, count, _ in told) == size
    told.clear()
    read_ahead([file], Control(), step=CHUNK_BYTES)
    assert [at for at, *_ in told] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES]
    assert {advice for *_, advice in told} == {os.POSIX_FADV_WILLNEED}


def test_reading_ahead_can_be_called_off(file: Path) -> None:
    control = Control()
    control.cancel()
    with pytest.raises(LoadCancelled):
        read_ahead([file], control)
    with pytest.raises(FileNotFoundError):
        read_ahead([file.with_name("gone")], Control())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities of threads")
def test_the_loader_s_thread_goes_last_and_others_do_not() -> None:
    seen: list[int] = []
    jobs = queue.Queue()  # type: ignore[var-annotated]
    background = Loader(jobs.get)
    background.start()
    jobs.put(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    jobs.put(None)
    assert background.join(WAIT)
    assert seen == [10]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) != 10


def test_a_priority_that_cannot_be_had_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_arguments: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refused)
    monkeypatch.setattr(loader, "_told", set())
    with caplog.at_level(logging.WARNING):
        lower_priority()
        lower_priority()
    assert len(caplog.records) == 1


def test_a_stuck_thread_is_replaced_and_ends_with_its_job() -> None:
    stuck, done = threading.Event(), []
    jobs = queue.Queue()  # type: ignore[var-annotated]
    background = Loader(jobs.get)
    background.start()
    first = background._thread
    jobs.put(lambda: stuck.wait(WAIT))
    while jobs.qsize():
        time.sleep(0.001)
    background.start()
    jobs.put(lambda: done.append(threading.current_thread()))
    jobs.put(None)
    assert background.join(WAIT)
    assert done
    assert done[0] is not first
    stuck.set()
    assert first is not None
    first.join(WAIT)
    assert not first.is_alive()
