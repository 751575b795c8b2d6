"""Small numbers on their way to the device: pinned buffers, and events that say when one may be written again.

A copy from ordinary memory makes the driver wait for the stream first; one from pinned memory is only a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BUFFERS = 16  # copies that may be under way: more than a step, or a block of guesses, begins with


class Event(Protocol):
    """Of torch.cuda.Event, what is used here. One that was never recorded is over."""

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class _Over:
    """Where copies are over when they return."""

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def make_event(device: torch.device) -> Event:
    return torch.cuda.Event() if device.type == "cuda" else _Over()


class Ring:
    """Buffers that take turns: one is filled while the device still reads the others."""

    def __init__(self, device: torch.device, nbytes: int, count: int) -> None:
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        self._sent = [make_event(device) for _ in range(count)]
        self._turn = 0

    def next(self, wait: Callable[[Event], None] = lambda event: event.synchronize()) -> Tensor:
        """The buffer whose turn it is, uint8, when the device has read it. What `wait` raises leaves it its turn."""
        wait(self._sent[self._turn])
        return self._buffers[self._turn]

    def sent(self, stream: Any = None) -> None:
        """The copy from that buffer was launched, on `stream` (None: the thread's current one)."""
        if stream is None:
            self._sent[self._turn].record()
        else:
            self._sent[self._turn].record(stream)
        self._turn = (self._turn + 1) % len(self._buffers)

    def finish(self, wait: Callable[[Event], None] = lambda event: event.synchronize()) -> None:
        """Return when all copies are over."""
        for event in self._sent:
            wait(event)


class Staging:
    """Writes arrays of up to `nbytes` over device tensors. Waits only if the device is `BUFFERS` copies behind."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._ring = Ring(device, nbytes, BUFFERS)

    def write(self, target: Tensor, values: npt.NDArray[Any]) -> None:
        """One launch. target: contiguous, as many elements as `values`, of the same size in bytes."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        staged = self._ring.next()[: data.nbytes]
        staged.numpy()[:] = data
        target.copy_(staged.view(target.dtype).view(target.shape), non_blocking=True)
        self._ring.sent()

    def placed(self, values: npt.NDArray[np.int64]) -> Tensor:
        """A new tensor with these values."""
        target = torch.empty(values.shape, dtype=torch.int64, device=self._device)
        self.write(target, values)
        return target
