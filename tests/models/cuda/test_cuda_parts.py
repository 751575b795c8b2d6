"""The draft's block on the device, and graphs that cannot be had."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from drafts.standalone import StandaloneDraft
from edgespec.models.cuda.graphs import Graphs
from tests.models.cuda.common import TOKENS, answer, load
from tests.models.cuda.scripted_capture import ScriptedCapture

# Guesses


@pytest.mark.parametrize("pending", [1, 2, 4])
def test_a_block_of_best_tokens(folders: list[Path], pending: int) -> None:
    decoder, other = load(folders[0]), load(folders[0])
    cache, twin = decoder.new_cache(), other.new_cache()
    for begin in (0, 20):  # the second block is a replay at another length
        decoder.forward(TOKENS[begin : begin + 20], cache, logits=0)
        other.forward(TOKENS[begin : begin + 20], twin, logits=0)
        made = decoder.guess(TOKENS[:pending], cache, 5, real=288)
        token = int(np.array(other.forward(TOKENS[:pending], twin, logits=1).logits)[0].argmax())
        wanted = [token]
        for _ in range(4):
            token = int(np.array(other.forward([token], twin).logits)[0].argmax())
            wanted.append(token)
        assert made is not None
        assert made.tokens == wanted
        assert made.rows is None
        assert cache.length == twin.length == begin + 20 + pending + 4
        cache.crop(begin + 20)
        twin.crop(begin + 20)
    assert decoder.guess(TOKENS[:5], cache, 2, real=288) is None  # a long absence is caught up otherwise


def test_drawn_tokens_are_where_their_own_rows_say(folders: list[Path]) -> None:
    decoder = load(folders[0])
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(20):
        uniforms = [float(u) for u in rng.random(3)]
        made = decoder.guess(TOKENS[:2], decoder.new_cache(), 3, real=280, temperature=0.7, uniforms=uniforms)
        assert made is not None
        assert made.rows is not None
        assert made.rows.shape == (3, 280)
        for token, row, uniform in zip(made.tokens, made.rows, uniforms):
            sums = np.cumsum(row.astype(np.float64))
            assert sums[token] - row[token] <= uniform * sums[-1] + 1e-12 <= sums[token] + 2e-12
            assert abs(sums[-1] - 1) < 1e-5
        seen.add(tuple(made.tokens))
    logits = np.array(decoder.forward(TOKENS[:2], decoder.new_cache(), logits=1).logits)[0, :280].astype(np.float64)
    law = np.exp((logits - logits.max()) / 0.7)
    assert np.allclose(made.rows[0], law / law.sum(), atol=1e-5)
    assert len(seen) > 1


def test_the_ends_of_the_uniform_numbers(folders: list[Path]) -> None:
    decoder = load(folders[0])
    for uniform in (0.0, 1 - 2**-53):
        made = decoder.guess([1], decoder.new_cache(), 1, real=280, temperature=0.01, uniforms=[uniform])
        assert made is not None
        assert made.rows is not None
        assert made.rows[0, made.tokens[0]] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_rows_are_never_guessed_and_damage_shows(folders: list[Path], temperature: float) -> None:
    decoder = load(folders[0])
    with torch.inference_mode():
        decoder.model.head.parts[0][285] = 1e4  # a padding row that would always win  # type: ignore[index]
    made = decoder.guess([1], decoder.new_cache(), 4, real=280, temperature=temperature, uniforms=[0.5] * 4)
    assert made is not None
    assert max(made.tokens) < 280
    assert min(made.tokens) >= 0
    with torch.inference_mode():
        decoder.model.norm.fill_(float("nan"))
    made = decoder.guess([1], decoder.new_cache(), 2, real=280, temperature=temperature, uniforms=[0.5] * 2)
    assert made is not None
    assert made.tokens == [-1, -1]


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_the_text_with_a_draft_that_guesses_at_once(folders: list[Path], gamma: int) -> None:
    plain = answer(load(folders[0]), folders[0], [], 0).result
    for which, least in ((0, 1.0), (1, 0.0)):  # the target's equal, and a stranger
        draft = StandaloneDraft("d", load(folders[which]), 280)
        made = answer(load(folders[0]), folders[0], [draft], gamma)
        assert made.result.token_ids == plain.token_ids
        assert made.stats.acceptance_rate is not None
        assert made.stats.acceptance_rate >= least
        assert made.stats.draft_share["d"] > 0


def test_sampling_with_a_draft_that_guesses_at_once(folders: list[Path]) -> None:
    """The rows that it drew from reach the rule: the target's equal is never rejected, a stranger often is."""
    rates = []
    for which in (0, 1):
        draft = StandaloneDraft("d", load(folders[which]), 280)
        made = answer(load(folders[0]), folders[0], [draft], 3, temperature=1.0, seed=4)
        rates.append(made.stats.acceptance_rate)
        again = StandaloneDraft("d", load(folders[which]), 280)
        twin = answer(load(folders[0]), folders[0], [again], 3, temperature=1.0, seed=4)
        assert made.result.token_ids == twin.result.token_ids
    assert rates[0] == 1.0
    assert rates[1] is not None
    assert rates[1] < 0.9


