"""The protocol that every draft kind follows.

A `Draft` is the shared, loaded thing (weights, or nothing for lookup); a `DraftSession` is its memory of one
conversation. Drafts never see the target's logits of the tokens being judged, and can only cost speed: whatever they
raise is caught by the round, which goes on without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# choose(logits_row, proposed_so_far) -> (token, q). The decoding loop supplies it: it applies the request's sampling
# parameters to the draft's float32 logits row (after masking ids that are not tokens of the target), draws a token, and
# returns the very row q (float32 [target vocab], sums to 1) it was drawn from, or None where the draw was an argmax
# (q is one-hot). It raises InvalidLogits for rows with NaN, +inf, or no finite value.
Choose = Callable[[FloatArray, Sequence[int]], tuple[int, FloatArray | None]]


class InvalidLogits(Exception):
    """A draft's logits row cannot be sampled from (NaN, +inf, nothing finite)."""


@dataclass(slots=True)
class Proposal:
    """Up to gamma guessed tokens; `rows[i]` is the distribution that `tokens[i]` was drawn from (None = one-hot)."""

    tokens: list[int] = field(default_factory=list)
    rows: list[FloatArray | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


class DraftSession(Protocol):
    """One draft's state for one conversation. Its caches follow the conversation lazily (catch-up inside `propose`)."""

    def level(self, tokens: Sequence[int]) -> int:
        """How much the draft has to go on for the token after `tokens`, before it proposes: 0 = nothing to propose.

        For lookup: the length of the matched suffix. For model drafts: 1 if it can run (0 beyond its own context).
        The planner keeps one acceptance estimate per (draft, level). Cheap, no model call.
        """

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose) -> Proposal:
        """Guess at most `gamma` >= 1 tokens that follow `tokens` (the whole conversation so far, ids of the target)."""

    def crop(self, length: int) -> None:
        """The conversation was cut (or edited) to its first `length` tokens; forget everything after them."""

    def close(self) -> None:
        """Release this conversation's caches."""


class Draft(Protocol):
    """A draft that can be used with one target."""

    name: str
    kind: str  # "ngram" | "head" | "standalone"

    @property
    def nbytes(self) -> int:
        """Bytes of its weights in memory."""

    def open(self) -> DraftSession:
        """State for a new conversation."""

    def close(self) -> None:
        """Release the weights."""
