"""Logits that stay on the device until somebody looks at them.

A greedy round needs the best id of each row, a few bytes; the rows themselves (half a megabyte each) only where
processors, log probabilities or sampling ask for them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

FloatArray = npt.NDArray[np.float32]


class DeviceLogits:
    """Looks like float32 [k, vocab_rows]; fetched at the first look, the best ids apart from the rows.

    Valid until the next forward, which writes the same tensors.
    """

    dtype = np.dtype(np.float32)
    ndim = 2

    def __init__(self, rows: Tensor, best: Tensor) -> None:
        """rows: [k, vocab_rows] on the device; best: float64 [k, 2], id and logit of each row's maximum."""
        self._rows = rows
        self._best = best
        self._fetched: FloatArray | None = None
        self._fetched_best: npt.NDArray[np.float64] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return int(self._rows.shape[0]), int(self._rows.shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def best(self, index: int) -> int | None:
        """The greedy choice of a row, the lowest id of equals; None if the row is damaged (NaN, +inf, all -inf)."""
        if self._fetched_best is None:
            self._fetched_best = self._best.cpu().numpy()
        token, logit = self._fetched_best[index]
        return int(token) if math.isfinite(logit) else None

    def __getitem__(self, index: Any) -> Any:
        return self._array()[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._array(), dtype=dtype or np.float32, copy=True if copy is None else copy)

    def _array(self) -> FloatArray:
        if self._fetched is None:
            self._fetched = self._rows.float().cpu().numpy()
        return self._fetched
