"""Both engines against transformers' own classes on tiny random models, however the tokens are fed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache as memoize
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelError
from edgespec.models.base import Decoder, KVCache
from tests.support.engines import ENGINES, Reference, load, reference
from tests.support.tiny import write_tiny

TOLERANCE = 1e-4
WINDOW = 8
TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 288, 60)]
OTHERS = [int(t) for t in np.random.default_rng(8).integers(0, 288, 30)]

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
MIXED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

# TOKENS (60) is longer than the window (8) and than the original positions (32) of the scaled rotary embeddings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-sharing": ("llama", {"num_key_value_heads": 4}),
    "llama-default-head-dim": ("llama", {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama-theta": ("llama", {"rope_theta": 500.0}),
    "llama-epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "llama-linear": ("llama", {"rope_scaling": LINEAR}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-new-config-form": ("llama", {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "mistral-window-tied": ("mistral", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-switched-off": ("qwen2", {"use_sliding_window": False, "sliding_window": WINDOW}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}),
    "qwen2-mixed-windows": ("qwen2", MIXED),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32}),
    "qwen3-mixed-windows": ("qwen3", MIXED),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3-yarn": ("qwen3", {"rope_scaling": YARN}),
}
# The ways of feeding are tried where they can differ: without a window, with one, with both kinds, scaled.
FEEDING = ["llama", "mistral-window", "qwen3-mixed-windows", "qwen2-yarn"]
# Features that must change the result; else the comparison above would prove nothing about them.
VISIBLE = {
    "llama-theta": "llama",
    "llama-epsilon": "llama",
    "llama-linear": "llama",
    "llama-llama3": "llama",
    "llama-yarn": "llama",
    "llama-new-config-form": "llama-llama3",
    "mistral-window": "mistral",
    "qwen2-window": "qwen2",
    "qwen2-mixed-windows": "qwen2-window",
    "qwen2-yarn": "qwen2",
    "qwen3-mixed-windows": "qwen3",
    "qwen3-layer-types": "qwen3-mixed-windows",
    "qwen3-yarn": "qwen3",
}

Tiny = Callable[[str], tuple[Path, Reference]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Folder and reference (over TOKENS) of a case, made once."""

    @memoize
    def make(case: str) -> tuple[Path, Reference]:
        architecture, changes = CASES[case]
        folder = write_tiny(tmp_path_factory.mktemp("models") / case, architecture, **{"head_dim": 16, **changes})
        return folder, reference(folder, TOKENS)

    return make


@pytest.fixture(scope="module")
def decoder(tiny: Tiny) -> Callable[[str, str], Decoder]:
    """A loaded decoder of a case on an engine, made once."""
    return memoize(lambda case, engine: load(tiny(case)[0], engine))


def rows(decoder: Decoder, cache: KVCache, tokens: list[int]) -> np.ndarray:
    """Logits of all `tokens`, copied (they may be views of the engine's buffers)."""
    return np.array(decoder.forward(tokens, cache).logits)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    assert float(np.abs(actual - expected).max()) <= TOLERANCE


def refusal_at_load(folder: Path, engine: str) -> str | None:
    try:
        load(folder, engine).close()
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_hidden_states_equal_transformers(tiny: Tiny, case: str, engine: str) -> None:
    folder, expected = tiny(case)
    decoder = load(folder, engine)
    output = decoder.forward(TOKENS, decoder.new_cache(), hidden=True)
    assert output.hidden is not None
    assert_close(output.hidden, expected.hidden)
    assert_close(output.logits, expected.logits)
    decoder.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("head_dim", [2, 8, 20])
def test_an_odd_head_size_runs_right_or_is_refused_at_load(tmp_path: Path, head_dim: int, engine: str) -> None:
    folder = write_tiny(tmp_path / "narrow", head_dim=head_dim)
    if refusal := refusal_at_load(folder, engine):
        assert engine != "torch"
        assert "head" in refusal
        return
    model = load(folder, engine)
    assert_close(rows(model, model.new_cache(), TOKENS), reference(folder, TOKENS).logits)


@pytest.mark.parametrize(("case", "base"), VISIBLE.items())
def test_the_cases_are_different_models(tiny: Tiny, case: str, base: str) -> None:
    difference = np.abs(tiny(case)[1].logits - tiny(base)[1].logits).max()
    assert difference > 100 * TOLERANCE


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", FEEDING)
@pytest.mark.parametrize("pieces", ["one by one", "random", "long then short"])
def test_any_division_of_the_prompt_gives_the_same(
    tiny: Tiny, decoder: Any, case: str, engine: str, pieces: str
) -> None:
    random = np.random.default_rng(3).integers(1, 9, 60).tolist()
    sizes = {"one by one": [1] * 60, "random": random, "long then short": [50, 7, 2, 1]}[pieces]
    model = decoder(case, engine)
    cache, parts, begin = model.new_cache(), [], 0
    for size in sizes:
        if begin < len(TOKENS):
            parts.append(rows(model, cache, TOKENS[begin : begin + size]))
            begin += len(parts[-1])
            assert cache.length == begin
    assert_close(np.concatenate(parts), tiny(case)[1].logits)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", FEEDING)
