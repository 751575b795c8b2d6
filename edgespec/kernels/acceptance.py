"""Which guesses stand and which token follows, decided on the device: nothing waits for the host.

Rows of a vocabulary are read in chunks by many programs; one last program joins them in order, so results do not depend
on which program ended first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgespec.kernels import tuning
from edgespec.kernels.types import pad_of

_ROWS = 32  # that one program joins


@triton.jit
def _best(logits, tops, indices, V, chunks, CHUNK: tl.constexpr):
    """Largest logit of a chunk and the first place it stands at; place -1 if the chunk has NaN or +inf."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row.to(tl.int64) * V + place, mask=place < V, other=float("-inf")).to(tl.float32)
    unusable = (value != value) | (value == float("inf"))
    value = tl.where(unusable, float("-inf"), value)
    top = tl.max(value, axis=0)
    index = tl.min(tl.where(value == top, place, 2147483647), axis=0)
    index = tl.where(tl.max(unusable.to(tl.int32), axis=0) > 0, -1, index)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(indices + row * chunks + chunk, index)


@triton.jit(do_not_specialize=["M"])
def _join(tops, indices, out, M, chunks, ROWS: tl.constexpr):
    """The best token of each row from those of its chunks, -1 where one of them cannot be used."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < M
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    token = tl.full((ROWS,), -1, tl.int32)
    unusable = tl.zeros((ROWS,), tl.int32)
    for chunk in range(chunks):
        other = tl.load(tops + row * chunks + chunk, mask=ok, other=float("-inf"))
        index = tl.load(indices + row * chunks + chunk, mask=ok, other=0)
        unusable = tl.maximum(unusable, (index < 0).to(tl.int32))
        token = tl.where(other > top, index, token)  # the first of equals stays
        top = tl.maximum(top, other)
    tl.store(out + row, tl.where(unusable > 0, -1, token).to(tl.int64), mask=ok)


@triton.jit(do_not_specialize=["W"])
def _greedy(best, tokens, begins, ends, out, W, ROWS: tl.constexpr):
    """Count the guesses that stand; programs (sequences)."""
    sequence = tl.program_id(0).to(tl.int64)
    row, begin, end = tl.arange(0, ROWS), tl.load(begins + sequence), tl.load(ends + sequence)
    ok = (row < W) & (row >= begin) & (row <= end)
    at = sequence * W + row
    token = tl.load(best + at, mask=ok, other=-1)
    guess = tl.load(tokens + at + 1, mask=ok & (row < end), other=-1)
    stands = (token == guess) & (guess >= 0)  # a damaged guess must not agree with a damaged row
    last = tl.min(tl.where(ok & (stands == 0), row, ROWS), axis=0)
    tl.store(out + sequence * 2, last - begin)
    tl.store(out + sequence * 2 + 1, tl.sum(tl.where(row == last, token, 0), axis=0))


@triton.jit(do_not_specialize=["M"])
def _judge(p, q, proposed, uniforms, out, M, V, ROWS: tl.constexpr, ONE_HOT: tl.constexpr):
    """out[0] = how many guesses stand. One program."""
    row = tl.arange(0, ROWS)
    guessed = row < M - 1
    guess = tl.load(proposed + row, mask=guessed, other=0)
    known = guessed & (guess >= 0) & (guess < V)
    at = row.to(tl.int64) * V + guess
    p_guess = tl.load(p + at, mask=known, other=0.0)
    q_guess = tl.full((ROWS,), 1.0, tl.float32)
    if not ONE_HOT:
        q_guess = tl.load(q + at, mask=known, other=1.0)
    stands = tl.load(uniforms + row, mask=guessed, other=1.0) * q_guess < p_guess
    tl.store(out, tl.min(tl.where((row < M) & (known & stands == 0), row, ROWS), axis=0))


@triton.jit
def _left_over(p, q, guess, accepted, place, ok, M, V, ONE_HOT: tl.constexpr):
    """(p, what is left of p after the guess was rejected) at `place` of the row that the next token comes from."""
    kept = tl.load(p + accepted.to(tl.int64) * V + place, mask=ok, other=0.0)
    rejected = accepted < M - 1
    if ONE_HOT:
        left = tl.where(rejected & (place == guess), 0.0, kept)
    else:
        drawn = tl.load(q + accepted.to(tl.int64) * V + place, mask=ok & rejected, other=0.0)
        left = tl.maximum(kept - drawn, 0.0)
    return kept, left


@triton.jit(do_not_specialize=["M"])
def _mass(p, q, proposed, state, masses, M, V, chunks, CHUNK: tl.constexpr, ONE_HOT: tl.constexpr):
    """masses [2, chunks]: the sums of `_left_over`'s left and kept over each chunk. Programs (chunks)."""
    chunk = tl.program_id(0)
    accepted = tl.load(state)
    guess = tl.load(proposed + accepted, mask=accepted < M - 1, other=-1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    kept, left = _left_over(p, q, guess, accepted, place, place < V, M, V, ONE_HOT)
    tl.store(masses + chunk, tl.sum(left, axis=0))
    tl.store(masses + chunks + chunk, tl.sum(kept, axis=0))


@triton.jit(do_not_specialize=["M"])
def _draw(
    p, q, proposed, uniforms, masses, out, M, V, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ONE_HOT: tl.constexpr,
):  # fmt: skip
    """out[1] = the token at which the cumulative sum passes uniforms[M - 1] of all. One program.

    Sums of a parallel scan need not rise everywhere by the last bit, so only places with mass are looked at.
    """
    accepted = tl.load(out)
    guess = tl.load(proposed + accepted, mask=accepted < M - 1, other=-1)
    index = tl.arange(0, CHUNKS)
    left_masses = tl.load(masses + index, mask=index < chunks, other=0.0)
    kept_masses = tl.load(masses + chunks + index, mask=index < chunks, other=0.0)
    is_left = tl.sum(left_masses, axis=0) > 0.0
    mass = tl.where(is_left, left_masses, kept_masses)
    total = tl.sum(mass, axis=0)
    goal = tl.load(uniforms + M - 1) * total
    passed = (tl.cumsum(mass, axis=0) > goal) & (mass > 0.0)
    last = tl.max(tl.where(mass > 0.0, index, 0), axis=0)
    chunk = tl.minimum(tl.min(tl.where(passed, index, CHUNKS), axis=0), last)
    before = tl.sum(tl.where(index < chunk, mass, 0.0), axis=0)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    kept, left = _left_over(p, q, guess, accepted, place, place < V, M, V, ONE_HOT)
    value = tl.where(is_left, left, kept)
    some = value > 0.0
    here = some & (before + tl.cumsum(value, axis=0) > goal)
    token = tl.minimum(tl.min(tl.where(here, place, 2147483647), axis=0), tl.max(tl.where(some, place, -1), axis=0))
    tl.store(out + 1, tl.where(total > 0.0, token, -1))


def best_tokens(logits: Tensor) -> Tensor:
    """int64 [M]; see `reference.best_tokens`."""
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    config = tuning.of(logits.device).sampling
    chunks = triton.cdiv(vocabulary, config.chunk)
    tops = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    indices = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _best[(rows, chunks)](logits, tops, indices, vocabulary, chunks, CHUNK=config.chunk, num_warps=config.warps)
        _join[(triton.cdiv(rows, _ROWS),)](tops, indices, out, rows, chunks, ROWS=_ROWS, num_warps=1)
    return out


def accept_greedy(best: Tensor, tokens: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """int64 [S, 2] = (accepted, next token); see `reference.accept_greedy`."""
    sequences, width = tokens.shape
    out = torch.empty((sequences, 2), dtype=torch.int64, device=best.device)
    _greedy[(sequences,)](
        best.contiguous(), tokens.contiguous(), begins, ends, out, width,
        ROWS=max(2, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip
    return out


def accept_sampled(p: Tensor, q: Tensor | None, proposed: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [2] = (accepted, next token); see `reference.accept_sampled`. p, q, uniforms: float32."""
    p = p.contiguous()
    rows, vocabulary = p.shape
    config = tuning.of(p.device).sampling
    chunks = triton.cdiv(vocabulary, config.chunk)
    masses = torch.empty((2, chunks), dtype=torch.float32, device=p.device)
    out = torch.empty(2, dtype=torch.int64, device=p.device)
    q_or_pad, one_hot = pad_of(q, p), q is None
    _judge[(1,)](
        p, q_or_pad, proposed, uniforms, out, rows, vocabulary,
        ROWS=max(2, triton.next_power_of_2(rows)), ONE_HOT=one_hot, num_warps=1,
    )  # fmt: skip
    _mass[(chunks,)](
        p, q_or_pad, proposed, out, masses, rows, vocabulary, chunks,
        CHUNK=config.chunk, ONE_HOT=one_hot, num_warps=config.warps,
    )  # fmt: skip
    _draw[(1,)](
        p, q_or_pad, proposed, uniforms, masses, out, rows, vocabulary, chunks,
        CHUNK=config.chunk, CHUNKS=max(2, triton.next_power_of_2(chunks)), ONE_HOT=one_hot, num_warps=config.warps,
    )  # fmt: skip
    return out
