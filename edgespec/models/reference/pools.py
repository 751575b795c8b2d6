"""KV pools of the torch engine on the CPU: every sequence has a cache of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgespec.models.base import KVPool
from edgespec.models.kv.plain import PlainPool, PlainSequence
from edgespec.models.reference.decoder import TorchCache

if TYPE_CHECKING:
    from edgespec.models.reference.decoder import TorchDecoder

Piece = tuple[Tensor, Tensor]  # keys, values: [layers, kv_heads, positions, head_dim]


def new_pool(
    owner: TorchDecoder, lock: threading.Lock, nbytes: int, sequences: int, context: int, most_bytes: int | None
) -> KVPool:
    """A `KVPool` over caches of `owner`."""
    return PlainPool(
        lambda: PlainTorchCache(owner, context),
        lock,
        nbytes,
        position_bytes=owner.spec.position_bytes(),
        sequences=sequences,
        context=context,
        most_bytes=most_bytes,
    )


class PlainTorchCache(PlainSequence, TorchCache):
    """A sequence of a `PlainPool`."""

    def read(self, begin: int, end: int) -> Piece:
        return self.keys[:, :, begin:end].clone(), self.values[:, :, begin:end].clone()

    @torch.inference_mode()
    def append(self, piece: Piece, count: int) -> None:
        begin, end = self.length, self.length + count
        TorchCache.reserve(self, end)
        self.keys[:, :, begin:end] = piece[0][:, :, :count]
        self.values[:, :, begin:end] = piece[1][:, :, :count]
        self.length = end
