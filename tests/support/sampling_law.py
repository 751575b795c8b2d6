"""The law of one sampled token, written as plainly as possible and independently of the product's code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from edgespec.decoding.params import SamplingParams


def reference_logits(
    params: SamplingParams,
    row: Sequence[float],
    *,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    token_count: int | None = None,
    ending: Iterable[int] = (),
) -> list[float]:
    """`row` after masks, biases and penalties."""
    logits = [float(x) for x in row]
    for i in range(len(logits)):
        if token_count is not None and i >= token_count:
            logits[i] = -math.inf
        logits[i] += params.logit_bias.get(i, 0.0)
        if i in prompt or i in generated:
            factor = 1 / params.repetition_penalty if logits[i] > 0 else params.repetition_penalty
            logits[i] *= factor
        count = list(generated).count(i)
        logits[i] -= params.frequency_penalty * count + (params.presence_penalty if count else 0.0)
        if i in ending and len(generated) < params.min_new_tokens:
            logits[i] = -math.inf
    return logits


def reference_law(params: SamplingParams, row: Sequence[float], **context: object) -> list[float]:
    """The probabilities of the next token, for the same arguments as `reference_logits`."""
    logits = reference_logits(params, row, **context)  # type: ignore[arg-type]
    best_first = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature < 1e-6:
        return [float(i == best_first[0]) for i in range(len(logits))]
    top = logits[best_first[0]]
    weights = [math.exp((x - top) / params.temperature) for x in logits]
    kept = best_first[: params.top_k] if params.top_k else best_first
    total = sum(weights[i] for i in kept)
    nucleus: list[int] = []
    share = 0.0
    for i in kept:
        if share >= params.top_p * total - 1e-12 * total and params.top_p < 1:
            break
        nucleus.append(i)
        share += weights[i]
    kept = [i for i in nucleus if weights[i] >= params.min_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]
