"""The temperature found is the one that made the data, and a calibrated confidence is a chance."""

from __future__ import annotations

import numpy as np
import pytest

from drafts.train.calibrate import TEMPERATURES, calibrate, log_losses, top_chances


def batches(true: float, count: int = 20000, seed: int = 0):
    """Logits whose best token is right with the probability that they give it at temperature `true`."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        logits = (rng.standard_normal((count // 4, 12)) * 2).astype(np.float32)
        chances = np.exp(logits.astype(np.float64) / true)
        top = chances.max(-1) / chances.sum(-1)
        yield logits, rng.random(len(top)) < top


@pytest.mark.parametrize("true", [0.5, 1.0, 2.0])
def test_the_true_temperature_is_found(true: float) -> None:
    found = calibrate(batches(true))
    assert abs(np.log(found.temperature / true)) < 0.08
    assert found.after < 0.02
    assert found.positions == 20000
    if true != 1.0:
        assert found.before > 3 * found.after


def test_nothing_to_calibrate_on_leaves_the_logits_alone() -> None:
    found = calibrate([])
    assert (found.temperature, found.before, found.after, found.positions) == (1.0, 0.0, 0.0, 0)
    assert calibrate([(np.zeros((0, 4), np.float32), np.zeros(0, bool))]).temperature == 1.0


def test_chances_are_softmax_and_losses_the_mean_log_loss() -> None:
    logits = np.array([[1.0, 3.0, 2.0], [-1e4, 0.0, 1e4]], np.float32)
    table = top_chances(logits)
    one = len(TEMPERATURES) // 2
    assert TEMPERATURES[one] == pytest.approx(1.0)
    assert table[0, one] == pytest.approx(np.exp(3) / (np.exp(1) + np.exp(2) + np.exp(3)), rel=1e-5)
    assert table[1, one] == 1.0
    losses = log_losses(np.array([[0.8], [0.4]]), np.array([True, False]))
    assert losses[0] == pytest.approx(-(np.log(0.8) + np.log(0.6)) / 2)
