"""CUDA graphs: a step is captured once for a shape and replayed ever after, with one launch instead of hundreds.

On a Jetson this decides everything: an eager token is some 690 launches from a slow CPU (docs/jetson.md). What is
captured must read and write only tensors that stay where they are, and must not look at their values on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from edgespec.models.cuda.memory import exclusive, out_of_memory

_log = logging.getLogger(__name__)

_WARM_UPS = 2  # runs before a capture: kernels are compiled and workspaces allocated there, which no capture may do

Body = Callable[[], Any]
Replay = Callable[[], None]


class Capture(Protocol):
    """Makes a graph of what `body` launches: its result, tensors that each replay writes anew, and the replay."""

    def __call__(self, body: Body, warm: bool = True) -> tuple[Any, Replay]:
        """warm: run it first, since it may use kernels that no body before it did."""

    def renew(self) -> None:
        """All graphs were dropped; tensors that they gave may still be in somebody's hands."""


class TorchCapture:
    """Captures on `device`; all graphs share one memory pool, so that they take the memory of the largest.

    So one graph's replay may overwrite what another one gave: see `DeviceLogits.keep`.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def renew(self) -> None:
        # torch refuses to capture into a pool whose graphs are gone while a tensor of it lives.
        self._pool = self._torch.cuda.graph_pool_handle()

    def __call__(self, body: Body, warm: bool = True) -> tuple[Any, Replay]:
        torch = self._torch
        with torch.cuda.device(self._device):
            before, stream = torch.cuda.current_stream(), self._stream
            try:
                stream.wait_stream(before)
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS if warm else 0):
                        body()
                before.wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                # thread_local: the loader's thread may copy weights meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    result = body()
            finally:  # torch does not come back to it if the capture's end fails
                torch.cuda.set_stream(before)
        return result, graph.replay


class Graphs:
    """The captured steps of one decoder, by key (what the shapes depend on).

    capture: None = every call runs its body, as on the CPU. After a capture that failed twice all calls do, with one
    warning: speed is lost, never text. Memory that ran out is the exception: it is passed on, for the working set to
    shrink. A capture waits for one of another thread.
    """

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._captured: dict[Hashable, tuple[Any, Replay]] = {}

    @property
    def enabled(self) -> bool:
        return self._capture is not None

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def prepare(self, key: Hashable, body: Body, *, warm: bool = True) -> bool:
        """Capture `body` under `key` if that was not done before; whether it is captured now. Nothing is replayed.

        warm: see `Capture`. A body may be run several times for one call: it must only write where it would again.
        """
        return key in self._captured or self._try(key, body, warm) is not None

    def run(self, key: Hashable, body: Body) -> Any:
        """What `body` returns; replayed if it was captured under `key` before, else captured now, as by `prepare`."""
        known = self._captured.get(key) or self._try(key, body, True)
        if known is None:
            return body()
        result, replay = known
        replay()
        return result

    def _try(self, key: Hashable, body: Body, warm: bool) -> tuple[Any, Replay] | None:
        if self._capture is None:
            return None
        for last in (False, True):  # what another library did to the device meanwhile is over the second time
            try:
                with exclusive:
                    known = self._captured[key] = self._capture(body, warm or last)
                return known
            except Exception as error:  # drivers, Triton and torch raise whatever they like here
                if out_of_memory(error):
                    raise
                if last:
                    self.give_up(error)
        return None

    def give_up(self, cause: object) -> None:
        """Capture nothing from now on: every call runs its body. The cause is in one warning."""
        if self._capture is not None:
            _log.warning("CUDA graphs are not used, each step is launched kernel by kernel (slow): %s", cause)
        self.forget()
        self._capture = None

    def forget(self) -> None:
        """Drop all graphs: what they read has moved. The next calls capture anew."""
        with exclusive:
            self._captured.clear()
            if self._capture is not None:
                self._capture.renew()
