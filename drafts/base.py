"""The protocol that every draft kind follows.

A `Draft` is the shared thing (weights, or nothing for lookup); a `DraftSession` is its memory of one conversation. The
weights of a `Loadable` draft come and go while the object stays; every other draft is always there. Drafts never see
the target's logits of the tokens being judged, and can only cost speed: whatever they raise is caught by the round,
which goes on without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from drafts.states import HiddenStates
    from edgespec.models.base import DeviceGuesses

FloatArray = npt.NDArray[np.float32]


class Choose(Protocol):
    """How a request picks a draft's tokens; the decoding loop supplies it."""

    @property
    def argmax(self) -> bool:
        """True if a call would return the row's best token as it is (lowest id among equals): no bias, no penalty.

        A draft may then take its own argmax and need not hand its rows over.
        """

    @property
    def temperature(self) -> float | None:
        """t if a call would draw from the softmax of row / t over all real tokens, else None.

        A draft may then draw itself, with `uniform`, and return the rows that it drew from.
        """

    @property
    def row_length(self) -> int:
        """Of the rows q: the rows of the target's head."""

    def uniform(self) -> float:
        """A random number in [0, 1) of the request's own generator for drafts."""

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

    @property
    def guesses(self) -> list[int] | DeviceGuesses:
        """What the target is given: the tokens, which may not have reached the host (see `DeviceProposal`)."""
        return self.tokens

    def __len__(self) -> int:
        return len(self.tokens)


class DraftSession(Protocol):
    """One draft's state for one conversation. Its caches follow the conversation lazily (catch-up inside `propose`)."""

    # Drafts that can lag far behind the conversation are `Lagging` as well.

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


@runtime_checkable
class Lagging(Protocol):
    """What the session of a draft offers besides, if it may have to read much of the conversation before it proposes.

    Reading ahead changes nothing in what is proposed; it only moves work out of `propose`, in pieces of a chosen size.
    """

    def behind(self, tokens: Sequence[int]) -> int:
        """Tokens it has to read before it can propose after `tokens`, beyond the last, which a proposal reads anyway.

        0 where it could not propose at all.
        """

    def catch_up(self, tokens: Sequence[int], limit: int) -> int:
        """Read at most `limit` >= 1 of those now; returns how many are left. Raises as `propose` does."""


class LoadCancelled(Exception):
    """A load was called off; what it had taken is given back."""


class LoadControl(Protocol):
    """The loader's side of a load: where it may be called off, and how fast it reads."""

    def checkpoint(self) -> None:
        """Raise LoadCancelled if the load was called off; may sleep, so that others get processor and storage."""

    def read(self, fd: int, into: memoryview, offset: int) -> None:
        """Fill `into` from position `offset` of an open file, in chunks, at the permitted rate, with checkpoints.

        Raises OSError if reading fails or the file ends early, LoadCancelled.
        """


class Slot(Protocol):
    """A piece of memory that drafts of one working set take in turn."""

    @property
    def buffer(self) -> memoryview:
        """Writable bytes, page-aligned, at the same address as long as the slot exists."""


@runtime_checkable
class Loadable(Protocol):
    """A draft whose weights come and go; the object with its name, manifest and sessions stays.

    `load` and `unload` are called by one thread at a time, which sees to it that `unload` never meets a round that uses
    the draft. A session of a draft that is not loaded has `level` 0 and refuses to propose.
    """

    name: str
    kind: str

    @property
    def slot_bytes(self) -> int:
        """Bytes it takes while loaded, its own buffers beside `slot.buffer` included; known before anything is read."""

    @property
    def buffer_bytes(self) -> int:
        """Of these, what it needs in `slot.buffer` (0: it only counts against the budget)."""

    @property
    def files(self) -> tuple[Path, ...]:
        """What a load reads."""

    @property
    def loaded(self) -> bool:
        """Whether it can propose."""

    def load(self, slot: Slot, control: LoadControl) -> None:
        """Bring the weights in; all or nothing. `slot.buffer` belongs to the draft until `unload`.

        Raises DraftError (damaged, or made for something else), OSError, MemoryError, LoadCancelled.
        """

    def unload(self) -> None:
        """Let go of the weights and of everything in the slot; open sessions keep what is cheap. Idempotent."""
