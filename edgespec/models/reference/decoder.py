"""The float32 reference: plain torch on the CPU, against which the other engines are compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.models.base import FloatArray, ForwardOutput, KVCache, KVPool, Part
from edgespec.models.batching import check_slots, one_after_another
from edgespec.models.checks import Ids, checked, closed, positions_within, token_ids
from edgespec.models.kv.sequence import SequenceCache
from edgespec.models.reference.layers import LayerWeights, Step, WeightReader, attention, hidden_keys, mlp, rms_norm
from edgespec.models.rope import rotary_tables
from edgespec.models.weights.opening import WeightFile

PREFILL_PIECE = 512  # tokens of a longer forward that run at once: it bounds the [heads, tokens, span] attention scores
GROWTH_STEP = 256  # positions; buffers are a multiple of it, and at least doubled, until they are the whole capacity


class TorchCache(SequenceCache):
    """Keys and values float32 [layers, kv_heads, allocated, head_dim] of one sequence, written in place by position."""

    owner: TorchDecoder

    def __init__(self, owner: TorchDecoder, capacity: int) -> None:
        super().__init__(owner, capacity, owner.spec.position_bytes())
        first = min(capacity, GROWTH_STEP)
        self.keys, self.values = self._buffer(first), self._buffer(first)

    @property
    def allocated(self) -> int:
        """Number of positions that the buffers have room for now."""
        return self.keys.shape[2]

    def reserve(self, length: int) -> None:
        """Make the buffers hold `length` <= capacity positions; what they hold is kept."""
        super().reserve(length)
        if length <= self.allocated:
            return
        size = min(self.capacity, max(-(-length // GROWTH_STEP) * GROWTH_STEP, 2 * self.allocated))
        held = min(self.length, self.allocated)  # less where the length was set only to measure
        for name in ("keys", "values"):  # one after the other: the old half is free before the other one grows
            grown = self._buffer(size)
            grown[:, :, :held] = getattr(self, name)[:, :, :held]
            setattr(self, name, grown)

    def _buffer(self, positions: int) -> Tensor:
        spec = self.owner.spec
        # Zeros, not empty: a masked score gives weight 0, and 0 times a leftover NaN would still be NaN.
        return torch.zeros((spec.num_layers, spec.num_kv_heads, positions, spec.head_dim))


class TorchDecoder:
    """A `Decoder` in plain torch, float32."""

    weight_format = "float32"
    batch_slots = 1

    def __init__(self, weights: WeightFile, *, positions: int | None = None, threads: int | None = None) -> None:
        """Load all tensors of `weights`, one at a time.

        positions: of the longest sequence, at most (and by default) the model's maximum. threads: CPU threads; torch
        has one setting for the process, so it applies to every decoder. Raises ModelError for weights that cannot be
        read.
        """
        self.spec = weights.spec
        self.positions = positions_within(positions, self.spec.max_positions)
        self._windows: tuple[int | None, ...] = self.spec.windows or (None,) * self.spec.num_layers
        self._lock = threading.Lock()
        self._closed = False
        if threads is not None:
            torch.set_num_threads(threads)
        reader = WeightReader(weights, torch.device("cpu"), torch.float32)
        self._embedding = reader.tensor("model.embed_tokens.weight")
        self._layers: list[LayerWeights] = [reader.layer(self.spec, i) for i in range(self.spec.num_layers)]
        self._norm = reader.tensor("model.norm.weight")
        self._head = self._embedding if self.spec.tie_embeddings else reader.tensor("lm_head.weight")
        self._cos, self._sin = map(torch.from_numpy, rotary_tables(self.spec, self.positions))

    @property
    def nbytes(self) -> int:
        if self._closed:
            return 0
        tensors = [self._embedding, self._norm, *(t for layer in self._layers for t in layer.tensors())]
        if self._head is not self._embedding:
            tensors.append(self._head)
        return sum(tensor.nbytes for tensor in tensors)

    def new_cache(self, capacity: int | None = None) -> TorchCache:
        self._check_open()
        return TorchCache(self, positions_within(capacity, self.positions))

    def new_pool(
        self, nbytes: int, *, sequences: int = 8, context: int | None = None, most_bytes: int | None = None
    ) -> KVPool:
        """See `Decoder.new_pool`; each sequence has a cache of its own."""
        from edgespec.models.reference.pools import new_pool

        self._check_open()
        return new_pool(self, self._lock, nbytes, sequences, positions_within(context, self.positions), most_bytes)

    def forward(
        self, tokens: Sequence[int], cache: KVCache, *, logits: int | None = None, hidden: bool = False
    ) -> ForwardOutput:
        with self._lock, torch.inference_mode():
            self._check_open()
            ids, own, rows = self._checked(Part(tokens, cache, logits, hidden))
            end = own.length + len(ids)
            own.reserve(end)
            states = self._run(torch.from_numpy(ids), own, keep=len(ids) if hidden else rows)
            last = states[states.shape[0] - rows :]
            output = ForwardOutput(F.linear(last, self._head).numpy(), states.numpy() if hidden else None)
            own.length = end  # last of all: whatever failed before leaves the cache as it was
            return output

    def forward_batch(self, parts: Sequence[Part]) -> list[ForwardOutput]:
        self._check_open()
        return one_after_another(self, parts, self._checked)

    def prepare_batch(self, slots: int) -> int:
        check_slots(slots)
        return 0

    def embed(self, ids: Sequence[int]) -> FloatArray:
        return self._rows(lambda: self._embedding, ids)

    def head_rows(self, ids: Sequence[int]) -> FloatArray:
        return self._rows(lambda: self._head, ids)

    def _rows(self, table: Callable[[], Tensor], ids: Sequence[int]) -> FloatArray:
        rows = torch.from_numpy(token_ids(ids, self.spec.vocab_size))
        with self._lock, torch.inference_mode():
            self._check_open()
            found: FloatArray = F.embedding(rows, table()).numpy()
            return found

    def close(self) -> None:
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
            states = self._step(piece, start + begin, cache)
            kept.append(states[max(0, total - keep - begin) :])
        return torch.cat(kept) if len(kept) > 1 else kept[0]

    def _step(self, ids: Tensor, start: int, cache: TorchCache) -> Tensor:
        """One pass over ids int64 [n] at positions from `start` on: float32 [n, hidden_size] after the final norm."""
        end = start + ids.shape[0]
        positions = torch.arange(start, end)
        step = Step(
            positions=positions,
            cos=self._cos[start:end, None],
            sin=self._sin[start:end, None],
            span=end,
            masks={window: hidden_keys(positions, end, window) for window in set(self._windows)},
        )
        epsilon = self.spec.rms_norm_eps
        x = F.embedding(ids, self._embedding)
        for index, (layer, window) in enumerate(zip(self._layers, self._windows)):
            normed = rms_norm(x, layer.input_norm, epsilon)
            x = x + attention(normed, layer, cache.keys[index], cache.values[index], step, window, self.spec)
            x = x + mlp(rms_norm(x, layer.mlp_norm, epsilon), layer)
        return rms_norm(x, self._norm, epsilon)

    def _checked(self, part: Part) -> tuple[Ids, TorchCache, int]:
        return checked(part, TorchCache, self)

    def _check_open(self) -> None:
        if self._closed:
            raise closed()
