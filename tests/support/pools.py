"""Tiny targets for KV pools: sizes, texts, and what a text gives alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.models.base import Decoder
from edgespec.models.onnx import mapped_memory
from edgespec.models.onnx.decoder import OnnxDecoder

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 512}
CONTEXT = 400
SIZE = 64  # positions of a block: 16 numbers of 4 bytes each are a page
BLOCK = SIZE * 2 * 2 * 2 * 16 * 4  # 2 layers, keys and values, 2 heads
needs_maps = pytest.mark.skipif(not mapped_memory.available(), reason="no files in memory on this system")


def ids_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 270, count).tolist()


def run(decoder: Decoder, cache: Any, ids: list[int], sizes: tuple[int, ...] = (50, 1, 3, 1, 70)) -> np.ndarray:
    """Append `ids` in pieces; logits of all of them."""
    out, at, turn = [], 0, 0
    while at < len(ids):
        piece = ids[at : at + sizes[turn % len(sizes)]]
        out.append(decoder.forward(piece, cache).logits.copy())
        at, turn = at + len(piece), turn + 1
    return np.concatenate(out)


def alone(decoder: Decoder, ids: list[int]) -> np.ndarray:
    """The logits of all of `ids` with a cache of its own."""
    return decoder.forward(ids, decoder.new_cache(CONTEXT)).logits.copy()


def same(decoder: Decoder, got: np.ndarray, wanted: np.ndarray) -> None:
    if isinstance(decoder, OnnxDecoder) and "avx512_vnni" in _flags():
        np.testing.assert_array_equal(got, wanted)
    else:
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def _flags() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""
