"""The draft's block in one graph, graphs that cannot be had, slots, and running out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafts.base import LoadCancelled
from drafts.standalone import StandaloneDraft
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.errors import ModelError
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.graphs import Graphs
from edgespec.models.cuda.memory import out_of_memory
from edgespec.models.cuda.slots import DecoderSlots, refill
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights import open_weights
from predictor.planner import FixedPlanner
from tests.models.cuda.scripted_capture import ScriptedCapture
from tests.support.tiny import write_tiny

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 280, 60)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one architecture."""
    root = tmp_path_factory.mktemp("cuda-parts")
    return [write_tiny(root / f"model-{seed}", "llama", seed=seed) for seed in (0, 1)]


def load(folder: Path, graphs: bool = True) -> CudaDecoder:
    with open_weights(folder) as weights:
        decoder = CudaDecoder(weights, device="cpu")
    if graphs:
        decoder.graphs._capture = ScriptedCapture()
    return decoder


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


def answer(target: CudaDecoder, folder: Path, drafts: list[Any], gamma: int, **params: Any) -> Generation:
    tokenizer = load_tokenizer(folder)
    planner = FixedPlanner(drafts[0].name if drafts else None, gamma)
    session = Session(target, tokenizer, drafts, planner=planner, eos_ids=())
    generation = Generation(session, TOKENS[:10], SamplingParams(max_new_tokens=40, **params))
    while generation.step():
        pass
    return generation


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


# Slots


def test_a_slot_takes_the_next_draft_of_its_form(folders: list[Path]) -> None:
    slots = DecoderSlots()
    with open_weights(folders[0]) as weights:
        first = slots.load(weights, lambda: load(folders[0]))
    before = first.forward(TOKENS[:4], first.new_cache()).logits[0].copy()
    addresses = [tensor.data_ptr() for tensor in first.model.tensors()]
    first.close()
    assert slots.nbytes > 0
    with pytest.raises(ModelError, match="closed"):
        first.forward([1], first.new_cache())
    with open_weights(folders[1]) as weights:
        second = slots.load(weights, lambda: pytest.fail("a new decoder was built"))
    assert second is first
    assert [tensor.data_ptr() for tensor in second.model.tensors()] == addresses
    fresh = load(folders[1])
    replayed = np.array(second.forward(TOKENS[:4], second.new_cache()).logits)
    assert np.array_equal(replayed, np.array(fresh.forward(TOKENS[:4], fresh.new_cache()).logits))
    assert not np.array_equal(replayed[0], before)
    assert second.graphs._capture.made == 1  # the graph of the first draft served the second one  # type: ignore
    second.close()
    slots.close()
    assert slots.nbytes == 0


def test_a_load_that_is_called_off_leaves_the_slot_for_another(folders: list[Path]) -> None:
    slots = DecoderSlots()
    with open_weights(folders[0]) as weights:
        slots.load(weights, lambda: load(folders[0])).close()
    calls = iter(range(100))

    def pause() -> None:
        if next(calls) == 5:
            raise LoadCancelled

    with open_weights(folders[1]) as weights:
        with pytest.raises(LoadCancelled):
            slots.load(weights, lambda: pytest.fail("built"), pause)
        decoder = slots.load(weights, lambda: pytest.fail("built"))
    fresh = load(folders[1])
    assert np.array_equal(
        np.array(decoder.forward(TOKENS[:3], decoder.new_cache()).logits),
        np.array(fresh.forward(TOKENS[:3], fresh.new_cache()).logits),
    )


def test_another_form_gets_a_decoder_of_its_own(folders: list[Path], tmp_path: Path) -> None:
    slots = DecoderSlots()
    other = write_tiny(tmp_path / "other", "llama", intermediate_size=96)
    with open_weights(folders[0]) as weights:
        slots.load(weights, lambda: load(folders[0])).close()
    with open_weights(other) as weights:
        decoder = slots.load(weights, lambda: load(other))
        assert decoder.spec.intermediate_size == 96
    with open_weights(other) as weights, pytest.raises(ModelError, match="cannot take the place"):
        refill(load(folders[0]), weights)


# Memory


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 1.07 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131'
        ),
        RuntimeError("NvMapMemAllocInternalTagged: 1075072515 error 12"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cudaErrorMemoryAllocation"),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception) -> None:
    assert out_of_memory(error)
    wrapped = ModelError("the step failed")
    wrapped.__cause__ = error
    assert out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: device-side assert triggered"), OSError(5, "Input/output error"), ValueError()]
)
def test_what_does_not(error: Exception) -> None:
    assert not out_of_memory(error)


def test_a_draft_without_memory_is_given_up(folders: list[Path]) -> None:
    plain = answer(load(folders[0]), folders[0], [], 0).result
    decoder = load(folders[1])

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("NvMapMemAllocInternalTagged: 622000000 error 12")

    patched: Callable[..., Any] = fail
    decoder.guess = patched  # type: ignore[method-assign]
    draft = StandaloneDraft("d", decoder, 280)
    made = answer(load(folders[0]), folders[0], [draft], 3)
    assert made.result.token_ids == plain.token_ids
    status = made.session.statuses["d"]
    assert status.reason is not None
    assert "error 12" in status.reason
    assert not status.active
