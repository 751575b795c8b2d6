"""The temperature at which a draft's top-1 probability is its chance of being right.

One number divides the logits (temperature scaling, Guo et al. 2017, arXiv 1706.04599); it is chosen by the log loss of
"this token is accepted" on held-out text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafts.evaluate import calibration_error

TEMPERATURES = np.geomspace(0.25, 4.0, 49)  # the middle one is 1
_TINY = 1e-6

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Calibration:
    """temperature: for the logits. before, after: expected calibration error at temperature 1 and at this one."""

    temperature: float
    before: float
    after: float
    positions: int


def calibrate(batches: Iterable[tuple[Floats, npt.NDArray[np.bool_]]]) -> Calibration:
    """From batches of (logits [n, V], whether the best one was accepted [n]); only sums over them are kept.

    Without any position the temperature is 1 and the errors are 0.
    """
    chances, right = [], []
    for logits, accepted in batches:
        chances.append(top_chances(logits))
        right.append(accepted)
    if not chances or not sum(map(len, right)):
        return Calibration(1.0, 0.0, 0.0, 0)
    table, hit = np.concatenate(chances), np.concatenate(right)
    place = int(np.argmin(log_losses(table, hit)))
    one = len(TEMPERATURES) // 2
    before, after = (calibration_error(zip(table[:, i].clip(0, 1), hit)) or 0.0 for i in (one, place))
    return Calibration(float(TEMPERATURES[place]), before, after, len(hit))


def top_chances(logits: Floats) -> npt.NDArray[np.float32]:
    """Top-1 probabilities of logits [n, V] at every one of TEMPERATURES: float32 [n, temperatures]."""
    below = np.asarray(logits, np.float32)
    below = below - below.max(-1, keepdims=True)
    columns = [1.0 / np.exp(below * np.float32(1 / t)).sum(-1) for t in TEMPERATURES]
    return np.stack(columns, -1).astype(np.float32)


def log_losses(chances: Floats, hit: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Mean log loss [k] of each column of chances [n, k] as the chance that hit [n] is true."""
    p = np.clip(np.asarray(chances, np.float64), _TINY, 1 - _TINY)
    losses: npt.NDArray[np.float64] = -np.where(hit[:, None], np.log(p), np.log1p(-p)).mean(0)
    return losses
