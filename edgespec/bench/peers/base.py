"""What a contender is and answers with, and the clock that all of them use."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALL_GROUPS = ("domain", "copying", "prose", "prefill")


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine in one setting.

    factory: "module:Class", made in the worker with `options` plus model and threads. groups: prompt groups it runs.
    weights: the weights it computes with, in words. packages: what must be installed; python: the oldest version that
    they come for. gguf: needs a GGUF file. slow: left out of a quick run unless asked for by name.
    absent: why it takes no part, where that is known without looking.
    """

    name: str
    factory: str
    weights: str
    options: dict[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ALL_GROUPS
    packages: tuple[str, ...] = ()
    gguf: bool = False
    slow: bool = False
    python: tuple[int, int] = (3, 10)
    absent: str | None = None

    def missing(self, model: Path) -> str | None:
        """Why it cannot run here, as a sentence for the user; None if it can."""
        if sys.version_info < self.python:
            return f"needs Python {self.python[0]}.{self.python[1]} or newer"
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if absent:
            return f"not installed ({', '.join(absent)}); install it with: pip install 'edgespec[bench]'"
        if self.gguf and model.suffix != ".gguf":
            return "needs a .gguf file, and this model is not one"
        return self.absent


class Recorder:
    """Notes when how many tokens appeared. Make it right before the prompt is handed over."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._emissions: list[tuple[float, int]] = []

    def now(self) -> float:
        """Seconds since the prompt was handed over."""
        return time.perf_counter() - self._start

    def emit(self, count: int = 1, at: float | None = None) -> None:
        """`count` tokens appeared now, or at a moment that `now` gave."""
        if count:
            self._emissions.append((self.now() if at is None else at, count))

    def reply(self, token_ids: Sequence[int], stats: dict[str, Any] | None = None) -> dict[str, Any]:
        """The contender's answer in the form that the parent measures."""
        seconds = self.now()
        ids = [int(token) for token in token_ids]
        return {"token_ids": ids, "emissions": self._emissions, "seconds": seconds, "stats": stats or {}}

    def rounds(self) -> dict[str, Any]:
        """Statistics of an engine that emits once a round: the tokens of each round after the one with the prompt."""
        return {"round_tokens": [count for _, count in self._emissions[1:]]}
