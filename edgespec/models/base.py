"""What the decoding loop and the drafts need from an engine: a `Decoder` and its `KVCache`.

Both engines (ONNX Runtime on CPU, torch) implement these two protocols; nothing above this module knows which one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

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

        `length` > `self.length` is a ValueError.
        """


class Decoder(Protocol):
    """A decoder-only transformer that is ready to run.

    `forward` may be called from any thread; calls are serialised.
    """

    spec: ModelSpec
    weight_format: str  # "float32", "int8" or "exact" (the file's own blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache for one sequence; `capacity` defaults to the model's maximum.

        Several may live side by side.
        """

    def forward(
        self, tokens: Sequence[int], cache: KVCache, *, logits: int | None = None, hidden: bool = False
    ) -> ForwardOutput:
        """Append `tokens` (n >= 1) to the sequence in `cache` and return rows for its last `logits` positions.

        logits: None = all n, 0 = none (shape [0, vocab_rows]); hidden: also return hidden states of all n.
        Raises ModelError if the tokens do not fit the cache, ValueError for ids outside the embedding.
        If it raises, `cache.length` is as before.
        """

    def embed(self, ids: Sequence[int]) -> FloatArray:
        """The input embeddings of `ids`: float32 [n, hidden_size], as the first layer gets them.

        Raises ValueError for ids outside the embedding, ModelError if they cannot be read. May run beside a `forward`.
        """

    def head_rows(self, ids: Sequence[int]) -> FloatArray:
        """The LM head's rows for `ids`: float32 [n, hidden_size]; a hidden state times one is the token's logit.

        Raises as `embed`.
        """

    def close(self) -> None:
        """Release the weights. Further calls raise."""
