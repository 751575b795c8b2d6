"""Steps as graphs and kernel by kernel, blocks of drafts, and what speculation makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from edgespec.bench.gpu_check.random_models import QWEN_3B, QWEN_7B, QWEN_HALF_B, TINY, TINY_DRAFT, RandomWeights
from edgespec.bench.gpu_check.report import Check
from edgespec.bench.gpu_check.timing import median, wait
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.graphs import Graphs
from edgespec.models.cuda.guesses import DeviceTokens
from edgespec.models.cuda.memory import out_of_memory
from edgespec.models.spec import ModelSpec

RATES = (0.6, 0.8)
_GAMMAS = (2, 3, 5)
_PROMPT = 256


def models(tiny: bool) -> tuple[dict[str, ModelSpec], ModelSpec]:
    """Targets by name, and the draft."""
    return ({"tiny": TINY}, TINY_DRAFT) if tiny else ({"3B int4": QWEN_3B, "7B int4": QWEN_7B}, QWEN_HALF_B)


@contextmanager
def random_decoder(check: Check, model: ModelSpec, seed: int = 0) -> Iterator[CudaDecoder]:
    decoder = CudaDecoder(
        RandomWeights(model, seed=seed).file, device=check.device, positions=min(2048, 512 if check.tiny else 2048)
    )
    try:
        decoder.prepare_steps((1, *(gamma + 1 for gamma in _GAMMAS), 5))
        yield decoder
    finally:
        decoder.close()


def run(check: Check) -> None:
    targets, small = models(check.tiny)
    with random_decoder(check, small) as draft:
        _steps(check, "draft 0.5B int4", draft)
        block = _block_seconds(check, draft, 5)
        check.found("steps", "draft 0.5B int4: block of 5 guesses, a guess", block / 5 * 1e3, "ms")
        for name, model in targets.items():
            if check.left < 45:
                check.found("steps", name, None, note="the time is up")
                continue
            try:
                with random_decoder(check, model) as target:
                    _steps(check, name, target)
                    _speculation(check, name, target, draft)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                check.found("steps", name, None, note="does not fit into the memory of this device")


def _steps(check: Check, name: str, decoder: CudaDecoder) -> None:
    captured = decoder.graphs
    for width in (1, 5):
        graph = _step_seconds(check, decoder, width)
        decoder.graphs = Graphs(None)
        eager = _step_seconds(check, decoder, width)
        decoder.graphs = captured
        what = f"{name}: step of {width}"
        check.found("steps", f"{what}, graph", graph * 1e3, "ms")
        check.found(
            "steps", f"{what}, kernel by kernel", eager * 1e3, "ms", note=f"{eager / graph:.2f} times the graph"
        )
    if check.device.type == "cuda" and not captured.enabled:
        check.found("steps", f"{name}: graphs", 0, goal="captured", ok=False, note="the capture failed, see the log")


def _step_seconds(check: Check, decoder: CudaDecoder, width: int) -> float:
    cache, tokens = decoder.new_cache(), [1] * width
    decoder.forward([1] * min(_PROMPT, decoder.positions // 2), cache, logits=0)
    start = cache.length

    def step() -> None:
        cache.crop(start)
        decoder.forward(tokens, cache).logits.best(0)  # type: ignore[attr-defined]

    return median(step, check.device, 3 if check.tiny else 15)


def _block_seconds(check: Check, draft: CudaDecoder, gamma: int) -> float:
    cache = draft.new_cache()
    draft.forward([1] * min(_PROMPT, draft.positions // 2), cache, logits=0)
    start = cache.length

    def block() -> None:
        cache.crop(start)
        made = draft.guess([1], cache, gamma, real=draft.spec.vocab_size)
        assert made is not None
        made.on_device.read()  # waits for it

    return median(block, check.device, 3 if check.tiny else 15)


def _speculation(check: Check, name: str, target: CudaDecoder, draft: CudaDecoder) -> None:
    """Tokens a second against plain steps, at the best of a few gammas.

    Rounds are real: the draft's block, the target's step over it, one look at what it says, both caches cut. Which
    guesses stand is drawn, each with the rate's probability as long as those before it stood: random weights agree on
    nothing.
    """
    plain = speed(check, target, None, 0, 0.0)
    check.found("speculation", f"{name}: plain", plain, "tokens/s")
    for rate in RATES:
        made = {gamma: speed(check, target, draft, gamma, rate) for gamma in _GAMMAS}
        gamma, best = max(made.items(), key=lambda pair: pair[1])
        check.found(
            "speculation", f"{name}: acceptance {rate}, gamma {gamma}", best / plain, "times plain",
            note=f"{best:.4g} tokens/s",
        )  # fmt: skip


def speed(check: Check, target: CudaDecoder, draft: CudaDecoder | None, gamma: int, rate: float) -> float:
    rounds = Rounds(target, draft, gamma, rate)
    rounds.one()  # graphs are captured
    rounds.one()
    wait(check.device)
    seconds, tokens = [], 0
    for _ in range(4 if check.tiny else 40):
        made, took = rounds.one()
        tokens += made
        seconds.append(took)
    return tokens / sum(seconds)


class Rounds:
    """A text that is made in rounds, with drawn acceptance. draft: None = plain steps."""

    def __init__(self, target: CudaDecoder, draft: CudaDecoder | None, gamma: int, rate: float) -> None:
        self._target, self._draft, self._gamma, self._rate = target, draft, gamma, rate
        self._rng = np.random.default_rng(0)
        prompt = [1] * min(_PROMPT, target.positions // 4)
        self._cache = target.new_cache()
        target.forward(prompt, self._cache, logits=0)
        self._last, self._pending = 1, [1]
        if draft is not None:
            self._own = draft.new_cache()
            draft.forward(prompt, self._own, logits=0)

    def one(self) -> tuple[int, float]:
        """(tokens, seconds) of a round."""
        from time import perf_counter

        guesses: list[int] | DeviceTokens = []
        begin, start = perf_counter(), self._cache.length
        if start + self._gamma + 1 > self._target.positions - 64:
            self._cache.crop(start := self._target.positions // 4)
            if self._draft is not None:
                self._own.crop(min(start, self._own.length))
        if self._draft is not None:
            made = self._draft.guess(self._pending, self._own, self._gamma, real=self._draft.spec.vocab_size)
            assert made is not None
            guesses = made.on_device
        logits = self._target.forward([self._last] + guesses, self._cache).logits
        logits.verdict()  # type: ignore[attr-defined]  # the round's look; guesses arrive with it
        stands = self._rng.random(len(guesses)) < self._rate
        accepted = int(np.cumprod(stands).sum())
        self._last = logits.best(accepted) or 0  # type: ignore[attr-defined]
        self._cache.crop(start + 1 + accepted)
        if self._draft is not None:
            whole = accepted == len(guesses)  # its last guess was never fed to it
            self._own.crop(self._own.length - (0 if whole else len(guesses) - 1 - accepted))
            self._pending = [guesses[-1], self._last] if whole else [self._last]
        return accepted + 1, perf_counter() - begin
