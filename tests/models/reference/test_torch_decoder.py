"""What is particular to the torch reference: buffers that grow, prompts in pieces, and how it is chosen."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.errors import ConfigError, ModelError
from edgespec.models.base import Part
from edgespec.models.build import build_decoder
from edgespec.models.reference import decoder as torch_decoder
from edgespec.models.reference import layers as torch_layers
from edgespec.models.reference.decoder import GROWTH_STEP, TorchCache, TorchDecoder
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 288, 400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with both kinds of layers and 1024 positions."""
    return write_tiny(
        tmp_path_factory.mktemp("torch") / "model",
        "qwen3",
        max_position_embeddings=1024,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        head_dim=16,
    )


def load(folder: Path, **options: Any) -> TorchDecoder:
    with open_weights(folder) as weights:
        return TorchDecoder(weights, **options)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> TorchDecoder:
    return load(folder)


def logits(decoder: TorchDecoder, cache: TorchCache, tokens: list[int]) -> np.ndarray:
    return np.array(decoder.forward(tokens, cache).logits)


def tensors_alive() -> int:
    gc.collect()
    return sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor))


def test_buffers_stay_where_they_are_within_a_growth_step(decoder: TorchDecoder) -> None:
    cache = decoder.new_cache()
    decoder.forward(TOKENS[:10], cache)
    addresses = cache.keys.data_ptr(), cache.values.data_ptr()
    alive = tensors_alive()
    for begin in range(10, GROWTH_STEP - 8, 2):
        decoder.forward(TOKENS[begin : begin + 8], cache, hidden=True)
        cache.crop(begin + 2)
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == addresses
    assert cache.allocated == GROWTH_STEP
    assert tensors_alive() == alive


def test_growth_keeps_what_is_held_and_ends_at_the_capacity(decoder: TorchDecoder) -> None:
    whole = logits(decoder, decoder.new_cache(), TOKENS)
    cache = decoder.new_cache(capacity=390)
    first = logits(decoder, cache, TOKENS[:250])
    assert cache.allocated == GROWTH_STEP
    second = logits(decoder, cache, TOKENS[250:260])
    assert cache.allocated == 390
    third = logits(decoder, cache, TOKENS[260:390])
    np.testing.assert_allclose(np.concatenate([first, second, third]), whole[:390], atol=1e-4)
    with pytest.raises(ModelError):
        decoder.forward(TOKENS[:1], cache)


def test_a_length_that_was_set_has_room_too(decoder: TorchDecoder) -> None:
    """As serving does, which measures forwards behind positions of anything."""
    cache = decoder.new_cache()
    cache.length = 700
    assert decoder.forward(TOKENS[:1], cache).logits.shape == (1, 288)
    assert (cache.length, cache.allocated) == (701, 768)


