"""Single rows of the embedding and the LM head: those that the engine itself computes with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import ModelError
from edgespec.models.base import Decoder
from edgespec.models.onnx.decoder import OnnxDecoder
from edgespec.models.weights.opening import open_weights
from tests.support.engines import load
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

IDS = [287, 0, 5, 6, 7, 7, 100, 3]
FORMATS = [("torch", "float32"), ("cpu", "float32"), ("cpu", "exact"), ("cpu", "int8")]


def check(decoder: Decoder, path: Path, tolerance: float) -> None:
    """Against the file's own numbers, and against the logits that the engine makes of them."""
    with open_weights(path) as weights:
        embedding = weights.read("model.embed_tokens.weight")
        head = embedding if weights.spec.tie_embeddings else weights.read("lm_head.weight")
    for found, table in ((decoder.embed(IDS), embedding), (decoder.head_rows(IDS), head)):
        assert found.dtype == np.float32
        assert found.shape == (len(IDS), decoder.spec.hidden_size)
        assert np.abs(found - table[IDS]).max() <= tolerance
    output = decoder.forward([4, 5, 6], decoder.new_cache(), hidden=True)
    every = decoder.head_rows(range(decoder.spec.vocab_size))
    # Block products round the hidden state, not the rows.
    assert np.abs(output.hidden @ every.T - output.logits).max() < (1e-4 if tolerance == 0 else 0.05)


@pytest.mark.parametrize(("engine", "weight_format"), FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_those_of_the_file(tmp_path: Path, engine: str, weight_format: str, tied: bool) -> None:
    path = write_tiny(tmp_path, head_dim=16, tie_word_embeddings=tied)
    tolerance = 0.0 if weight_format == "float32" else 0.005
    check(load(path, engine, weight_format), path, tolerance)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_files_own_blocks_lose_nothing(tmp_path: Path, kind: str, tied: bool) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", quant=kind, head_dim=16, tie_word_embeddings=tied)
    decoder = load(path, "cpu", "exact")
    with open_weights(path) as weights:
        for name, found in (("model.embed_tokens.weight", decoder.embed), ("lm_head.weight", decoder.head_rows)):
            name = "model.embed_tokens.weight" if tied else name
            assert weights.kind(name) == kind
            assert np.abs(found(IDS) - weights.read(name)[IDS]).max() < 1e-6


@pytest.mark.parametrize("weight_format", ["float32", "exact"])
def test_a_graph_that_was_cut_is_an_error_message(tmp_path: Path, weight_format: str) -> None:
    path = write_tiny(tmp_path / "model", head_dim=16, vocab_size=2048)
    with open_weights(path) as weights:
        decoder = OnnxDecoder(weights, weight_format=weight_format, threads=1, cache_dir=tmp_path / "graphs")
    (file,) = (tmp_path / "graphs").glob("*/weights.bin")
    decoder.embed([0])  # opened before it is cut
    content = file.read_bytes()
    file.unlink()  # what ONNX Runtime has mapped must stay whole
    file.write_bytes(content[:4096])
    with pytest.raises(ModelError, match=r"weights\.bin: rows of .* incomplete"):
        decoder.head_rows([2000])
