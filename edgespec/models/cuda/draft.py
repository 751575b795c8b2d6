"""A draft's whole block of guesses in one captured graph: no launch and no look by the host between two tokens.

Run step by step from a Jetson's CPU, a draft of half a billion weights takes as long for a token as the target does for
one (docs/jetson.md); in one graph it takes what its weights take to read.
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


class Guesses(NamedTuple):
    """tokens: as many as were asked for. rows: the law each was drawn from, float32 [tokens, real], None for argmax."""

    tokens: list[int]
    rows: FloatArray | None


class _Inputs(NamedTuple):
    ids: Tensor
    starts: Tensor
    row: Tensor
    temperature: Tensor
    uniforms: Tensor


class DraftLoop:
    """The guessing of one decoder: ids below `real` are tokens, rows beyond are padding and never guessed."""

    def __init__(self, decoder: CudaDecoder, real: int) -> None:
        self._decoder = decoder
        self._real = min(real, decoder.spec.vocab_size)
        self._inputs: dict[tuple[int, int], _Inputs] = {}

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
        decoder, width = self._decoder, len(pending)
        row = decoder.tables.place([cache])
        inputs = self._filled(pending, cache.length, row[0], gamma, temperature, uniforms)
        sampled = temperature > 0
        key = ("draft", width, gamma, sampled, self._real, len(decoder.pool.slabs))
        tokens, rows = decoder.graphs.run(key, lambda: self._block(inputs, width, gamma, sampled))
        return Guesses(tokens.tolist(), rows.cpu().numpy() if sampled else None)  # the block's one look at the device

    def _filled(
        self, pending: Sequence[int], start: int, row: int, gamma: int, temperature: float, uniforms: Sequence[float]
    ) -> _Inputs:
        """Static tensors with this block's values."""
        device, key = self._decoder.device, (len(pending), gamma)
        inputs = self._inputs.get(key)
        if inputs is None:
            zeros = partial(torch.zeros, device=device)
            inputs = self._inputs[key] = _Inputs(
                zeros(len(pending), dtype=torch.int64),
                zeros(1, dtype=torch.int64),
                zeros(1, dtype=torch.int64),
                zeros(1),
                zeros(gamma, dtype=torch.float64),
            )
        inputs.ids.copy_(torch.tensor(list(pending)))
        inputs.starts.fill_(start)
        inputs.row.fill_(row)
        if temperature > 0:
            inputs.temperature.fill_(temperature)
            inputs.uniforms.copy_(torch.tensor(list(uniforms), dtype=torch.float64))
        return inputs

    def _block(self, inputs: _Inputs, width: int, gamma: int, sampled: bool) -> tuple[Tensor, Tensor | None]:
        """tokens int64 [gamma], and their laws float32 [gamma, real] if sampled. Launches only."""
        decoder = self._decoder
        blocks, distances = decoder.tables.blocks[inputs.row], decoder.tables.distances[inputs.row]
        tokens, laws = [], []
        ids, starts = inputs.ids, inputs.starts
        for place in range(gamma):
            states = cuda_step.run(decoder.model, decoder.pool, ids, starts, blocks, distances, len(ids))
            logits = cuda_step.logits(decoder.model, states[-1:])[:, : self._real]
            starts = starts + len(ids)
            if sampled:
                law = torch.softmax(logits / inputs.temperature, dim=-1)
                laws.append(law)
                ids = _drawn(law, inputs.uniforms[place : place + 1])
            else:
                ids = _best(logits)
            tokens.append(ids)
            ids = ids.clamp(min=0)  # a damaged row must not reach the embedding
        return torch.cat(tokens), torch.cat(laws) if sampled else None


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
