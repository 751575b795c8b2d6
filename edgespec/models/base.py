"""What the decoding loop and the drafts need from an engine: a `Decoder` and its `KVCache`.

Both engines (ONNX Runtime on CPU, torch) implement these two protocols; nothing above this module knows which one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgespec.models.kv.blocks import Match, PoolStats
from edgespec.models.spec import ModelSpec

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Result of one forward pass over `n` new tokens.

    logits: float32 [k, vocab_rows], the rows of the last `k` of the `n` positions (`k` as asked for).
    hidden: float32 [n, hidden_size] after the final norm (what the LM head sees), or None unless asked for.

    Both may be views of buffers that the next `forward` on the same cache overwrites: copy what must live longer.
    """

    logits: FloatArray
    hidden: FloatArray | None = None


class KVCache(Protocol):
    """Keys and values of one sequence.

    All positions are kept (sliding windows are masks), so any rollback is possible.
    """

    @property
    def length(self) -> int:
        """Number of positions held."""

    @property
    def capacity(self) -> int:
        """Number of positions that fit before `forward` refuses."""

    @property
    def nbytes(self) -> int:
        """Bytes that the positions held so far occupy (not the reserved address space)."""

    def crop(self, length: int) -> int:
        """Forget every position >= `length`; returns how many were dropped.

        Raises ValueError unless 0 <= `length` <= `self.length`.
        """

    def reserve(self, length: int) -> None:
        """Make the positions below `length` <= `capacity` writable; what is held stays as it is.

        Raises ModelError beyond the capacity. `forward` calls it before it writes; what it raises, `forward` raises.
        (A forward may also overwrite the position after its last, beyond `length`: whoever shares memory between caches
        must not share that.)
        """


class PooledKV(KVCache, Protocol):
    """A sequence of a `KVPool`. Using it after `release` or the pool's `close` is a ModelError."""

    def share(self, ids: Sequence[int]) -> None:
        """`ids` are the tokens held, from the first on, that others may take over now: full blocks of them."""

    def release(self, ids: Sequence[int] = ()) -> None:
        """The sequence is over; its memory goes back, what it holds of `ids` stays known until the room is needed.

        Idempotent. One that is dropped without this is given back soon, and nothing of it stays known.
        """


class KVPool(Protocol):
    """Memory for the keys and values of several sequences, in blocks of which they share those that are the same.

    A sequence is promised its blocks when it begins and takes them as it grows: one that keeps to its promise never
    lacks memory. Calls are serialised; properties may be read from any thread.
    """

    block_size: int  # positions
    block_bytes: int

    @property
    def stats(self) -> PoolStats:
        """Blocks by what they are, as of the last change."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are taken now, once however many sequences share it (resident memory counts each)."""

    @property
    def most_tokens(self) -> int:
        """Positions of the longest sequence that fits if nothing else runs, without what `grow` has added."""

    def match(self, ids: Sequence[int]) -> Match:
        """What is known of the beginning of a prompt; its last token is never counted, since its row is needed."""

    def room(self, tokens: int, match: Match = ...) -> bool:
        """Whether `new_cache` with the same arguments would succeed now."""

    def new_cache(self, tokens: int, match: Match = ...) -> PooledKV:
        """A sequence of up to `tokens` positions that begins with what was matched (its `length`).

        Raises NoRoom, and changes nothing, if that cannot be promised now.
        """

    def grow(self, nbytes: int) -> int:
        """Have up to `nbytes` more, in whole blocks; returns how many bytes were added."""

    def can_shrink(self, nbytes: int) -> bool:
        """Whether `shrink` could give so much back now."""

    def shrink(self, nbytes: int) -> int:
        """Give at least `nbytes` back, in whole blocks, or nothing (0) if promises do not allow it. Returns the bytes.

        Running sequences go on; what they hold may be moved, so no forward runs meanwhile.
        """

    def close(self) -> None:
        """Give everything back. Idempotent."""


class DeviceGuesses(Protocol):
    """A draft's guesses that lie on a device. `known + guesses` may be the tokens of a forward that `takes` them there.

    Such a decoder has a method `takes(guesses) -> bool`; its logits have `verdict()`, which is the greedy rule's answer
    and brings the guesses with it, and `wait()`.
    """

    def __len__(self) -> int: ...

    def __radd__(self, known: list[int], /) -> Sequence[int]: ...


class Part(NamedTuple):
    """One sequence's share of a batched forward; the fields are those of `Decoder.forward`."""

    tokens: Sequence[int]
    cache: KVCache
    logits: int | None = None
    hidden: bool = False


class Decoder(Protocol):
    """A decoder-only transformer that is ready to run.

    `forward` may be called from any thread; calls are serialised.
    """

    spec: ModelSpec
    weight_format: str  # "float32", "int8" or "exact" (the file's own blocks)

    @property
    def batch_slots(self) -> int:
        """Sequences that one forward takes, see `prepare_batch`; 1: `forward_batch` runs them one after the other."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache for one sequence of `capacity` positions, at most (and by default) as many as the model has.

        Several may live side by side. Raises ValueError for a capacity below 1.
        """

    def new_pool(
        self, nbytes: int, *, sequences: int = 8, context: int | None = None, most_bytes: int | None = None
    ) -> KVPool:
        """Memory of `nbytes` for up to `sequences` at once, each of at most `context` positions.

        most_bytes: as far as the pool may ever grow, None = not at all. Raises MemoryBudgetError if `nbytes` are less
        than one block, ValueError for a context below 1.
        """

    def forward(
        self, tokens: Sequence[int], cache: KVCache, *, logits: int | None = None, hidden: bool = False
    ) -> ForwardOutput:
        """Append `tokens` (n >= 1) to the sequence in `cache` and return rows for its last `logits` positions.

        logits: None = all n, 0 = none (shape [0, vocab_rows]); hidden: also return hidden states of all n.
        Raises ModelError if the tokens do not fit the cache, ValueError for ids that the model does not have, for other
        rows than 0 to n, and for a cache of another decoder; every engine in the same words (`models.checks`).
        If it raises, `cache.length` is as before.
        """

    def forward_batch(self, parts: Sequence[Part]) -> list[ForwardOutput]:
        """What `forward` would return for each part alone, the same bits; each cache grows by its part's tokens.

        Parts may differ in everything, a long piece of a prompt beside single tokens costs no padding. Any number of
        them if `batch_slots` is 1, else at most `batch_slots`. All outputs stay valid until the next forward.
        Raises ValueError for a cache that occurs twice, and for too many parts if they cannot be several forwards. What
        is wrong with one of several parts is a `batching.PartError`, which says with which; of a single part, what
        `forward` raises. If it raises, every `cache.length` is as before.
        """

    def prepare_batch(self, slots: int) -> int:
        """Make `forward_batch` take up to `slots` (2, 4, 8 or 16) sequences in one forward.

        Returns the bytes of memory this took, again and again if called again; 0 where there is nothing to prepare.
        1 gives them back. Raises ValueError for other numbers, ModelError if it cannot be made; then sequences run one
        after the other.
        """

    def embed(self, ids: Sequence[int]) -> FloatArray:
        """The input embeddings of `ids` (n >= 1): float32 [n, hidden_size], as the first layer gets them.

        Raises ValueError as `forward`, ModelError if they cannot be read. May run beside a `forward`.
        """

    def head_rows(self, ids: Sequence[int]) -> FloatArray:
        """The LM head's rows for `ids`: float32 [n, hidden_size]; a hidden state times one is the token's logit.

        Raises as `embed`.
        """

    def close(self) -> None:
        """Release the weights. Further calls raise ModelError, but for this one."""
