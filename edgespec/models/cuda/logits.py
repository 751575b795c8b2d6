"""What a step leaves on the device until somebody looks: its verdict on the guesses, and logits.

A greedy round needs the verdict, a few bytes; rows of logits (half a megabyte each) only where processors, log
probabilities or sampling ask for them.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgespec.kernels import ops
from edgespec.models.base import FloatArray
from edgespec.models.cuda import looks
from edgespec.models.cuda.guesses import DeviceTokens
from edgespec.models.cuda.looks import Stopwatch


class Verdict(NamedTuple):
    """accepted: guesses that stand by the greedy rule. token: what the target says next, None if its row is damaged."""

    accepted: int
    token: int | None


def judged(rows: Tensor, tokens: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """What `Judgement` looks at, int64 [S, 2 + 2 W]: accepted, next token, the W tokens, the W best tokens.

    rows [S * W, vocab_rows] are logits after tokens int64 [S * W]; begins and ends int64 [S], see `ops.accept_greedy`.
    """
    if not len(rows):
        return tokens.new_zeros((len(begins), 2))
    tokens = tokens.view(len(begins), -1)
    best = ops.best_tokens(rows).view_as(tokens)
    return torch.cat((ops.accept_greedy(best, tokens, begins, ends), tokens, best), dim=1)


class Judgement:
    """What the device found out about one step: one look, for all of its sequences."""

    def __init__(self, found: Tensor, watch: Stopwatch) -> None:
        """found: see `judged`; the next step writes over it, so the decoder calls `keep` first."""
        self._found: Tensor | npt.NDArray[np.int64] = found
        self._watch = watch
        self._kept = False
        self._lock = threading.Lock()

    def keep(self) -> None:
        with self._lock:
            if isinstance(self._found, Tensor) and not self._kept:
                self._found, self._kept = self._found.clone(), True

    def look(self) -> npt.NDArray[np.int64]:
        with self._lock:
            if isinstance(self._found, Tensor):
                self._found = looks.look(self._found)
            return self._found

    @property
    def seconds(self) -> float | None:
        """What the step took on the device, None if that is not known; after a look."""
        return self._watch.seconds


class DeviceLogits:
    """Looks like float32 [k, vocab_rows]; fetched at the first look, the verdict apart from the rows.

    The tensors behind it are written again by the next step, of whichever sequence. The decoder calls `keep` before
    that; the look of one thread and the step of another take turns here.
    """

    dtype = np.dtype(np.float32)
    ndim = 2

    def __init__(
        self,
        rows: Tensor,
        judgement: Judgement,
        *,
        sequence: int = 0,
        begin: int = 0,
        guesses: DeviceTokens | None = None,
    ) -> None:
        """rows: [k, vocab_rows] on the device. sequence, begin: which of the step's, and which of its rows comes first.

        guesses: the tokens of the last k - 1 rows; they arrive with the verdict.
        """
        self.shape = (int(rows.shape[0]), int(rows.shape[1]))
        self._rows: Tensor | FloatArray = rows
        self._judgement = judgement
        self._sequence, self._begin, self._guesses = sequence, begin, guesses
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shape[0]

    def keep(self) -> None:
        """Move what has not been fetched to memory of its own, on the device: launches only."""
        with self._lock, torch.inference_mode():
            if isinstance(self._rows, Tensor):
                self._rows = self._rows.clone()
            self._judgement.keep()

    def verdict(self) -> Verdict:
        """The greedy rule's, over the tokens that this part of the step was given; not if there are no rows."""
        found = self._look()
        return Verdict(int(found[0]), _usable(found[1]))

    def best(self, index: int) -> int | None:
        """The greedy choice of a row, the lowest id of equals; None if the row is damaged (NaN, +inf, all -inf)."""
        found = self._look()
        return _usable(found[2 + (len(found) - 2) // 2 + self._begin + index])

    def wait(self) -> Judgement:
        """Return when the step is over, with what was found out in it."""
        self._look()
        return self._judgement

    def _look(self) -> npt.NDArray[np.int64]:
        found = self._judgement.look()[self._sequence]
        if self._guesses is not None and not self._guesses.arrived:
            first = 2 + self._begin + 1
            self._guesses.arrive([int(token) for token in found[first : first + len(self._guesses)]])
        return found

    def __getitem__(self, index: Any) -> Any:
        return self._array()[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._array(), dtype=dtype or np.float32, copy=True if copy is None else copy)

    def _array(self) -> FloatArray:
        with self._lock:
            if isinstance(self._rows, Tensor):
                self._rows = looks.to_numpy(self._rows)
            return self._rows


def as_array(logits: DeviceLogits) -> FloatArray:
    """What callers index like an array."""
    return logits  # type: ignore[return-value]


def _usable(token: Any) -> int | None:
    return int(token) if token >= 0 else None
