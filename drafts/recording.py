"""Recording the target's plain greedy answers with their hidden states: what drafts are judged on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from drafts.base import FloatArray, InvalidLogits
from drafts.evaluate import GreedyChoice, Trajectory
from edgespec.errors import ModelError

if TYPE_CHECKING:
    from edgespec.models.base import Decoder, KVCache

WINDOW = 256  # positions at the prompt's end whose states are kept: what drafts of the usual kind look at
_CHUNK = 256  # prompt tokens of one forward


def record(
    target: Decoder,
    prompt: Sequence[int],
    limit: int,
    *,
    eos_ids: Collection[int] = (),
    token_count: int | None = None,
    window: int = WINDOW,
) -> Trajectory:
    """The answer that the engine would write without drafts, greedily, of at most `limit` >= 1 tokens.

    It ends with the first of `eos_ids`, which is part of it. token_count: ids from here on are padding, None = all rows
    are tokens. Raises ModelError if the target fails, or if prompt and answer may not fit.
    """
    count = min(token_count or target.spec.vocab_size, target.spec.vocab_size)
    choose = GreedyChoice(count)
    tokens = [int(token) for token in prompt]
    cache = target.new_cache(len(tokens) + limit)
    start = max(len(tokens) - window, 0)
    states: list[FloatArray | None] = []
    feed, answer = tokens, []
    while True:
        logits, kept = _forward(target, cache, feed, start)
        states += kept
        try:
            answer.append(choose(logits, ())[0])
        except InvalidLogits as error:
            raise ModelError(f"The target produced {error}; its weights or its weight format are damaged.") from error
        if answer[-1] in eos_ids or len(answer) >= limit:
            break
        feed = answer[-1:]
    known = [state for state in states if state is not None]
    hidden = np.concatenate(known) if known and len(known) == len(states) else None
    return Trajectory(tuple(tokens), tuple(answer), limit, count, hidden, start)


def _forward(
    target: Decoder, cache: KVCache, tokens: list[int], start: int
) -> tuple[FloatArray, list[FloatArray | None]]:
    """Feed `tokens` in chunks: the last one's logits row, and copies of the states of positions from `start` on."""
    kept: list[FloatArray | None] = []
    for begin in range(0, len(tokens), _CHUNK):
        part, at = tokens[begin : begin + _CHUNK], cache.length
        output = target.forward(part, cache, logits=int(begin + _CHUNK >= len(tokens)), hidden=True)
        if at + len(part) > start:
            kept.append(None if output.hidden is None else np.array(output.hidden[max(start - at, 0) :], np.float32))
    return output.logits[0], kept
