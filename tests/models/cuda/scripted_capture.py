"""Stands for CUDA graphs on the CPU: what a capture launched is launched again, into the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class ScriptedCapture:
    """Replays the body that was captured first, so whatever it was told by anything but tensors shows as old."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made = 0
        self.replayed = 0
        self._error = error

    def __call__(self, body: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        if self._error is not None:
            raise self._error
        self.made += 1
        kept = body()

        def replay() -> None:
            self.replayed += 1
            for old, new in zip(_tensors(kept), _tensors(body())):
                old.copy_(new)

        return kept, replay


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in result if isinstance(each, Tensor)]
