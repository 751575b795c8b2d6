"""Logits that stay on the device until somebody looks at them.

A greedy round needs the best id of each row, a few bytes; the rows themselves (half a megabyte each) only where
processors, log probabilities or sampling ask for them.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FloatArray = npt.NDArray[np.float32]


class DeviceLogits:
    """Looks like float32 [k, vocab_rows]; fetched at the first look, the best ids apart from the rows.

    The tensors behind it are written again by the next step, of whichever sequence. The decoder calls `keep` before
    that; the look of one thread and the step of another take turns here.
    """

    dtype = np.dtype(np.float32)
    ndim = 2

    def __init__(self, rows: Tensor, best: Tensor) -> None:
        """rows: [k, vocab_rows] on the device; best: float64 [k, 2], id and logit of each row's maximum."""
        self.shape = (int(rows.shape[0]), int(rows.shape[1]))
        self._rows: Tensor | FloatArray = rows
        self._best: Tensor | npt.NDArray[np.float64] = best
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shape[0]

    def keep(self) -> None:
        """Move what has not been fetched to memory of its own, on the device: launches only."""
        with self._lock, torch.inference_mode():
            if isinstance(self._rows, Tensor):
                self._rows = self._rows.clone()
            if isinstance(self._best, Tensor):
                self._best = self._best.clone()

    def best(self, index: int) -> int | None:
        """The greedy choice of a row, the lowest id of equals; None if the row is damaged (NaN, +inf, all -inf)."""
        with self._lock:
            if isinstance(self._best, Tensor):
                self._best = self._best.to("cpu", copy=True).numpy()
            token, logit = self._best[index]
        return int(token) if math.isfinite(logit) else None

    def __getitem__(self, index: Any) -> Any:
        return self._array()[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._array(), dtype=dtype or np.float32, copy=True if copy is None else copy)

    def _array(self) -> FloatArray:
        with self._lock:
            if isinstance(self._rows, Tensor):
                self._rows = self._rows.float().to("cpu", copy=True).numpy()
            return self._rows
