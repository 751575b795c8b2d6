"""Which of the guessed tokens stand, and which token the target adds: the greedy and the rejection-sampling rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.decoding.sampling import LogitsPipeline, draw

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Outcome:
    """tokens[:accepted] stand and `token` follows them.

    bonus: all of them stood (also if there were none), so `token` is an extra one; else it replaces tokens[accepted].
    """

    accepted: int
    token: int
    bonus: bool


def accept(
    tokens: Sequence[int],
    rows: Sequence[FloatArray | None],
    logits: FloatArray,
    pipeline: LogitsPipeline,
    rng: np.random.Generator,
) -> Outcome:
    """Judge one proposal; what comes out has the law that the target alone would give, for any draft.

    tokens: the guesses; rows[i]: the distribution tokens[i] was drawn from, float32 [vocab_rows], None = one-hot.
    logits: float32 [len(tokens) + 1, vocab_rows], the target's rows at the guesses and after the last one.

    Greedy: guesses stand while they equal the target's choice. Sampling: the rejection rule of Leviathan et al. 2023
    ("Fast Inference from Transformers via Speculative Decoding") and Chen et al. 2023 ("Accelerating Large Language
    Model Decoding with Speculative Sampling"): x stands with probability min(1, p(x) / q(x)), and where it does not,
    the token comes from max(p - q, 0), normalised. Rows are processed one by one, up to the first rejection.

    Raises ModelError if a row of the target that is needed has NaN, +inf or nothing finite.
    """
    if logits.shape != (len(tokens) + 1, pipeline.vocab_rows) or len(rows) != len(tokens):
        raise ValueError(f"{len(tokens)} guesses with {len(rows)} rows and logits of shape {logits.shape}")
    if pipeline.greedy:
        return _accept_greedy(tokens, logits, pipeline)
    for i, token in enumerate(tokens):
        corrected = _judge_sampled(token, rows[i], logits[i], tokens[:i], pipeline, rng)
        if corrected is not None:
            return Outcome(i, corrected, bonus=False)
    last = logits[len(tokens)]
    return Outcome(len(tokens), draw(pipeline.probabilities(last, tokens), rng), bonus=True)


def _accept_greedy(tokens: Sequence[int], logits: FloatArray, pipeline: LogitsPipeline) -> Outcome:
    # A device that was given these very tokens has judged them: its verdict is this rule's, unless a row has no token.
    verdict = getattr(logits, "verdict", None) if pipeline.bare_argmax else None
    if verdict is not None:
        accepted, best = verdict()
        if best is not None and best < pipeline.token_count:
            return Outcome(accepted, best, bonus=accepted == len(tokens))
    for i, token in enumerate(tokens):
        best = pipeline.argmax_of(logits, i, tokens[:i])
        if best != token:
            return Outcome(i, best, bonus=False)
    return Outcome(len(tokens), pipeline.argmax_of(logits, len(tokens), tokens), bonus=True)


def _judge_sampled(
    token: int,
    row: FloatArray | None,
    logits: FloatArray,
    before: Sequence[int],
    pipeline: LogitsPipeline,
    rng: np.random.Generator,
) -> int | None:
    """None if the guess stands, else a token drawn from the residual."""
    p = pipeline.probabilities(logits, before)
    if not 0 <= token < len(p):
        return draw(p, rng)
    if row is None or not _drawable(row, token, p.shape):
        # One-hot q. Exact whatever the draft did: the guess x stands with p(x), and all others keep their share of p.
        if rng.random() < p[token]:
            return None
        residual = p.copy()
        residual[token] = 0.0
    else:
        total = row.sum(dtype=np.float64)  # 1 but for rounding, which must not tilt the law
        if rng.random() * (row[token] / total) < p[token]:
            return None
        residual = np.maximum(p - np.divide(row, total, dtype=np.float64), 0.0)
    # Without rounding a rejection leaves something over (q(x) > p(x) somewhere means p > q elsewhere).
    return draw(residual if residual.sum() > 0.0 else p, rng)


def _drawable(row: FloatArray, token: int, shape: tuple[int, ...]) -> bool:
    """Whether `token` can have been drawn from `row`."""
    return row.shape == shape and bool(row[token] > 0 and row.min() >= 0 and row.max() < np.inf)
