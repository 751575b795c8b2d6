"""Whole texts: with drafts the same as without, one look a round, also in batches; sampled ones by the right law."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafts.standalone import StandaloneDraft
from edgespec.bench.gpu_check.random_models import RandomWeights, spec
from edgespec.bench.gpu_check.report import Check
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.kernels import ops
from edgespec.models.cuda import looks
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.spec import ModelSpec
from edgespec.models.tokenizer import Tokenizer, load_tokenizer
from edgespec.selftest import write_random_model
from predictor.planner import FixedPlanner

TOKENS = 258  # of the tokenizer that `selftest` writes
_TARGET = spec(64, 2, 4, 2, 16, 96, TOKENS, max_positions=512)
_DRAFT = spec(32, 1, 2, 1, 16, 64, TOKENS, max_positions=512)
_GAMMAS = range(1, 9)
_LENGTH = 24
_PROMPTS = ([5, 9, 77, 120, 33, 8], [200, 14, 14, 63], [31, 32, 33, 34, 35, 36, 37, 38, 39], [250, 2])
_UNLIKELY = 3.72  # standard deviations: once in 10,000 runs of a right law
_CELLS = 8


def run(check: Check) -> None:
    with staged(check) as stage:
        stage.texts()
        stage.looks()
        stage.batch()
        stage.blocks()
        stage.law()


@contextmanager
def staged(check: Check) -> Iterator[Stage]:
    """A target and two drafts of random weights."""
    with tempfile.TemporaryDirectory(prefix="edgespec-gpu-check-") as folder:
        tokenizer = load_tokenizer(write_random_model(Path(folder)))
    target = _decoder(check, _TARGET, 0, 4)
    # One guesses as the target itself, the other one next to nothing.
    drafts = [
        StandaloneDraft("equal", _decoder(check, _TARGET, 0, 4), TOKENS),
        StandaloneDraft("stranger", _decoder(check, _DRAFT, 1, 8), TOKENS),
    ]
    target.prepare_steps(range(1, max(_GAMMAS) + 2))
    for draft in drafts:
        draft.decoder.prepare_guesses(TOKENS, _GAMMAS)  # type: ignore[union-attr]
    try:
        yield Stage(check, target, tokenizer, drafts)
    finally:
        for draft in drafts:
            draft.close()
        target.close()


def _decoder(check: Check, model: ModelSpec, seed: int, bits: int) -> CudaDecoder:
    return CudaDecoder(RandomWeights(model, seed=seed, bits=bits).file, device=check.device, positions=256)


class Stage:
    """The target and its drafts, and what is asked of them."""

    def __init__(self, check: Check, target: CudaDecoder, tokenizer: Tokenizer, drafts: list[StandaloneDraft]) -> None:
        self._check, self._target, self._tokenizer, self._drafts = check, target, tokenizer, drafts
        # torch's own products promise no row the same bits beside other rows; in half precision that shows.
        self._exact = check.device.type == "cpu" or ops.backend(check.device) == "triton"

    def texts(self) -> None:
        plain, same, count = self._text(_PROMPTS[0]), 0, 0
        for draft, gamma in itertools.product(self._drafts, _GAMMAS):
            same += self._text(_PROMPTS[0], draft, gamma) == plain
            count += 1
        self._judged("texts with drafts that are the plain text", same, count)

    def looks(self) -> None:
        """Greedy rounds behind the first ones, of the draft of which most guesses fall."""
        generation = self._generation(_PROMPTS[0], self._drafts[1], 3, {"max_new_tokens": _LENGTH})
        counts = []
        with counted_looks() as looked:
            while not generation.over:
                looked.clear()
                generation.step()
                counts.append(len(looked))
        most = max(counts[2:-1])
        self._check.found("rounds", "looks at the device in a round, most", most, goal="1", ok=most == 1)

    def batch(self) -> None:
        """Texts of several in one forward, each as it is alone."""
        alone = [self._text(prompt) for prompt in _PROMPTS]
        self._target.prepare_batch(len(_PROMPTS))
        name = self._drafts[1].name
        generations = [self._generation(prompt, self._drafts[1], 3, {"max_new_tokens": _LENGTH}) for prompt in _PROMPTS]
        for generation in generations:
            generation.step()
        while running := [generation for generation in generations if not generation.over]:
            ready = [(each, each.prepare(found, each.plan(found))) for each in running for found in (each.look(),)]
            parts = [each.session.ask_verify(prepared.proposal.guesses) for each, prepared in ready]
            for (each, prepared), output in zip(ready, self._target.forward_batch(parts)):
                each.session.receive(output)
                each.finish(prepared, output.logits, frozenset({name}))
        same = sum(list(each.result.token_ids) == text for each, text in zip(generations, alone))
        self._target.prepare_batch(1)
        self._judged("texts of a batch that are the plain text", same, len(alone))

    def blocks(self) -> None:
        """A draft draws its guesses on the device by the law that it names."""
        decoder, few = self._drafts[1].decoder, 16
        assert isinstance(decoder, CudaDecoder)
        cache, counts, rng = decoder.new_cache(), np.zeros(few), np.random.default_rng(4)
        decoder.forward(_PROMPTS[0], cache, logits=0)
        start, law = cache.length, np.zeros(few)
        for uniform in rng.random(100 if self._check.tiny else 1000):
            cache.crop(start)
            made = decoder.guess([1], cache, 1, real=few, temperature=0.8, uniforms=[float(uniform)])
            assert made is not None
            assert made.rows is not None
            law = made.rows[0]
            counts[made.tokens[0]] += 1
        self._law_found("a draft's guesses", counts, law)

    def law(self) -> None:
        """The second token of sampled answers is of a round: accepted, corrected, or the bonus token."""
        sampled = {"max_new_tokens": 3, "temperature": 0.8, "ignore_eos": True}
        exact, count = self._second_token(sampled["temperature"]), 150 if self._check.tiny else 1000
        for draft in self._drafts:
            counts = np.zeros(TOKENS)
            for seed in range(count):
                counts[self._text(_PROMPTS[1], draft, 2, {**sampled, "seed": seed})[1]] += 1
            grouped, wanted = (np.bincount(np.arange(TOKENS) % _CELLS, each) for each in (counts, exact))
            self._law_found(f"sampled text, draft {draft.name}", grouped, wanted)

    def _second_token(self, temperature: float) -> npt.NDArray[np.float64]:
        """Its law, from the target's own rows."""
        cache = self._target.new_cache()
        first = _softmax(self._target.forward(_PROMPTS[1], cache, logits=1).logits[0], temperature)
        start, law = cache.length, np.zeros(TOKENS)
        for token in range(TOKENS):
            cache.crop(start)
            law += first[token] * _softmax(self._target.forward([token], cache).logits[0], temperature)
        return law

    def _law_found(self, what: str, counts: npt.NDArray[Any], law: npt.NDArray[Any]) -> None:
        value = misfit(counts, law)
        self._check.found("rounds", f"{what}: chi-square, of its bound", value, goal="<= 1", ok=value <= 1)

    def _judged(self, what: str, same: int, count: int) -> None:
        note = "" if self._exact else "without Triton near ties may fall otherwise"
        self._check.found("rounds", what, same, goal=f"{count}", ok=same == count if self._exact else None, note=note)

    def _text(
        self,
        prompt: Sequence[int],
        draft: StandaloneDraft | None = None,
        gamma: int = 0,
        params: dict[str, Any] | None = None,
    ) -> list[int]:
        generation = self._generation(prompt, draft, gamma, params or {"max_new_tokens": _LENGTH})
        while generation.step():
            pass
        return list(generation.result.token_ids)

    def _generation(
        self, prompt: Sequence[int], draft: StandaloneDraft | None, gamma: int, params: dict[str, Any]
    ) -> Generation:
        planner = FixedPlanner(None if draft is None else draft.name, gamma)
        drafts = [] if draft is None else [draft]
        session = Session(self._target, self._tokenizer, drafts, planner=planner, eos_ids=())
        return Generation(session, list(prompt), SamplingParams(**params))


