"""Measurements beside the contenders' answers: time by width, the gap at a difference, a whole warm start."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec.bench.workers import Worker, WorkerFailure

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
POSITION = 200
PROBE = "edgespec.bench.peers.own:Probe"
_FAILED = "the warm start failed"


class Probes:
    """Bare decoders in workers of their own, one weight format at a time; made when first asked for."""

    def __init__(
        self, model: Path, threads: int, start: Callable[[str], Worker] | None = None, *, device: str = "cpu"
    ) -> None:
        self._model, self._threads, self._device = model, threads, device
        self._start = start or (lambda name: Worker(name, threads=threads))
        self._open: tuple[str, Worker] | None = None
        self._gaps: dict[tuple[Any, ...], dict[str, float]] = {}

    def _worker(self, weight_format: str) -> Worker:
        if self._open is None or self._open[0] != weight_format:
            self.close()
            worker = self._start(f"probe {weight_format}")
            self._open = (weight_format, worker)
            options = {
                "model": str(self._model),
                "threads": self._threads,
                "weight_format": weight_format,
                "device": self._device,
            }
            worker.request("load", timeout=1800.0, factory=PROBE, options=options)
        return self._open[1]

    def gap(self, weight_format: str, ids: list[int], left: int, right: int) -> dict[str, float]:
        """How close the two tokens, and the two best ones, are after `ids` (in logits)."""
        key = (weight_format, tuple(ids), left, right)
        if key not in self._gaps:
            arguments = {"ids": ids, "left": left, "right": right}
            reply = self._worker(weight_format).request("call", method="gap", arguments=arguments)
            self._gaps[key] = dict(reply["result"])
        return self._gaps[key]

    def widths(self, weight_format: str, ids: list[int], repeats: int) -> dict[str, float]:
        """Milliseconds of one forward at position 200, by width."""
        arguments = {"ids": ids, "position": POSITION, "widths": list(WIDTHS), "repeats": repeats}
        reply = self._worker(weight_format).request("call", method="widths", arguments=arguments)
        return dict(reply["result"])

    def close(self) -> None:
        """End the open worker."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def kill(self) -> None:
        """End the open worker now."""
        if self._open is not None:
            self._open[1].kill()
            self._open = None


def warm_start_command(model: str, threads: int) -> list[str]:
    """The command whose second start is timed."""
    return [sys.executable, "-m", "edgespec", "generate", "Hi", "-n", "1", "--model", model, "--threads", str(threads)]


def warm_start(command: Sequence[str], repeats: int) -> float:
    """Median seconds of the whole process, from its start to its end, after one start that is not counted.

    Raises WorkerFailure if it fails even once: a failed start has no time.
    """
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        try:
            done = subprocess.run(list(command), capture_output=True, text=True, errors="replace", timeout=600)
        except subprocess.TimeoutExpired:
            raise WorkerFailure(f"{_FAILED}: no end within 600 s", alive=False) from None
        seconds.append(time.perf_counter() - started)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise WorkerFailure(f"{_FAILED}: {last[:300]}", alive=False)
    return statistics.median(seconds[1:])
