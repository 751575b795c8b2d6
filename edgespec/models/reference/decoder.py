"""The torch engine: float32 reference on the CPU, and the forward pass that runs on CUDA.

Only this folder and the CUDA engine import torch. Every step works on preallocated buffers (weights, keys and values,
rotary tables) with shapes known before it starts; the only host synchronisation is the copy of the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.errors import ConfigError, ModelError
from edgespec.models.base import ForwardOutput, KVCache, KVPool, Part
from edgespec.models.batching import one_after_another
from edgespec.models.reference.layers import LayerWeights, Step, WeightReader, attention, hidden_keys, mlp, rms_norm
from edgespec.models.rope import rotary_tables
from edgespec.models.weights.opening import WeightFile

# A long prompt runs in pieces of this many tokens, which bounds the [heads, tokens, span] attention scores.
PREFILL_PIECE = 512
# On the CPU buffers grow in such steps (doubling); on CUDA they are whole from the start: graphs keep addresses.
GROWTH_STEP = 256


class TorchCache:
    """Keys and values of one sequence: [layers, kv_heads, allocated, head_dim] each, written in place by position."""

    def __init__(self, owner: TorchDecoder, capacity: int, *, reserve: int) -> None:
        """For `owner`, with room for `reserve` positions now and for `capacity` in the end."""
        self.owner = owner
        self._capacity = capacity
        self._length = 0
        self.keys = self._buffer(reserve)
        self.values = self._buffer(reserve)

    @property
    def length(self) -> int:
        """Number of positions held."""
        return self._length

    @property
    def capacity(self) -> int:
        """Number of positions that fit before `forward` refuses."""
        return self._capacity

    @property
    def allocated(self) -> int:
        """Number of positions that the buffers have room for now."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the positions held so far."""
        layers, heads, _, width = self.keys.shape
        return 2 * layers * heads * width * self._length * self.keys.element_size()

    def crop(self, length: int) -> int:
        """Forget every position >= `length`; returns how many were dropped. ValueError unless 0 <= `length` <= held."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot crop a cache of {self._length} positions to {length}")
        dropped = self._length - length
        self._length = length
        return dropped

    def reserve(self, length: int) -> None:
        """Make the buffers hold `length` <= capacity positions; what they hold is kept."""
        if length <= self.allocated:
            return
        size = min(self._capacity, max(_round_up(length, GROWTH_STEP), 2 * self.allocated))
        held = self._length
        for name in ("keys", "values"):  # one after the other: the old half is free before the other one grows
            grown = self._buffer(size)
            grown[:, :, :held] = getattr(self, name)[:, :, :held]
            setattr(self, name, grown)

    def advance(self, count: int) -> None:
        """Count `count` positions that `forward` has written."""
        self._length += count

    def _buffer(self, positions: int) -> Tensor:
        spec = self.owner.spec
        shape = (spec.num_layers, spec.num_kv_heads, positions, spec.head_dim)
        # Zeros, not empty: a masked score gives weight 0, and 0 times a leftover NaN would still be NaN.
        return torch.zeros(shape, device=self.owner.device, dtype=self.owner.dtype)


class TorchDecoder:
    """A decoder-only transformer in torch. Implements `Decoder`."""

    def __init__(
        self,
        weights: WeightFile,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        positions: int | None = None,
        threads: int | None = None,
    ) -> None:
        """Load all tensors of `weights`, one at a time, to `device` as `dtype`.

        positions: of the longest sequence, at most (and by default) the model's maximum. threads: CPU threads; torch
        has one setting for the process, so it applies to every decoder. Raises ConfigError for a device that is not
        there, ModelError for weights that cannot be read.
        """
        self.spec = weights.spec
        self.weight_format = str(dtype).removeprefix("torch.")
        self.device = _checked_device(device)
        self.dtype = dtype
        self.positions = min(positions or self.spec.max_positions, self.spec.max_positions)
        self._windows: tuple[int | None, ...] = self.spec.windows or (None,) * self.spec.num_layers
        # Attention looks at a multiple of this many positions: exact on the CPU, few distinct shapes for CUDA graphs.
        self._span_step = 1 if self.device.type == "cpu" else GROWTH_STEP
        self._lock = threading.Lock()
        self._closed = False
        if threads is not None:
            torch.set_num_threads(threads)
        reader = WeightReader(weights, self.device, dtype)
        self._embedding = reader.tensor("model.embed_tokens.weight")
        self._layers: list[LayerWeights] = [reader.layer(self.spec, i) for i in range(self.spec.num_layers)]
        self._norm = reader.tensor("model.norm.weight")
        self._head = self._embedding if self.spec.tie_embeddings else reader.tensor("lm_head.weight")
        cos, sin = rotary_tables(self.spec, self.positions)  # float32 even if the weights are not
        self._cos, self._sin = torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""
        if self._closed:
            return 0
        tensors = [self._embedding, self._norm, *(t for layer in self._layers for t in layer.tensors())]
        if self._head is not self._embedding:
            tensors.append(self._head)
        return sum(tensor.nbytes for tensor in tensors)

    def new_cache(self, capacity: int | None = None) -> TorchCache:
        """An empty cache for one sequence of `capacity` positions (default and upper limit: `self.positions`)."""
        capacity = self.positions if capacity is None else min(capacity, self.positions)
        if capacity < 1:
            raise ValueError(f"a cache needs a capacity of at least 1, not {capacity}")
        self._check_open()
        return TorchCache(self, capacity, reserve=min(capacity, GROWTH_STEP) if self.device.type == "cpu" else capacity)

    def new_pool(
        self, nbytes: int, *, sequences: int = 8, context: int | None = None, most_bytes: int | None = None
    ) -> KVPool:
        """Memory for several sequences (see `Decoder.new_pool`); each has a cache of its own."""
        from edgespec.models.reference.pools import new_pool

        context = min(context or self.positions, self.positions)
        return new_pool(self, self._lock, nbytes, sequences, context, most_bytes)

    def forward(
        self, tokens: Sequence[int], cache: KVCache, *, logits: int | None = None, hidden: bool = False
    ) -> ForwardOutput:
        """Append `tokens` to the sequence in `cache`; rows for its last `logits` positions (see `Decoder.forward`)."""
        ids = self._checked_ids(tokens)
        rows = len(ids) if logits is None else logits
        if not 0 <= rows <= len(ids):
            raise ValueError(f"asked for logits of the last {rows} of {len(ids)} tokens")
        if not isinstance(cache, TorchCache) or cache.owner is not self:
            raise ValueError("this cache belongs to another decoder")
        with self._lock, torch.inference_mode():
            self._check_open()
            end = cache.length + len(ids)
            if end > cache.capacity:
                raise ModelError(
                    f"{len(ids)} more tokens after {cache.length} do not fit a cache of {cache.capacity} positions;"
                    " shorten the prompt or ask for a larger context"
                )
            cache.reserve(end)
            states = self._run(torch.from_numpy(ids).to(self.device), cache, keep=len(ids) if hidden else rows)
            last = states[states.shape[0] - rows :]
            output = ForwardOutput(_to_numpy(F.linear(last, self._head)), _to_numpy(states) if hidden else None)
            cache.advance(len(ids))  # last of all: whatever failed before leaves the cache as it was
            return output

    @property
    def batch_slots(self) -> int:
        """Sequences that one forward takes."""
        return 1

    def forward_batch(self, parts: Sequence[Part]) -> list[ForwardOutput]:
        """One forward after the other (see `Decoder.forward_batch`)."""
        return one_after_another(self, parts)

    def prepare_batch(self, slots: int) -> int:
        """There is nothing to prepare."""
        return 0

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        """The input embeddings of `ids`: float32 [n, hidden_size] (see `Decoder.embed`)."""
        return self._rows(lambda: self._embedding, ids)

    def head_rows(self, ids: Sequence[int]) -> np.ndarray:
        """The LM head's rows for `ids`: float32 [n, hidden_size] (see `Decoder.head_rows`)."""
        return self._rows(lambda: self._head, ids)

    def _rows(self, table: Callable[[], Tensor], ids: Sequence[int]) -> np.ndarray:
        checked = self._checked_ids(ids)
        with self._lock, torch.inference_mode():
            self._check_open()
            return _to_numpy(F.embedding(torch.from_numpy(checked).to(self.device), table()))

    def close(self) -> None:
        """Release the weights. Further calls raise ModelError."""
        with self._lock:
            self._closed = True
            self._layers = []
            self._embedding = self._norm = self._head = self._cos = self._sin = torch.empty(0)

    def _run(self, ids: Tensor, cache: TorchCache, *, keep: int) -> Tensor:
        """Final hidden states [keep, hidden_size] of the last `keep` of `ids`, which are appended to the buffers."""
        start, total = cache.length, ids.shape[0]
        kept = []
        for begin in range(0, total, PREFILL_PIECE):
            piece = ids[begin : begin + PREFILL_PIECE]
            first, end = start + begin, start + begin + piece.shape[0]
            positions = torch.arange(first, end, device=self.device)
            span = min(_round_up(end, self._span_step), cache.allocated)
            states = self._step(piece, positions, cache, span)
            kept.append(states[max(0, total - keep - begin) :])
        return torch.cat(kept) if len(kept) > 1 else kept[0]

    def _step(self, ids: Tensor, positions: Tensor, cache: TorchCache, span: int) -> Tensor:
        """One pass over n tokens: ids, positions int64 [n] -> float [n, hidden_size] after the final norm.

        Writes the cache's buffers at `positions`, then looks at their first `span` positions. Tensor operations only;
        shapes depend on n and span alone.
        """
        step = Step(
            positions=positions,
            cos=self._cos[positions][:, None],
            sin=self._sin[positions][:, None],
            span=span,
            masks={window: hidden_keys(positions, span, window) for window in set(self._windows)},
        )
        epsilon = self.spec.rms_norm_eps
        x = F.embedding(ids, self._embedding)
        for index, (layer, window) in enumerate(zip(self._layers, self._windows)):
            normed = rms_norm(x, layer.input_norm, epsilon)
            x = x + attention(normed, layer, cache.keys[index], cache.values[index], step, window, self.spec)
            x = x + mlp(rms_norm(x, layer.mlp_norm, epsilon), layer)
        return rms_norm(x, self._norm, epsilon)

    def _checked_ids(self, tokens: Sequence[int]) -> np.ndarray:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ValueError("token ids must be a flat, non-empty sequence of integers")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.spec.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} is outside the embedding of {self.spec.vocab_size} rows")
        return ids.astype(np.int64)

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("the model has been closed; load it again")


def _checked_device(device: str | torch.device) -> torch.device:
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device "cuda" was asked for, but torch finds no CUDA device here; use device "cpu"')
    return chosen


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.to("cpu", torch.float32).numpy()