@contextmanager
def counted_looks() -> Iterator[list[int]]:
    """Bytes of each copy to the host, as they happen."""
    copied: list[int] = []
    original: Callable[..., Any] = looks.look

    def watched(tensor: Any) -> Any:
        copied.append(tensor.nbytes)
        return original(tensor)

    looks.look = watched
    try:
        yield copied
    finally:
        looks.look = original


def misfit(counts: npt.NDArray[Any], law: npt.NDArray[Any]) -> float:
    """Chi-square of what was drawn against a law, as a share of what a right one reaches once in 10,000 times."""
    expected = np.asarray(law, np.float64) * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:  # all that is rare together still is: it goes to the last of the others
        observed, expected = (np.append(each[:-2], each[-2:].sum()) for each in (observed, expected))
    freedom = len(expected) - 1
    if freedom < 1:
        raise ValueError("there is nothing to compare: one token has all of the law")
    bound = freedom * (1 - 2 / (9 * freedom) + _UNLIKELY * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    return float(((observed - expected) ** 2 / expected).sum() / bound)


def _softmax(row: Any, temperature: float) -> npt.NDArray[np.float64]:
    scaled = np.asarray(row, np.float64)[:TOKENS] / temperature
    weights = np.exp(scaled - scaled.max())
    law: npt.NDArray[np.float64] = weights / weights.sum()
    return law
