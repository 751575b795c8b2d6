"""Rotary position tables for all supported scaling kinds."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edgespec.models.base import FloatArray
from edgespec.models.spec import ModelSpec, RopeSpec

DoubleArray = npt.NDArray[np.float64]


def rotary_tables(spec: ModelSpec, positions: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin of positions 0..positions-1: float32 [positions, head_dim / 2] each.

    Angles are computed in float64; the attention factor (yarn) is folded in. Half-split rotary: column i belongs to
    elements i and i + head_dim/2 of a head.
    """
    frequencies, attention_factor = inverse_frequencies(spec.rope, spec.head_dim)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return (
        (np.cos(angles) * attention_factor).astype(np.float32),
        (np.sin(angles) * attention_factor).astype(np.float32),
    )


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[DoubleArray, float]:
    """float64 [head_dim / 2] radians per position, and the factor for cos and sin."""
    base: DoubleArray = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim), _yarn_attention_factor(rope)
    if rope.kind == "factors":
        return base / np.asarray(rope.factors, np.float64), 1.0
    return base, 1.0


def _llama3(rope: RopeSpec, base: DoubleArray) -> DoubleArray:
    """Long waves are divided by the factor, short ones kept, those between are interpolated."""
    original = float(rope.original_max_positions or 0)
    waves = original * base / (2 * math.pi)  # full turns within the original context
    keep = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    middle = (1 - keep) * base / rope.factor + keep * base
    result: DoubleArray = np.where(waves < rope.low_freq_factor, base / rope.factor, middle)
    return np.where(waves > rope.high_freq_factor, base, result)


def _yarn(rope: RopeSpec, base: DoubleArray, head_dim: int) -> DoubleArray:
    """Blend of scaled and unscaled frequencies, by how often each turns within the original context."""

    def dimension(turns: float) -> float:
        original = float(rope.original_max_positions or 0)
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
