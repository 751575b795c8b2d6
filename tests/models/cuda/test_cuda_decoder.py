"""The CUDA engine's forward on the CPU, where its kernels are their torch references: against the float32 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.models.base import Part
from edgespec.models.cuda import kv
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.reference.decoder import TorchDecoder
from edgespec.models.weights.opening import open_weights
from tests.models.cuda.scripted_capture import ScriptedCapture
from tests.support.tiny import write_tiny

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 288, 400)]
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "head_dim": 16}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes: dict[str, Any] = {"max_position_embeddings": 1024}
    if request.param == "qwen3":
        changes |= WINDOWED
    if request.param == "qwen2":
        changes["tie_word_embeddings"] = True
    return write_tiny(tmp_path_factory.mktemp("cuda") / "model", request.param, **changes)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "SLAB_POSITIONS", 128)


def load(folder: Path, **options: Any) -> CudaDecoder:
    with open_weights(folder) as weights:
        return CudaDecoder(weights, device="cpu", **options)


def reference(folder: Path) -> TorchDecoder:
    with open_weights(folder) as weights:
        return TorchDecoder(weights)


def captured(folder: Path) -> tuple[CudaDecoder, ScriptedCapture]:
    """A decoder whose steps are replayed as graphs would be."""
    decoder, capture = load(folder), ScriptedCapture()
    decoder.graphs._capture = capture
    return decoder, capture


@pytest.mark.parametrize("graphs", [False, True])
def test_every_width_equals_the_reference(folder: Path, graphs: bool, small_slabs: None) -> None:
    wanted, (decoder, _) = reference(folder), captured(folder) if graphs else (load(folder), None)
    one, two = wanted.new_cache(), decoder.new_cache()
    begin = 0
    for width in (70, 1, 2, 3, 16, 17, 1, 9, 130, 1, 1, 2):
        tokens = TOKENS[begin : begin + width]
        a, b = wanted.forward(tokens, one, hidden=True), decoder.forward(tokens, two, hidden=True)
        assert np.allclose(np.array(b.logits), a.logits, rtol=1e-4, atol=1e-4)
        assert b.hidden is not None
        assert a.hidden is not None
        assert np.allclose(b.hidden, a.hidden, rtol=1e-4, atol=1e-4)
        cut = begin + width - width // 3  # some of it was rejected
        assert two.crop(cut) == one.crop(cut)
        begin = cut
    assert len(decoder.pool.slabs) > 1  # it grew on the way, and nothing was copied


def test_a_graph_serves_every_length_and_sequence(folder: Path) -> None:
    decoder, capture = captured(folder)
    plain = load(folder)
    for count in (3, 100):
        one, two = decoder.new_cache(), plain.new_cache()
        decoder.forward(TOKENS[:count], one, logits=0)
        plain.forward(TOKENS[:count], two, logits=0)
        for token in TOKENS[count : count + 3]:
            a, b = decoder.forward([token], one), plain.forward([token], two)
            assert np.array_equal(np.array(a.logits), np.array(b.logits))
    assert capture.made == 2  # widths 3 and 1


def test_a_batch_equals_its_parts_alone(folder: Path, small_slabs: None) -> None:
    decoder, _ = captured(folder)
    decoder.prepare_batch(4)
    alone = load(folder)
    lengths, widths = (5, 60, 33), (1, 3, 40)
    caches = [decoder.new_cache(200) for _ in lengths]
    others = [alone.new_cache(200) for _ in lengths]
    for at in range(3):
        for model, each in ((decoder, caches), (alone, others)):
            model.forward(TOKENS[at : at + lengths[at]], each[at], logits=0)
    for _ in range(2):
        parts = [Part(TOKENS[100 : 100 + width], cache, 1, True) for width, cache in zip(widths, caches)]
        for output, part, other in zip(decoder.forward_batch(parts), parts, others):
            wanted = alone.forward(part.tokens, other, logits=1, hidden=True)
            assert np.allclose(np.array(output.logits), np.array(wanted.logits), rtol=1e-4, atol=1e-4)
            assert output.hidden is not None
            assert output.hidden.shape == (len(part.tokens), decoder.spec.hidden_size)
            assert np.allclose(output.hidden, wanted.hidden, rtol=1e-4, atol=1e-4)
        assert [cache.length for cache in caches] == [other.length for other in others]


def test_more_parts_than_a_forward_takes_keep_their_own_rows(folder: Path) -> None:
    decoder, _ = captured(folder)
    caches = [decoder.new_cache(20) for _ in range(3)]
    outputs = decoder.forward_batch([Part([token], cache) for token, cache in zip((5, 6, 7), caches)])
    alone = [np.array(decoder.forward([token], decoder.new_cache(20)).logits) for token in (5, 6, 7)]
    for output, wanted in zip(outputs, alone):
        assert np.array_equal(np.array(output.logits), wanted)


def test_the_end_of_the_capacity(folder: Path) -> None:
    """The last positions of a sequence in a batch whose shape is wider than what is left."""
    decoder = load(folder)
    decoder.prepare_batch(2)
    short, long = decoder.new_cache(10), decoder.new_cache(100)
    decoder.forward(TOKENS[:9], short, logits=0)
    decoder.forward(TOKENS[:9], long, logits=0)
    wanted = np.array(decoder.forward(TOKENS[20:21], long, logits=1).logits)
    long.crop(9)
    last, _ = decoder.forward_batch([Part(TOKENS[20:21], short), Part(TOKENS[30:38], long)])
    assert np.allclose(np.array(last.logits), wanted, rtol=1e-4, atol=1e-4)
    assert short.length == 10


def test_logits_stay_on_the_device_until_they_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load(folder)
    output = decoder.forward(TOKENS[:8], decoder.new_cache())
    logits: Any = output.logits
    monkeypatch.setattr(logits, "_array", lambda: pytest.fail("fetched"))
    best = [logits.best(row) for row in range(8)]
    assert logits.shape == (8, decoder.spec.vocab_size)
    assert len(logits) == 8
    monkeypatch.undo()
    assert best == np.argmax(np.array(logits), axis=-1).tolist()
    assert np.array_equal(logits[3], np.array(logits)[3])
    assert logits[2:4].shape == (2, decoder.spec.vocab_size)


def test_a_damaged_row_has_no_best_token(folder: Path) -> None:
    decoder = load(folder)
    with torch.inference_mode():
        decoder.model.norm.fill_(float("nan"))
    logits: Any = decoder.forward([1], decoder.new_cache()).logits
    assert logits.best(0) is None


def test_rows_of_the_tables(folder: Path) -> None:
    decoder, wanted = load(folder), reference(folder)
    assert np.array_equal(decoder.embed([3, 1]), wanted.embed([3, 1]))
    assert np.array_equal(decoder.head_rows([3, 1]), wanted.head_rows([3, 1]))


def test_blocks_come_back(folder: Path, small_slabs: None) -> None:
    decoder = load(folder)
    for _ in range(5):
        cache = decoder.new_cache(100)
        decoder.forward(TOKENS[:100], cache, logits=0)
        del cache
    assert len(decoder.pool.slabs) <= 2
