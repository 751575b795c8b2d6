"""Looks: copies to the host, for which the host waits until the device has done all that was launched before."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from edgespec.models.base import FloatArray


def look(tensor: Tensor) -> npt.NDArray[Any]:
    """A copy of `tensor`, also of one that lies on the CPU. The only way from the device to the host."""
    return tensor.to("cpu", copy=True).numpy()


def to_numpy(tensor: Tensor) -> FloatArray:
    """A look, as float32."""
    return look(tensor.float())


class Stopwatch:
    """Two events on the device's stream. Nothing is measured where there are no events."""

    def __init__(self, device: torch.device) -> None:
        timed = device.type == "cuda"
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) if timed else None for _ in range(2))
        if self._begin is not None:
            self._begin.record()

    def stop(self) -> None:
        if self._end is not None:
            self._end.record()

    @property
    def seconds(self) -> float | None:
        """Between the two, to be asked after a look that came later."""
        if self._begin is None or self._end is None:
            return None
        return float(self._begin.elapsed_time(self._end)) / 1e3
