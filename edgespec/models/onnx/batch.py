"""Several sequences in one forward: their buffers bound to the slots of the batch graph (see batch_graph).

Binding a sequence's buffers takes a fraction of a millisecond, so a sequence keeps its slot while it stays in the
batch. Slots without a sequence are bound to a tiny buffer, never to the memory of one that has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgespec.models.base import FloatArray, ForwardOutput
from edgespec.models.checks import Ids
from edgespec.models.onnx.binding import bind, sized, with_company
from edgespec.models.onnx.session import open_batch_session
from edgespec.models.spec import ModelSpec

if TYPE_CHECKING:
    from edgespec.models.onnx.decoder import OnnxCache

_KEPT_ROWS = 8  # logits rows for each slot whose buffer is kept between calls
_BOUND_BYTES = 16 << 10  # that ONNX Runtime was seen to take for one slot of one layer
_LEAST = 2  # rows of a slot that is not used: attention never computes a single one, see graph


class Share(NamedTuple):
    """A part that was checked: ids int64 [n] to append to `cache`, of whose last `wanted` rows logits are returned."""

    ids: Ids
    cache: OnnxCache
    wanted: int
    hidden: bool


class BatchRunner:
    """Runs up to `slots` sequences at once. Calls must not overlap."""

    def __init__(
        self, folder: Path, spec: ModelSpec, slots: int, rotary: tuple[FloatArray, FloatArray], threads: int | None
    ) -> None:
        """For the converted graph in `folder`. Raises ModelError if it cannot be loaded."""
        self.slots = slots
        self._session, packed = open_batch_session(folder, slots, threads)
        self._io = self._session.io_binding()
        self._rotary = rotary  # keeps the bound memory alive
        self._logits = np.empty((_KEPT_ROWS * slots, spec.vocab_size), np.float32)
        self._hidden = np.empty((_KEPT_ROWS * slots, spec.hidden_size), np.float32)
        self._held: list[weakref.ref[OnnxCache] | None] = [None] * slots  # whose buffers are bound; None: the dummy's
        shape = (1, spec.num_kv_heads, _LEAST, spec.head_dim)
        self._dummy = [np.zeros(shape, np.float32)] * (2 * spec.num_layers)
        self._counts = np.zeros(slots, np.int64)
        self._seqlens = np.zeros((slots, 1), np.int32)
        self._totals = np.zeros((slots, 1), np.int32)
        kept = self._logits.nbytes + self._hidden.nbytes
        self.nbytes = packed + kept + slots * spec.num_layers * _BOUND_BYTES  # without a forward's own workspace
        for name, array in (("cos", rotary[0]), ("sin", rotary[1]), ("counts", self._counts)):
            bind(self._io.bind_input, name, array)
        for slot in range(slots):
            bind(self._io.bind_input, f"seqlens_k_{slot}", self._seqlens[slot])
            bind(self._io.bind_input, f"total_length_{slot}", self._totals[slot])
            self._bind_buffers(slot, self._dummy)

    def run(self, shares: Sequence[Share]) -> list[ForwardOutput]:
        """The outputs of `shares` (at most `slots`, of different caches), valid until the next call.

        Writes the caches' buffers, not their lengths. Raises what ONNX Runtime raises.
        """
        slots = self._seat([share.cache for share in shares])
        starts = self._bind_rows(shares, slots)
        self._session.run_with_iobinding(self._io)
        outputs, at = [], 0
        for share, start in zip(shares, starts, strict=True):
            hidden = self._hidden[start : start + len(share.ids)] if share.hidden else None
            outputs.append(ForwardOutput(self._logits[at : at + share.wanted], hidden))
            at += share.wanted
        return outputs

    def _seat(self, caches: Sequence[OnnxCache]) -> list[int]:
        """The slot of each cache, bound to its buffers; those that stay keep theirs, slots of others become free."""
        held = [None if ref is None else ref() for ref in self._held]
        places = {id(cache): slot for slot, cache in enumerate(held) if cache is not None}
        slots = [places.get(id(cache), -1) for cache in caches]
        taken = set(slots)
        free = [slot for slot in range(self.slots) if slot not in taken]
        for index, slot in enumerate(slots):
            if slot < 0:
                slots[index] = slot = free.pop(0)
                self._bind_buffers(slot, caches[index].buffers)
                self._held[slot] = weakref.ref(caches[index])
        for slot in free:
            if self._held[slot] is not None:
                self._bind_buffers(slot, self._dummy)
                self._held[slot] = None
        return slots

    def _bind_buffers(self, slot: int, buffers: Sequence[FloatArray]) -> None:
        for index, buffer in enumerate(buffers):
            kind, layer = ("key", "value")[index % 2], index // 2
            bind(self._io.bind_input, f"past_{kind}_{layer}_{slot}", buffer)
            bind(self._io.bind_output, f"present_{kind}_{layer}_{slot}", buffer)

    def _bind_rows(self, shares: Sequence[Share], slots: Sequence[int]) -> list[int]:
        """Bind what changes from call to call; returns each share's first row. Rows lie in the order of the slots."""
        seated = dict(zip(slots, shares, strict=True))
        starts: dict[int, int] = {}
        ids: list[Ids] = []
        spread: list[int] = []
        gathered: list[int] = []
        rows = 0
        for slot in range(self.slots):
            share = seated.get(slot)
            count, length = (len(share.ids), share.cache.length) if share else (0, 0)
            computed = with_company(count) or _LEAST
            self._counts[slot] = computed
            self._seqlens[slot] = length + computed - 1
            self._totals[slot] = length + computed
            if share:
                ids.append(share.ids)
                starts[slot] = rows
            gathered += range(len(spread), len(spread) + count)
            company = rows + count - 1 if count else 0  # any row will do
            spread += [*range(rows, rows + count), *[company] * (computed - count)]
            rows += count
        firsts = [starts[slot] for slot in slots]
        wanted = [
            row
            for share, first in zip(shares, firsts, strict=True)
            for row in range(first + len(share.ids) - share.wanted, first + len(share.ids))
        ]
        self._logits = sized(self._logits, len(wanted), _KEPT_ROWS * self.slots)
        self._hidden = sized(self._hidden, rows, _KEPT_ROWS * self.slots)
        self._ids = np.concatenate(ids)[None]  # these arrays must live until the graph has run
        self._indices = [np.array(numbers, np.int64) for numbers in (wanted, spread, gathered)]
        bind(self._io.bind_input, "input_ids", self._ids)
        for name, numbers in zip(("rows", "spread", "gathered"), self._indices, strict=True):
            bind(self._io.bind_input, name, numbers)
        bind(self._io.bind_output, "logits", self._logits[: len(wanted)])
        bind(self._io.bind_output, "hidden", self._hidden[:rows])
        return firsts