def test_a_long_prompt_in_pieces_equals_one_piece(decoder: TorchDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decoder.forward(TOKENS, decoder.new_cache(), hidden=True)
    monkeypatch.setattr(torch_decoder, "PREFILL_PIECE", 64)
    assert whole.hidden is not None
    for count in (1, 16, 17, 100, 400):
        pieces = decoder.forward(TOKENS, decoder.new_cache(), logits=count, hidden=count == 17)
        np.testing.assert_allclose(pieces.logits, whole.logits[-count:], atol=1e-4)
        assert (pieces.hidden is None) == (count != 17)
        if pieces.hidden is not None:
            np.testing.assert_allclose(pieces.hidden, whole.hidden, atol=1e-4)


def test_a_failure_inside_leaves_the_cache_as_it_was(decoder: TorchDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(decoder, decoder.new_cache(), TOKENS[:10])
    cache = decoder.new_cache()
    logits(decoder, cache, TOKENS[:6])
    calls = iter(range(10))

    def failing(x: torch.Tensor, layer: Any) -> torch.Tensor:
        if next(calls) == 1:  # in the second layer, when the first has already written its keys
            raise RuntimeError("out of memory")
        return x

    with monkeypatch.context() as patch:
        patch.setattr(torch_decoder, "mlp", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.forward(TOKENS[20:30], cache)
    assert cache.length == 6
    np.testing.assert_allclose(logits(decoder, cache, TOKENS[6:10]), expected[6:], atol=1e-4)


def test_calls_from_several_threads_run_one_at_a_time(decoder: TorchDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(decoder, decoder.new_cache(), TOKENS[:1] * 12)
    cache, inside, original = decoder.new_cache(), [], torch_layers.mlp

    def slow(x: torch.Tensor, layer: Any) -> torch.Tensor:
        inside.append(1)
        time.sleep(0.002)
        assert len(inside) == 1
        inside.clear()
        return original(x, layer)

    monkeypatch.setattr(torch_decoder, "mlp", slow)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: logits(decoder, cache, TOKENS[:1]), range(12)))
    assert cache.length == 12
    for row in expected:  # one cache, the same token 12 times: every position was computed by some thread
        assert min(float(np.abs(result - row).max()) for result in results) < 1e-4


def test_every_tensor_is_read_once_and_none_is_kept_twice(folder: Path) -> None:
    with open_weights(folder) as weights:
        names, parameters = list(weights.names()), sum(int(np.prod(weights.shape(n))) for n in weights.names())
        read, original = [], weights.read

        def spy(name: str) -> np.ndarray:
            read.append((name, original(name)))
            return read[-1][1]

        weights.read = spy  # type: ignore[method-assign]
        decoder = TorchDecoder(weights)
    assert sorted(name for name, _ in read) == sorted(names)
    assert decoder.nbytes == 4 * parameters
    assert decoder._embedding.data_ptr() == dict(read)["model.embed_tokens.weight"].ctypes.data


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    decoder = load(write_tiny(tmp_path / "tied", tie_word_embeddings=True))
    untied = load(write_tiny(tmp_path / "untied"))
    assert decoder._head is decoder._embedding
    assert untied.nbytes - decoder.nbytes == 288 * 32 * 4


def test_capacities(folder: Path, decoder: TorchDecoder) -> None:
    assert decoder.new_cache().capacity == 1024
    assert decoder.new_cache(5000).capacity == 1024
    assert load(folder, positions=5000).new_cache().capacity == 1024
    assert load(folder, positions=100).new_cache().capacity == 100
    assert load(folder, positions=100).new_cache(200).capacity == 100


def test_results_outlive_the_next_step(decoder: TorchDecoder) -> None:
    cache = decoder.new_cache()
    output = decoder.forward(TOKENS[:4], cache)
    before = output.logits.copy()
    decoder.forward(TOKENS[4:8], cache)
    np.testing.assert_array_equal(output.logits, before)


@pytest.mark.parametrize("device", ["torch", "torch-cpu"])
@pytest.mark.parametrize("weight_format", ["exact", "float32"])
def test_build_chooses_torch(folder: Path, device: str, weight_format: str) -> None:
    with open_weights(folder) as weights:
        decoder = build_decoder(weights, device=device, weight_format=weight_format, positions=100)
    assert isinstance(decoder, TorchDecoder)
    assert decoder.weight_format == "float32"
    assert decoder.new_cache().capacity == 100


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "torch", "weight_format": "int8"}, "int8"),
        ({"device": "tpu"}, "tpu"),
        pytest.param(
            {"device": "cuda"},
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_build_refuses_what_cannot_be(folder: Path, options: dict[str, Any], match: str) -> None:
    with open_weights(folder) as weights, pytest.raises(ConfigError, match=match):
        build_decoder(weights, **options)


def test_threads_are_passed_on(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        with open_weights(folder) as weights:
            build_decoder(weights, device="torch", threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_build_does_not_import_torch() -> None:
    code = "import sys, edgespec.models.build; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_without_torch_the_message_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "edgespec.models.reference.decoder")
    monkeypatch.setitem(sys.modules, "torch", None)
    with open_weights(folder) as weights, pytest.raises(ConfigError, match="torch"):
        build_decoder(weights, device="torch")


def test_a_batch_runs_one_after_the_other(decoder: TorchDecoder) -> None:
    assert (decoder.batch_slots, decoder.prepare_batch(8)) == (1, 0)
    caches, alone = [decoder.new_cache() for _ in range(3)], [decoder.new_cache() for _ in range(3)]
    for widths in ((5, 1, 9), (1, 2, 1)):
        parts = [Part(TOKENS[:width], cache, 1, True) for width, cache in zip(widths, caches)]
        for part, output, cache in zip(parts, decoder.forward_batch(parts), alone):
            expected = decoder.forward(part.tokens, cache, logits=1, hidden=True)
            np.testing.assert_array_equal(output.logits, expected.logits)
            np.testing.assert_array_equal(output.hidden, expected.hidden)
    assert [cache.length for cache in caches] == [6, 3, 10]


def test_a_batch_that_fails_half_way_leaves_every_cache_as_it_was(
    decoder: TorchDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [decoder.new_cache() for _ in range(2)]
    decoder.forward_batch([Part([1, 2, 3], cache) for cache in caches])
    forward, calls = decoder.forward, itertools.count()

    def failing(*given: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return forward(*given, **options)

    monkeypatch.setattr(decoder, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.forward_batch([Part([4], cache) for cache in caches])
    assert [cache.length for cache in caches] == [3, 3]
