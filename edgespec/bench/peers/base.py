"""What a contender answers with, and the clock that all of them use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


class Recorder:
    """Notes when how many tokens appeared. Make it right before the prompt is handed over."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._emissions: list[tuple[float, int]] = []

    def emit(self, count: int = 1) -> None:
        """`count` tokens appeared now."""
        if count:
            self._emissions.append((time.perf_counter() - self._start, count))

    def reply(self, token_ids: Sequence[int], stats: dict[str, Any] | None = None) -> dict[str, Any]:
        """The contender's answer in the form that the parent measures."""
        seconds = time.perf_counter() - self._start
        ids = [int(token) for token in token_ids]
        return {"token_ids": ids, "emissions": self._emissions, "seconds": seconds, "stats": stats or {}}
