"""The protocol that every draft kind follows.

A `Draft` is the shared, loaded thing (weights, or nothing for lookup); a `DraftSession` is its memory of one
conversation. Drafts never see the target's logits of the tokens being judged, and can only cost speed: whatever they
raise is caught by the round, which goes on without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from drafts.states import HiddenStates

FloatArray = npt.NDArray[np.float32]


class Choose(Protocol):
    """How a request picks a draft's tokens; the decoding loop supplies it."""

    @property
    def argmax(self) -> bool:
        """True if a call would return the row's best token as it is (lowest id among equals): no bias, no penalty.

        A draft may then take its own argmax and need not hand its rows over.
        """

    def __call__(self, row: FloatArray, proposed: Sequence[int], /) -> tuple[int, FloatArray | None]:
        """(token, q) for the draft's float32 logits row, after the tokens `proposed` in this block.

        Applies the request's sampling parameters (after masking ids that are not tokens of the target), draws a token,
        and returns the very row q (float32 [target vocab], sums to 1) it was drawn from, or None where the draw was an
        argmax (q is one-hot). Raises InvalidLogits for rows with NaN, +inf, or no finite value.
        """


class InvalidLogits(Exception):
    """A draft's logits row cannot be sampled from (NaN, +inf, nothing finite)."""


@dataclass(slots=True)
class Proposal:
    """Up to gamma guessed tokens; `rows[i]` is the distribution that `tokens[i]` was drawn from (None = one-hot).

    confidences: the draft's estimate that each token is accepted, if those before it are; empty if it has none.
    """

    tokens: list[int] = field(default_factory=list)
    rows: list[FloatArray | None] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


class DraftSession(Protocol):
    """One draft's state for one conversation. Its caches follow the conversation lazily (catch-up inside `propose`)."""

    def level(self, tokens: Sequence[int]) -> int:
        """How much the draft has to go on for the token after `tokens`, before it proposes: 0 = nothing to propose.

        For lookup: the length of the matched suffix. For model drafts: 1 if it can run (0 beyond its own context).
        The planner keeps one acceptance estimate per (draft, level). Cheap, no model call.
        """

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        """Guess at most `gamma` >= 1 tokens that follow `tokens` (the whole conversation so far, ids of the target).

        A draft that knows its confidence ends the block before the first token at which the product of confidences
        falls below `floor`; that may leave no token at all. Others ignore `floor`.
        """

    def crop(self, length: int) -> None:
        """The conversation was cut (or edited) to its first `length` tokens; forget everything after them."""

    def close(self) -> None:
        """Release this conversation's caches."""


class Draft(Protocol):
    """A draft that can be used with one target.

    One that runs no model, so that asking it costs next to nothing, says so by an attribute `free = True`.
    """

    name: str
    kind: str  # "ngram" | "phrases" | "head" | "standalone"
    reads_hidden: bool  # whether `open` needs the target's hidden states

    @property
    def nbytes(self) -> int:
        """Bytes of its weights in memory."""

    def open(self, states: HiddenStates | None = None) -> DraftSession:
        """State for a new conversation.

        states: the target's hidden states, kept up to date by the conversation; drafts only read them. When `level` and
        `propose` are called, those of positions up to `len(tokens) - 2` are right; later ones are of rejected guesses.
        """

    def close(self) -> None:
        """Release the weights."""
