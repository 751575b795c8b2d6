"""What only a CUDA device can show: real graphs, a side stream, slabs that are allocations of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from drafts.standalone import StandaloneDraft
from edgespec.models.cuda import kv
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.slots import refill
from edgespec.models.weights.opening import open_weights
from tests.models.cuda.common import TOKENS, answer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG = TOKENS * 5  # over two of the small slabs


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kv, "SLAB_POSITIONS", 128)
    yield
    torch.cuda.empty_cache()


def load(folder: Path, *, graphs: bool = True) -> CudaDecoder:
    with open_weights(folder) as weights:
        return CudaDecoder(weights, device="cuda", graphs=graphs)


def rows(decoder: CudaDecoder, tokens: list[int], prompt: list[int]) -> np.ndarray:
    cache = decoder.new_cache()
    decoder.forward(prompt, cache, logits=0)
    return np.array(decoder.forward(tokens, cache).logits)


def test_graphs_compute_what_their_kernels_do_at_every_length(folders: list[Path]) -> None:
    captured, plain = load(folders[0]), load(folders[0], graphs=False)
    captured.prepare_steps(range(1, 6))
    count = len(captured.graphs)
    for prompt in (LONG[:3], LONG[:70], LONG[:200]):
        for width in (1, 4, 9):
            assert np.array_equal(rows(captured, TOKENS[:width], prompt), rows(plain, TOKENS[:width], prompt))
    assert captured.graphs.enabled
    assert len(captured.graphs) == count
    assert len(captured.pool.slabs) > 1


def test_a_row_has_the_same_bits_alone_and_in_a_block(folders: list[Path]) -> None:
    decoder = load(folders[0])
    together, cache = rows(decoder, TOKENS[:7], LONG[:90]), decoder.new_cache()
    decoder.forward(LONG[:90], cache, logits=0)
    alone = [np.array(decoder.forward([token], cache).logits)[0] for token in TOKENS[:7]]
    assert np.array_equal(np.stack(alone), together)


def test_blocks_of_guesses_are_those_of_steps(folders: list[Path]) -> None:
    decoder, plain = load(folders[0]), load(folders[0], graphs=False)
    decoder.prepare_guesses(280, range(1, 9))
    count = len(decoder.graphs)
    for temperature in (0.0, 0.9):
        blocks = []
        for each in (decoder, plain):
            cache = each.new_cache()
            each.forward(LONG[:100], cache, logits=0)
            blocks.append(each.guess([5, 6], cache, 6, real=280, temperature=temperature, uniforms=[0.3] * 6))
        first, second = blocks
        assert first is not None
        assert second is not None
        assert first.tokens == second.tokens
    assert len(decoder.graphs) == count


def test_weights_are_replaced_under_the_graphs(folders: list[Path]) -> None:
    decoder, other = load(folders[0]), load(folders[1], graphs=False)
    before = rows(decoder, TOKENS[:3], LONG[:20])
    with open_weights(folders[1]) as weights:
        refill(decoder, weights)
    after = rows(decoder, TOKENS[:3], LONG[:20])
    assert np.array_equal(after, rows(other, TOKENS[:3], LONG[:20]))
    assert not np.array_equal(after, before)


def test_texts_go_on_after_their_blocks_were_moved(folders: list[Path]) -> None:
    decoder, plain = load(folders[0]), load(folders[0], graphs=False)
    decoder.prepare_steps([1])
    gone, cache, twin = decoder.new_cache(), decoder.new_cache(), plain.new_cache()
    for begin in range(0, 200, 50):  # in turns, so that each has blocks in every slab
        for each, own in ((decoder, gone), (decoder, cache), (plain, twin)):
            each.forward(LONG[begin : begin + 50], own, logits=0)
    gone.release()
    assert len(decoder.pool.slabs) == 5
    decoder.trim()
    assert len(decoder.pool.slabs) == 3
    for token in TOKENS[:5]:
        rows = [np.array(each.forward([token], own).logits) for each, own in ((decoder, cache), (plain, twin))]
        assert np.array_equal(*rows)


def test_a_round_is_looked_at_once_and_its_text_is_the_plain_one(folders: list[Path], looked: list[int]) -> None:
    """A draft that is the target's equal, and a stranger; and the device knows how long their blocks took."""
    for which in (0, 1):
        target, draft = load(folders[0]), StandaloneDraft("d", load(folders[which]), 280)
        target.prepare_steps(range(1, 5))
        plain = answer(target, folders[0], [], 0).result.token_ids
        looked.clear()
        made = answer(target, folders[0], [draft], 3)
        assert made.result.token_ids == plain
        assert len(looked) == made.stats.rounds + 1  # and the prompt's last row
        assert made.stats.draft_share["d"] > 0
        assert made.stats.draft_seconds > 0
        assert made.stats.target_seconds > 0
    assert draft.decoder is not None
    assert draft.decoder.device == torch.zeros(1, device="cuda").device  # type: ignore[attr-defined]


def test_all_memory_comes_back(folders: list[Path]) -> None:
    left = []
    for _ in range(2):  # libraries keep what they took the first time
        decoder = load(folders[0])
        decoder.prepare_steps(range(1, 4))
        decoder.prepare_guesses(280, range(1, 9))
        rows(decoder, TOKENS[:3], LONG[:150])
        decoder.close()
        del decoder
        torch.cuda.synchronize()
        left.append(torch.cuda.memory_allocated())
    assert left[1] <= left[0]
