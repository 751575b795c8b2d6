"""A draft's block of guesses on the device: one graph launch for a token, no look by the host before the last one.

Run kernel by kernel from a Jetson's CPU, a draft of half a billion weights takes as long for a token as the target does
for one (docs/jetson.md); in graphs it takes what its weights take to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgespec.models.cuda import step as cuda_step

if TYPE_CHECKING:
    from edgespec.models.cuda.decoder import CudaDecoder
    from edgespec.models.cuda.kv import PagedCache

FloatArray = npt.NDArray[np.float32]
MOST_PENDING = 4  # tokens that a block may begin with inside the graph; the usual 1 or 2, and a little more
MOST_GUESSES = 64  # the longest gamma that can be asked for
MOST_DRAWN = 16  # where tokens are drawn: each law is half a megabyte


class Guesses(NamedTuple):
    """tokens: as many as were asked for. rows: the law each was drawn from, float32 [tokens, real], None for argmax."""

    tokens: list[int]
    rows: FloatArray | None


class _Static(NamedTuple):
    """What the graphs read and write. place: the guess that is made; base + place: the position of its row.

    begin: base, row and the pending tokens in one, for one copy from the host.
    """

    begin: Tensor  # int64 [2 + MOST_PENDING]
    pending: tuple[Tensor, ...]  # by width, int64 [width]
    base: Tensor
    row: Tensor
    place: Tensor
    temperature: Tensor
    uniforms: Tensor
    tokens: Tensor  # int64 [MOST_GUESSES]


class DraftLoop:
    """The guessing of one decoder: ids below `real` are tokens, rows beyond are padding and never guessed.

    One graph feeds the pending tokens and makes the first guess; another one makes each further guess, from the token
    that the one before left on the device. So a handful of graphs serves every length of block: one graph for each
    length would be captured for seconds, for the launches of a few microseconds that it saves.
    """

    def __init__(self, decoder: CudaDecoder, real: int) -> None:
        self._decoder = decoder
        self._real = min(real, decoder.spec.vocab_size)
        zeros = partial(torch.zeros, device=decoder.device)
        whole = partial(zeros, dtype=torch.int64)
        begin = whole(2 + MOST_PENDING)
        self._static = _Static(
            begin, tuple(begin[2 : 2 + width] for width in range(1, MOST_PENDING + 1)),
            begin[:1], begin[1:2], whole(1), torch.ones(1, device=decoder.device),
            zeros(MOST_DRAWN, dtype=torch.float64), whole(MOST_GUESSES),
        )  # fmt: skip
        self._laws: Tensor | None = None  # float32 [MOST_DRAWN, real], made when somebody samples

    def guess(
        self,
        cache: PagedCache,
        pending: Sequence[int],
        gamma: int,
        *,
        temperature: float = 0.0,
        uniforms: Sequence[float] = (),
    ) -> Guesses:
        """Feed `pending` (1 to `MOST_PENDING` tokens), then guess `gamma` >= 1; all but the last guess are fed too.

        temperature 0: the best token (the lowest id of equals); else uniforms[i] in [0, 1) picks token i from
        softmax(logits / temperature) by the inverse of its cumulative sum. The caller holds the decoder's lock and has
        reserved room; the cache's length is the caller's to raise. A token of -1: that row was damaged (NaN, +inf).
        """
        static, sampled = self._static, temperature > 0
        if sampled:
            static.temperature.fill_(temperature)
            self._decoder.staging.write(static.uniforms[:gamma], np.asarray(uniforms, np.float64))
        self._run(pending, cache.length, self._decoder.steps.tables.place([cache])[0], gamma, sampled)
        laws = self._laws[:gamma].cpu().numpy() if self._laws is not None and sampled else None
        return Guesses(static.tokens[:gamma].tolist(), laws)  # the look that waits for the device

    def prepare(self) -> None:
        """Capture what blocks are made of, by guessing into the scratch block."""
        for sampled in (False, True):
            for width in range(1, MOST_PENDING + 1):
                self._run([0] * width, 0, self._decoder.steps.tables.empty, 1 + (width == 1), sampled)

    def _run(self, pending: Sequence[int], start: int, row: int, gamma: int, sampled: bool) -> None:
        """Launches only: nothing is read on the host, and what goes to the device goes through pinned memory."""
        static, graphs, width = self._static, self._decoder.graphs, len(pending)
        if sampled and self._laws is None:
            self._laws = torch.zeros((MOST_DRAWN, self._real), device=self._decoder.device)
        begin = np.array([start + width - 1, row, *pending], np.int64)
        self._decoder.staging.write(static.begin[: 2 + width], begin)
        kind = (sampled, self._real, self._decoder.growth)
        for place in range(gamma):
            static.place.fill_(place)
            if place:
                graphs.run(("guess", *kind), lambda: self._guess(None, sampled))
            else:
                graphs.run(("first guess", width, *kind), lambda: self._guess(width, sampled))

    def _guess(self, width: int | None, sampled: bool) -> tuple[Tensor, ...]:
        """One guess. width: of the pending tokens that it follows, None = it follows the guess before it."""
        static, decoder = self._static, self._decoder
        tables = decoder.steps.tables
        blocks, distances = tables.blocks[static.row], tables.distances[static.row]
        if width is None:  # a damaged row (-1) must not reach the embedding
            ids = static.tokens.index_select(0, static.place - 1).clamp(min=0)
            starts = static.base + static.place
        else:
            ids, starts = static.pending[width - 1], static.base - (width - 1)
        states = cuda_step.run(decoder.model, decoder.pool, ids, starts, blocks, distances, width or 1, same_bits=False)
        logits = cuda_step.logits(decoder.model, states[-1:], same_bits=False)[:, : self._real]
        if sampled:
            assert self._laws is not None
            law = torch.softmax(logits / static.temperature, dim=-1)
            self._laws.index_copy_(0, static.place, law)
            token = _drawn(law, static.uniforms.index_select(0, static.place))
        else:
            token = _best(logits)
        static.tokens.index_copy_(0, static.place, token)
        return ()


def _best(logits: Tensor) -> Tensor:
    """int64 [1]: the best id of logits [1, n], -1 for a row that is damaged."""
    best = cuda_step.best(logits)
    return torch.where(torch.isfinite(best[:, 1]), best[:, 0], -1.0).to(torch.int64)


def _drawn(law: Tensor, uniform: Tensor) -> Tensor:
    """int64 [1]: the id of law [1, n] at `uniform` of its cumulative sum (never one without mass), -1 if damaged."""
    sums = law[0].double().cumsum(0)
    at = torch.searchsorted(sums, uniform * sums[-1], right=True)
    ids = torch.arange(law.shape[1], device=law.device)
    last = torch.where(law[0] > 0, ids, -1).max()
    return torch.where(torch.isfinite(sums[-1]), torch.minimum(at, last), -1)
