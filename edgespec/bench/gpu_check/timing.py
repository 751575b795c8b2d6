"""Seconds of things that run on the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from edgespec.models.cuda.graphs import TorchCapture


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def captured(body: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`body` as one graph launch; on the CPU, itself."""
    return TorchCapture(device)(body)[1] if device.type == "cuda" else body


def samples(run: Callable[[], object], device: torch.device, count: int, *, inner: int = 1) -> list[float]:
    """Seconds of `count` runs (each the mean of `inner`), after one that is not counted."""
    times = []
    for _ in range(count + 1):
        wait(device)
        begin = time.perf_counter()
        for _ in range(inner):
            run()
        wait(device)
        times.append((time.perf_counter() - begin) / inner)
    return times[1:]


def median(run: Callable[[], object], device: torch.device, count: int = 7, *, inner: int = 1) -> float:
    return float(np.median(samples(run, device, count, inner=inner)))
