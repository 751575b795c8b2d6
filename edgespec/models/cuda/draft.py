"""A draft's block of guesses on the device: one graph launch for all of it, and no look by the host.

Run kernel by kernel from a Jetson's CPU, a draft of half a billion weights takes as long for a token as the target does
for one (docs/jetson.md); in graphs it takes what its weights take to read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgespec.kernels import ops
from edgespec.models.base import FloatArray
from edgespec.models.cuda import looks
from edgespec.models.cuda import step as cuda_step
from edgespec.models.cuda.graphs import Body
from edgespec.models.cuda.guesses import DeviceTokens
from edgespec.models.cuda.looks import Stopwatch

if TYPE_CHECKING:
    from edgespec.models.cuda.decoder import CudaDecoder
    from edgespec.models.cuda.kv import PagedCache

MOST_PENDING = 4  # tokens that a block may begin with inside the graph; the usual 1 or 2, and a little more
MOST_GUESSES = 64  # the longest gamma that can be asked for
MOST_DRAWN = 16  # where tokens are drawn: each law is half a megabyte
_MOST_SPARE = 8  # guesses that a block may make beyond those that were asked for, where there is a graph for so many


class Guesses:
    """A block of guesses. on_device: for a target on the same device; `tokens` and `rows` look at it from the host."""

    def __init__(self, on_device: DeviceTokens, laws: Tensor | None, watch: Stopwatch) -> None:
        """laws: float32 [tokens, real] that each was drawn from, None for argmax."""
        self.on_device = on_device
        self._laws = laws
        self._watch = watch

    @property
    def tokens(self) -> list[int]:
        """As many as were asked for; -1: that row was damaged (NaN, +inf)."""
        return self.on_device.read()

    @property
    def rows(self) -> FloatArray | None:
        """The law each was drawn from, float32 [tokens, real], None for argmax."""
        return None if self._laws is None else looks.to_numpy(self._laws)

    @property
    def seconds(self) -> float | None:
        """What they took on the device, None if that is not known; when they have arrived."""
        return self._watch.seconds


class _Static(NamedTuple):
    """What the graphs read and write, int64 but for temperature and uniforms.

    begin: what follows it, up to `pending`, in one, for one copy from the host. start: position of the first pending
    token. last: which of them is the last. row: of the tables.
    """

    begin: Tensor  # [3 + MOST_PENDING]
    start: Tensor
    last: Tensor
    row: Tensor
    pending: Tensor
    temperature: Tensor
    uniforms: Tensor
    tokens: Tensor  # [MOST_GUESSES]


class DraftLoop:
    """The guessing of one decoder: ids below `real` are tokens, rows beyond are padding and never guessed.

    A graph is a whole block of so many guesses. It feeds `MOST_PENDING` tokens; where fewer are pending, the others are
    written behind the text, where the guesses overwrite them. So one graph serves any number of pending tokens.
    """

    def __init__(self, decoder: CudaDecoder, real: int) -> None:
        self._decoder = decoder
        self._real = min(real, decoder.spec.vocab_size)
        zeros = partial(torch.zeros, device=decoder.device)
        begin = zeros(3 + MOST_PENDING, dtype=torch.int64)
        self._static = _Static(
            begin, begin[:1], begin[1:2], begin[2:3], begin[3:], torch.ones(1, device=decoder.device),
            zeros(MOST_DRAWN, dtype=torch.float64), zeros(MOST_GUESSES, dtype=torch.int64),
        )  # fmt: skip
        self._laws: Tensor | None = None  # float32 [MOST_DRAWN, real], made when somebody samples
        self._prepared: dict[bool, list[int]] = {False: [], True: []}  # lengths of block, by whether tokens are drawn

    def guess(
        self,
        cache: PagedCache,
        pending: Sequence[int],
        gamma: int,
        *,
        temperature: float = 0.0,
        uniforms: Sequence[float] = (),
        since: Stopwatch | None = None,
    ) -> Guesses:
        """Feed `pending` (1 to `MOST_PENDING` tokens), then guess `gamma` >= 1; all but the last guess are fed too.

        temperature 0: the best token (the lowest id of equals); else uniforms[i] in [0, 1) picks token i from
        softmax(logits / temperature) by the inverse of its cumulative sum. since: when the block's time begins, None =
        now. The caller holds the decoder's lock and has reserved room; the cache's length is the caller's to raise.
        """
        static, sampled, watch = self._static, temperature > 0, since or Stopwatch(self._decoder.device)
        if sampled:
            static.temperature.fill_(temperature)
            self._decoder.staging.write(static.uniforms[:gamma], np.asarray(uniforms, np.float64))
        prepared = self._prepared[sampled] if self._decoder.graphs.enabled else ()
        known = [count for count in prepared if gamma <= count <= gamma + _MOST_SPARE]
        count = min(known, default=gamma)
        self._run(pending, cache.length, self._decoder.steps.tables.place([cache])[0], count, sampled)
        laws = self._laws[:gamma].clone() if self._laws is not None and sampled else None
        tokens = static.tokens[:gamma].clone()  # the next block writes over them
        watch.stop()
        return Guesses(DeviceTokens(tokens), laws, watch)

    def prepare(self, gammas: Iterable[int]) -> None:
        """Capture blocks of these lengths, over the scratch block. Rounds may run meanwhile, so hardly any is computed.

        What a block of two guesses has compiled, longer ones need not.
        """
        graphs, wanted = self._decoder.graphs, sorted(set(gammas))
        self._write([0], 0, self._decoder.steps.tables.empty)
        for sampled, most in ((False, MOST_GUESSES), (True, MOST_DRAWN)):
            prepared = self._prepared[sampled]
            for gamma in wanted:
                if 1 <= gamma <= most and gamma not in prepared:
                    warm = max(prepared, default=0) < 2
                    if graphs.prepare(self._key(gamma, sampled), self._body(gamma, sampled), warm=warm):
                        prepared.append(gamma)

    def _run(self, pending: Sequence[int], start: int, row: int, gamma: int, sampled: bool) -> None:
        """Launches only: nothing is read on the host, and what goes to the device goes through pinned memory."""
        self._write(pending, start, row)
        self._decoder.graphs.run(self._key(gamma, sampled), self._body(gamma, sampled))

    def _write(self, pending: Sequence[int], start: int, row: int) -> None:
        padding = [0] * (MOST_PENDING - len(pending))
        begin = np.array([start, len(pending) - 1, row, *pending, *padding], np.int64)
        self._decoder.staging.write(self._static.begin, begin)

    def _key(self, gamma: int, sampled: bool) -> Hashable:
        return "guesses", gamma, sampled, self._real

    def _body(self, gamma: int, sampled: bool) -> Body:
        if sampled and self._laws is None:
            self._laws = torch.zeros((MOST_DRAWN, self._real), device=self._decoder.device)
        return partial(self._block, gamma, sampled)

    def _block(self, gamma: int, sampled: bool) -> tuple[Tensor, ...]:
        """All guesses, each from the token that the one before left."""
        static = self._static
        states = self._states(static.pending, static.start)
        self._guess(0, states.index_select(0, static.last), sampled)
        for place in range(1, gamma):  # a damaged row (-1) must not reach the embedding
            ids = static.tokens[place - 1 : place].clamp(min=0)
            self._guess(place, self._states(ids, static.start + static.last + place), sampled)
        return ()

    def _states(self, ids: Tensor, starts: Tensor) -> Tensor:
        decoder, row = self._decoder, self._static.row
        tables = decoder.steps.tables
        blocks, distances = tables.blocks[row], tables.distances[row]
        return cuda_step.run(decoder.model, decoder.pool, ids, starts, blocks, distances, len(ids), same_bits=False)

    def _guess(self, place: int, state: Tensor, sampled: bool) -> None:
        """The guess at `place` of the block, from the final hidden state [1, hidden_size] before it."""
        static, decoder = self._static, self._decoder
        logits = cuda_step.logits(decoder.model, state, same_bits=False)[:, : self._real]
        if sampled:
            assert self._laws is not None
            law = torch.softmax(logits / static.temperature, dim=-1)
            self._laws[place : place + 1].copy_(law)
            token = _drawn(law, static.uniforms[place : place + 1])
        else:
            token = ops.best_tokens(logits)
        static.tokens[place : place + 1].copy_(token)


def _drawn(law: Tensor, uniform: Tensor) -> Tensor:
    """int64 [1]: the id of law [1, n] at `uniform` of its cumulative sum (never one without mass), -1 if damaged."""
    sums = law[0].double().cumsum(0)
    at = torch.searchsorted(sums, uniform * sums[-1], right=True)
    ids = torch.arange(law.shape[1], device=law.device)
    last = torch.where(law[0] > 0, ids, -1).max()
    return torch.where(torch.isfinite(sums[-1]), torch.minimum(at, last), -1)
