"""Tensors in pieces of some rows: the same numbers as in one, and the same refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.errors import ModelError
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize("quant", ["F32", "Q4_1", "Q8_0"])
def test_pieces_are_the_whole_in_rows(tmp_path: Path, quant: str) -> None:
    """Also of q and k of a llama GGUF file, whose row order is undone within each head."""
    with open_weights(write_tiny_gguf(tmp_path / "m.gguf", quant=quant)) as weights:
        for name in weights.names():
            pieces = list(weights.pieces(name, 300))
            assert len(pieces) > 1 or len(weights.shape(name)) == 1 or weights.shape(name)[0] <= 8
            np.testing.assert_array_equal(np.concatenate(pieces), weights.read(name))
            own = weights.quantised(name)
            if own is not None:
                parts = list(weights.quantised_pieces(name, 300))
                np.testing.assert_array_equal(np.concatenate([p.dequantise() for p in parts]), weights.read(name))


def test_pieces_see_a_tail_that_was_never_written(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    tensors = tiny_tensors(tiny_config())
    tensors["model.layers.1.mlp.up_proj.weight"][40:] = 0
    save_file(tensors, folder / "model.safetensors")
    with open_weights(folder) as weights, pytest.raises(ModelError, match=r"up_proj.weight ends with zeros only"):
        list(weights.pieces("model.layers.1.mlp.up_proj.weight", 256))