# Graphs


def test_what_was_prepared_is_not_captured_again(folders: list[Path]) -> None:
    """No round captures: neither for another length of text, block or number of slabs, nor for sampling."""
    decoder = load(folders[0])
    decoder.prepare_steps(range(1, 30))
    decoder.prepare_guesses(280, range(1, 9))
    made = decoder.graphs._capture.made  # type: ignore[union-attr]
    assert made == 16 + 2 * 8
    decoder.prepare_steps([1, 2])
    cache = decoder.new_cache()
    decoder.forward(TOKENS[:40], cache, logits=0)
    for gamma in (1, 3, 8):
        for temperature in (0.0, 0.8):
            block = decoder.guess([1, 2], cache, gamma, real=280, temperature=temperature, uniforms=[0.5] * gamma)
            assert block is not None
            assert len(block.tokens) == gamma
    assert decoder.guess([1], cache, 65, real=280) is None  # the caller then guesses token by token
    assert decoder.guess([1], cache, 17, real=280, temperature=0.5, uniforms=[0.5] * 17) is None
    plain = load(folders[0], graphs=False)
    for each in (decoder, plain):
        other = each.new_cache()
        each.forward(TOKENS[:5], other)
        rows = np.array(each.forward(TOKENS[5:9], other).logits)
    assert np.array_equal(np.array(decoder.forward(TOKENS[:4], decoder.new_cache()).logits).shape, rows.shape)
    assert decoder.graphs._capture.made == made  # type: ignore[union-attr]
    plain.prepare_steps([1])
    plain.prepare_guesses(280, range(1, 9))
    assert len(plain.graphs) == 0


def test_widths_between_take_the_next_graph(folders: list[Path]) -> None:
    """Also after tables were made for several sequences, which graphs of before do not read."""
    decoder, plain = load(folders[0]), load(folders[0], graphs=False)
    decoder.prepare_steps([1, 2])
    decoder.prepare_batch(4)
    made = decoder.graphs._capture.made  # type: ignore[union-attr]
    one, two = decoder.new_cache(60), plain.new_cache(60)
    for width in (20, 5, 1, 13, 3, 2, 16):  # to the very end of the capacity
        tokens = TOKENS[: min(width, 60 - one.length)]
        output, wanted = decoder.forward(tokens, one), plain.forward(tokens, two)
        assert np.allclose(np.array(output.logits), np.array(wanted.logits), rtol=1e-4, atol=1e-4)
    assert one.length == 60
    assert decoder.graphs._capture.made == made  # type: ignore[union-attr]


def test_without_graphs_everything_runs_with_one_warning(folders: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    decoder, plain = load(folders[0], graphs=False), load(folders[0], graphs=False)
    decoder.graphs = Graphs(ScriptedCapture(RuntimeError("operation not permitted when stream is capturing")))
    with caplog.at_level(logging.WARNING):
        for width in (3, 1, 2):
            a = decoder.forward(TOKENS[:width], decoder.new_cache())
            b = plain.forward(TOKENS[:width], plain.new_cache())
            assert np.array_equal(np.array(a.logits), np.array(b.logits))
    assert [record.getMessage() for record in caplog.records if "CUDA graphs are not used" in record.getMessage()]
    assert len(caplog.records) == 1
    assert not decoder.graphs.enabled


def test_memory_that_runs_out_in_a_capture_is_no_reason_to_go_without_graphs(folders: list[Path]) -> None:
    decoder = load(folders[0], graphs=False)
    decoder.graphs = Graphs(ScriptedCapture(RuntimeError("CUDA error: out of memory")))
    cache = decoder.new_cache()
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.forward([1], cache)
    assert decoder.graphs.enabled
    assert cache.length == 0
