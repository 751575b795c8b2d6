"""Real worker processes: crashes, noise and hangs become errors, never times."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from edgespec.bench.workers import Worker, WorkerFailure, worker_environment

ROOT = Path(__file__).resolve().parents[2]


def open_worker(mode: str) -> Worker:
    environment = worker_environment(1)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    worker = Worker(mode, threads=1, environment=environment)
    options = {"model": "m", "threads": 1, "mode": mode}
    try:
        worker.request("load", factory="tests.bench.fakes:FakePeer", options=options, timeout=60)
    except WorkerFailure:
        worker.close()
        raise
    return worker


def generate(worker: Worker, ids: list[int], timeout: float = 60.0):
    return worker.request("call", method="generate", arguments={"ids": ids, "new_tokens": 5}, timeout=timeout)["result"]


def test_answers_memory_and_an_end_on_request():
    worker = open_worker("noise")  # prints to standard output must not reach the protocol
    assert generate(worker, [3, 4])["token_ids"] == [3, 4, 5, 6, 7]
    assert 5e6 < worker.request("memory")["peak_memory_bytes"] < 2e9
    assert worker.cpu_seconds() > 0
    assert 5e6 < worker.resident_bytes() < 2e9
    worker.close()
    assert worker.cpu_seconds() == worker.resident_bytes() == 0


def test_an_exception_is_an_error_and_the_worker_goes_on():
    worker = open_worker("raises")
    with pytest.raises(WorkerFailure, match=r"^ValueError: this prompt is too difficult$") as caught:
        generate(worker, [1, 2, 3, 4])
    assert caught.value.alive
    assert len(generate(worker, [1])["token_ids"]) == 5
    worker.close()


@pytest.mark.parametrize(
    ("mode", "words"),
    [("exits", "ended with code 3: fatal: out of luck"), ("killed", r"ended by signal 9 \(SIGKILL\)")],
)
def test_a_crash_is_told_with_its_cause(mode, words):
    worker = open_worker(mode)
    with pytest.raises(WorkerFailure, match=words) as caught:
        generate(worker, [1])
    assert not caught.value.alive
    with pytest.raises(WorkerFailure):
        generate(worker, [1])
    worker.close()


def test_a_load_that_fails_is_told():
    with pytest.raises(WorkerFailure, match=r"FileNotFoundError: weights.bin"):
        open_worker("no load")


def test_a_worker_that_hangs_is_ended():
    worker = open_worker("hangs")
    process = psutil.Process(worker._process.pid)
    started = time.monotonic()
    with pytest.raises(WorkerFailure, match="no answer"):
        generate(worker, [1], timeout=0.5)
    assert time.monotonic() - started < 20
    assert not process.is_running()
    worker.close()


def test_what_is_not_json_ends_the_worker():
    worker = Worker("echo", threads=1, command=["/bin/sh", "-c", "read line; echo hello"])
    with pytest.raises(WorkerFailure, match="not JSON"):
        worker.request("memory", timeout=20)
    worker.close()


def test_a_waiting_worker_uses_no_processor_time():
    worker = open_worker("good")
    generate(worker, [1])
    before = worker.cpu_seconds()
    time.sleep(0.4)
    assert worker.cpu_seconds() - before <= 0.03
    worker.close()
