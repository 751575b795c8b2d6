"""KV pools of the CUDA engine: the books of `PlainPool` over caches that share the decoder's blocks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgespec.models.base import KVPool
from edgespec.models.cuda.kv import PagedCache
from edgespec.models.cuda.memory import return_memory
from edgespec.models.kv.plain import PlainPool, PlainSequence

if TYPE_CHECKING:
    from edgespec.models.cuda.decoder import CudaDecoder


def new_pool(
    owner: CudaDecoder, lock: threading.Lock, nbytes: int, sequences: int, context: int, most_bytes: int | None
) -> KVPool:
    """A `KVPool` over caches of `owner`."""
    return PagedKVPool(
        owner,
        lambda: PlainPagedCache(owner, owner.pool, context, owner.position_bytes),
        lock,
        nbytes,
        position_bytes=owner.position_bytes,
        sequences=sequences,
        context=context,
        most_bytes=most_bytes,
    )


class PagedKVPool(PlainPool):
    """A `PlainPool` that gives the decoder's slabs back when the sequences that filled them are over.

    One is spared, for the next sequence. What runs keeps its place then, so a slab stays as long as one block of it is
    in use; `shrink` moves what runs together, and gives all slabs back that are empty after it.
    """

    def __init__(self, owner: CudaDecoder, make: Callable[[], Any], lock: threading.Lock, *sizes: Any, **more: Any):
        super().__init__(make, lock, *sizes, **more)
        self._owner = owner

    @property
    def nbytes(self) -> int:
        """Bytes on the device: all slabs of the decoder, and the copies of what finished texts left."""
        return self._owner.pool.nbytes + self.stats.cached * self.block_bytes

    def shrink(self, nbytes: int) -> int:
        if self.can_shrink(nbytes) and not self._compact():
            return 0  # nothing was given back, so nothing may be taken
        given = super().shrink(nbytes)
        if given:
            self.trim()
            return_memory(self._owner.device)
        return given

    def close(self) -> None:
        super().close()
        self.trim()

    def trim(self, spare: int = 0) -> None:
        """Drop slabs of which nothing is in use."""
        with self._decoder_lock:
            self._owner.pool.trim(spare)

    def _compact(self) -> bool:
        with self._decoder_lock:
            return self._owner.steps.tables.compact()


class PlainPagedCache(PlainSequence, PagedCache):
    """A sequence of a `PlainPool`."""

    @torch.inference_mode()
    def read(self, begin: int, end: int) -> Tensor:
        """A copy [2 (keys, values), layers, kv_heads, end - begin, head_dim]."""
        return torch.cat([self._piece(at, last) for at, last in self._spans(begin, end)], dim=3)

    @torch.inference_mode()
    def append(self, piece: Tensor, count: int) -> None:
        begin, end = self.length, self.length + count
        PagedCache.reserve(self, end)
        for at, last in self._spans(begin, end):
            self._piece(at, last).copy_(piece[:, :, :, at - begin : last - begin])
        self.length = end

    def release(self, ids: Sequence[int] = ()) -> None:
        pool = self._pool
        super().release(ids)
        PagedCache.release(self)
        if isinstance(pool, PagedKVPool):
            pool.trim(spare=1)

    def _piece(self, begin: int, end: int) -> Tensor:
        """A view of positions that lie in one block."""
        pool = self._blocks_of
        slab, place = divmod(self.blocks[begin // pool.block], pool.slabs[0].shape[2])
        first = begin % pool.block
        return pool.slabs[slab][:, :, place, :, first : first + end - begin]

    def _spans(self, begin: int, end: int) -> list[tuple[int, int]]:
        """[begin, end) cut where blocks end."""
        block = self._blocks_of.block
        cuts = [begin, *range((begin // block + 1) * block, end, block), end]
        return [(at, last) for at, last in itertools.pairwise(cuts) if at < last]
