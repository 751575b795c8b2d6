"""From the moments at which tokens appeared to rates, the same way for every contender.

The clock starts when the prompt is handed over. An *emission* is a moment and how many tokens appeared at it. Tokens
are counted as token ids, never as text, so that every contender has the same counter.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Emission = tuple[float, int]  # seconds since the start, tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """One measured answer.

    first_token_s: seconds until the first token of any kind, None for an empty answer.
    decode_tokens / decode_s: tokens after the first emission, and the seconds from the first to the last emission.
    Tokens that came with the first emission belong to the prefill: nothing says how long they alone took.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    first_token_s: float | None
    decode_tokens: int
    decode_s: float
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens over the time to the first token."""
        return self.prompt_tokens / self.first_token_s if self.first_token_s else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first emission; None where there was no second one."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None


def measure(
    prompt_tokens: int,
    token_ids: Sequence[int],
    emissions: Iterable[Sequence[float]],
    *,
    limit: int,
    eos_ids: Iterable[int] = (),
    stats: dict[str, Any] | None = None,
) -> Answer:
    """Turn one contender's report into an Answer; what lies beyond `limit` or behind an end token is not counted.

    Raises ValueError where the report contradicts itself, so that no rate is made from it.
    """
    events = [(float(seconds), int(count)) for seconds, count in emissions if count]
    if sum(count for _, count in events) != len(token_ids):
        raise ValueError("the emissions do not add up to the answer's tokens")
    if any(later[0] < earlier[0] for earlier, later in itertools.pairwise(events)) or any(
        count < 0 for _, count in events
    ):
        raise ValueError("the emissions are not in order")
    kept = _kept_length(token_ids, limit, frozenset(eos_ids))
    used: list[Emission] = []
    left = kept
    for seconds, count in events:
        if left <= 0:
            break
        used.append((seconds, min(count, left)))
        left -= count
    return Answer(
        token_ids=tuple(token_ids[:kept]),
        prompt_tokens=prompt_tokens,
        first_token_s=used[0][0] if used else None,
        decode_tokens=sum(count for _, count in used[1:]),
        decode_s=used[-1][0] - used[0][0] if used else 0.0,
        stats=stats or {},
    )


def _kept_length(token_ids: Sequence[int], limit: int, eos_ids: frozenset[int]) -> int:
    for index, token in enumerate(token_ids[:limit]):
        if token in eos_ids:
            return index + 1
    return min(len(token_ids), limit)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of some values, and how many there were."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Spread of the values that exist, or None if none does."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known), len(known)) if known else None


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ (the shorter one's end counts), None if they are equal."""
    for index, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