def test_rollback_leaves_no_trace(decoder: Any, case: str, engine: str) -> None:
    model = decoder(case, engine)
    held, beyond = TOKENS[:40], OTHERS[:12]
    # Around the window's edge, inside it from the end, everything, nothing.
    for keep in (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 32, 33, 39, 40):
        cache = model.new_cache()
        rows(model, cache, held)
        assert cache.crop(keep) == len(held) - keep
        assert cache.length == keep
        fresh = model.new_cache()
        expected = rows(model, fresh, held[:keep] + beyond)[keep:]
        assert_close(rows(model, cache, beyond[:5]), expected[:5])
        assert_close(rows(model, cache, beyond[5:]), expected[5:])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["llama", "mistral-window"])
def test_speculative_rounds_equal_plain_steps(tiny: Tiny, decoder: Any, case: str, engine: str) -> None:
    """Blocks with wrong tails, cropped to what was right, as a decoding loop does it."""
    model, rng = decoder(case, engine), np.random.default_rng(5)
    cache, parts = model.new_cache(), []
    while cache.length < len(TOKENS):
        start = cache.length
        right = TOKENS[start : start + int(rng.integers(1, 5))]
        wrong = rng.integers(0, 288, int(rng.integers(0, 5))).tolist()
        parts.append(rows(model, cache, right + wrong)[: len(right)])
        cache.crop(start + len(right))
    assert_close(np.concatenate(parts), tiny(case)[1].logits)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_caches_do_not_disturb_each_other(decoder: Any, engine: str) -> None:
    model = decoder("mistral-window", engine)
    texts = [TOKENS[:20], OTHERS[:20]]
    alone = [rows(model, model.new_cache(), text) for text in texts]
    caches = [model.new_cache(), model.new_cache(capacity=30)]
    for begin in range(0, 20, 5):
        for text, cache, expected in zip(texts, caches, alone):
            assert_close(rows(model, cache, text[begin : begin + 5]), expected[begin : begin + 5])
        caches[begin % 2].crop(begin + 5)


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_take_turns(decoder: Any, engine: str) -> None:
    model = decoder("llama", engine)
    expected = rows(model, model.new_cache(), TOKENS)
    results: dict[int, np.ndarray] = {}

    def work(index: int) -> None:
        cache = model.new_cache()
        parts = [rows(model, cache, TOKENS[i : i + 1 + index]) for i in range(0, len(TOKENS), 1 + index)]
        results[index] = np.concatenate(parts)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 4
    for result in results.values():
        assert_close(result, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_what_is_asked_for_comes_back(tiny: Tiny, decoder: Any, engine: str) -> None:
    model, expected = decoder("llama", engine), tiny("llama")[1]
    for count in (0, 1, 3, 10):
        cache = model.new_cache()
        output = model.forward(TOKENS[:10], cache, logits=count)
        assert output.hidden is None
        assert output.logits.shape == (count, 288)
        np.testing.assert_allclose(output.logits, expected.logits[10 - count : 10], atol=TOLERANCE)
    output = model.forward(TOKENS[:10], model.new_cache(), logits=0, hidden=True)
    assert output.logits.shape == (0, 288)
    assert_close(np.array(output.hidden), expected.hidden[:10])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_cache_refuses_and_stays_usable(decoder: Any, engine: str) -> None:
    model = decoder("mistral-window", engine)
    expected = rows(model, model.new_cache(), TOKENS[:10])
    cache = model.new_cache(capacity=10)
    assert cache.capacity == 10
    assert_close(rows(model, cache, TOKENS[:7]), expected[:7])
    with pytest.raises(ModelError, match="10"):
        model.forward(TOKENS[7:11], cache)
    assert cache.length == 7
    assert_close(rows(model, cache, TOKENS[7:10]), expected[7:])
    with pytest.raises(ModelError):
        model.forward([1], cache)
    assert cache.crop(4) == 6
    assert_close(rows(model, cache, TOKENS[4:10]), expected[4:])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_default_capacity_is_the_model_s_maximum(decoder: Any, engine: str) -> None:
    model = decoder("llama", engine)
    assert model.new_cache(1000).capacity == 256
    cache = model.new_cache()
    assert cache.capacity == 256
    text = [int(t) for t in np.random.default_rng(1).integers(0, 288, 256)]
    last = np.array(model.forward(text, cache, logits=1).logits)
    assert cache.length == 256
    with pytest.raises(ModelError):
        model.forward([1], cache)
    cache.crop(255)
    assert_close(rows(model, cache, text[255:]), last)


@pytest.mark.parametrize("engine", ENGINES)
def test_crop_says_how_many_it_dropped(decoder: Any, engine: str) -> None:
    model = decoder("llama", engine)
    cache = model.new_cache()
    rows(model, cache, TOKENS[:5])
    assert cache.crop(5) == 0
    assert cache.crop(0) == 5
    assert cache.nbytes == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_sizes_count_what_is_held(decoder: Any, engine: str) -> None:
    model = decoder("llama", engine)
    cache = model.new_cache()
    assert cache.nbytes == 0
    rows(model, cache, TOKENS[:5])
    one = cache.nbytes // 5
    assert one >= 2 * 2 * 2 * 16 * 2  # keys and values, 2 layers, 2 heads of 16, at least 2 bytes each
    rows(model, cache, TOKENS[5:11])
    assert cache.nbytes == 11 * one
    assert model.nbytes >= 2 * 288 * 32 * 4  # embedding and head alone
