"""Stands for CUDA graphs on the CPU: what a capture launched is launched again, into the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class ScriptedCapture:
    """Replays the body that was captured first, so whatever it was told by anything but tensors shows as old.

    Graphs share their memory: a replay destroys what the others gave.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.made = 0
        self.replayed = 0
        self.renewed = 0
        self._error = error
        self._results: list[list[Tensor]] = []

    def renew(self) -> None:
        self.renewed += 1
        self._results.clear()

    def __call__(self, body: Callable[[], Any], warm: bool = True) -> tuple[Any, Callable[[], None]]:
        if self._error is not None:
            raise self._error
        self.made += 1
        kept = body()
        own, all_results = _tensors(kept), self._results
        all_results.append(own)

        def replay() -> None:
            self.replayed += 1
            for result in all_results:
                for tensor in result if result is not own else ():
                    tensor.fill_(-7)
            for old, new in zip(own, _tensors(body())):
                old.copy_(new)

        return kept, replay


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in result if isinstance(each, Tensor)]
