"""Which KV pool the CPU engine uses on this system."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgespec.models.base import FloatArray, KVPool
from edgespec.models.kv.plain import PlainPool, PlainSequence
from edgespec.models.onnx import mapped_memory
from edgespec.models.onnx.decoder import OnnxCache
from edgespec.models.onnx.kv import MappedPool

if TYPE_CHECKING:
    from edgespec.models.onnx.decoder import OnnxDecoder

_log = logging.getLogger(__name__)


def new_pool(
    owner: OnnxDecoder, lock: threading.Lock, nbytes: int, sequences: int, context: int, most_bytes: int | None
) -> KVPool:
    """Blocks that are mapped where the system can do that, else caches of their own."""
    if mapped_memory.available():
        try:
            return MappedPool(owner, lock, nbytes, sequences=sequences, context=context, most_bytes=most_bytes)
        except OSError as error:
            _log.warning("KV blocks cannot be shared between conversations on this system: %s", error)
    return PlainPool(
        lambda: PlainOnnxCache(owner, context),
        lock,
        nbytes,
        position_bytes=owner.spec.position_bytes(),
        sequences=sequences,
        context=context,
        most_bytes=most_bytes,
    )


class PlainOnnxCache(PlainSequence, OnnxCache):
    """A sequence of a `PlainPool`."""

    def read(self, begin: int, end: int) -> Sequence[FloatArray]:
        return [buffer[:, :, begin:end].copy() for buffer in self.buffers]

    def append(self, piece: Sequence[FloatArray], count: int) -> None:
        for buffer, part in zip(self.buffers, piece, strict=True):
            np.copyto(buffer[:, :, self.length : self.length + count], part[:, :, :count])
        self.length += count
