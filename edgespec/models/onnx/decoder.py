"""The CPU engine: a decoder run by ONNX Runtime, with keys and values bound once per sequence.

Rolling back is setting a smaller length: attention reads only the first `length` positions of the buffers.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgespec.errors import ConfigError, ModelError
from edgespec.models.base import FloatArray, ForwardOutput, KVCache, KVPool, Part
from edgespec.models.batching import check_slots, one_after_another, ready_parts
from edgespec.models.checks import checked, closed, positions_within
from edgespec.models.kv.sequence import SequenceCache
from edgespec.models.onnx.batch import BatchRunner, Share
from edgespec.models.onnx.binding import Binding, Outputs
from edgespec.models.onnx.cache import graph_folder
from edgespec.models.onnx.rows import TableRows, embedding_rows, head_rows
from edgespec.models.onnx.session import open_session
from edgespec.models.rope import rotary_tables
from edgespec.models.weights.opening import WeightFile

if TYPE_CHECKING:
    import onnxruntime as ort

WEIGHT_FORMATS = ("exact", "int8", "float32")


class OnnxCache(SequenceCache):
    """Keys and values of one sequence: float32 [1, kv_heads, capacity, head_dim] per layer.

    The buffers span the whole capacity, but the system backs only pages that were written: memory follows `length`.
    """

    def __init__(self, owner: OnnxDecoder, capacity: int) -> None:
        spec = owner.spec
        super().__init__(owner, capacity, spec.position_bytes())
        shape = (1, spec.num_kv_heads, capacity + 1, spec.head_dim)  # one more for the row that keeps another company
        self.buffers = [_on_demand(shape) for _ in range(2 * spec.num_layers)]
        self.bindings: dict[bool, Binding] = {}
        self.outputs = Outputs(spec)


class OnnxDecoder:
    """A `Decoder` on ONNX Runtime's CPU provider.

    weight_format: "exact" keeps the file's own 4- and 8-bit blocks (other types go to 8 bits), "int8" rounds
    everything to 8 bits, "float32" dequantises. threads: None = the cores this process may use. positions: of the
    longest sequence, None = the model's maximum. cache_dir: where the converted graph is kept; None = a temporary
    folder for the life of this object.
    """

    def __init__(
        self,
        weights: WeightFile,
        *,
        weight_format: str = "exact",
        threads: int | None = None,
        positions: int | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        if weight_format not in WEIGHT_FORMATS:
            raise ConfigError(f"weight format {weight_format!r} is unknown; use one of {', '.join(WEIGHT_FORMATS)}.")
        if weights.spec.head_dim % 16:
            raise ModelError(
                f"{weights.path}: ONNX Runtime needs a head size that is a multiple of 16, this one is "
                f"{weights.spec.head_dim}; use --device torch-cpu."
            )
        self.spec = weights.spec
        self.weight_format = weight_format
        self.positions = positions_within(positions, self.spec.max_positions)
        self._lock = threading.Lock()
        self._noting = threading.Lock()  # of caches and pools in the two sets below
        self._caches: weakref.WeakSet[OnnxCache] = weakref.WeakSet()
        self._pools: weakref.WeakSet[KVPool] = weakref.WeakSet()
        self._scratch = None if cache_dir else tempfile.TemporaryDirectory(prefix="edgespec-graph-")
        folder = Path(self._scratch.name) if self._scratch else cache_dir
        assert folder is not None
        graph = graph_folder(weights, weight_format, folder)
        self._session: ort.InferenceSession | None = open_session(graph, threads)
        self._batch: BatchRunner | None = None
        self._threads = threads
        self._graph = graph
        self._tables: dict[str, TableRows] = {}
        self.nbytes = (graph / "weights.bin").stat().st_size
        self._rotary = rotary_tables(self.spec, self.positions + 1)  # one for the row that keeps another company

    def new_cache(self, capacity: int | None = None) -> OnnxCache:
        self._running()
        cache = OnnxCache(self, positions_within(capacity, self.positions))
        with self._noting:
            self._caches.add(cache)
        return cache

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that caches and pools hold now."""
        with self._noting:
            holders: list[OnnxCache | KVPool] = [*self._caches, *self._pools]
        return sum(holder.nbytes for holder in holders)

    def new_pool(
        self, nbytes: int, *, sequences: int = 8, context: int | None = None, most_bytes: int | None = None
    ) -> KVPool:
        from edgespec.models.onnx.pools import new_pool

        self._running()
        pool = new_pool(self, self._lock, nbytes, sequences, positions_within(context, self.positions), most_bytes)
        with self._noting:
            self._pools.add(pool)
        return pool

    def forward(
        self, tokens: Sequence[int], cache: KVCache, *, logits: int | None = None, hidden: bool = False
    ) -> ForwardOutput:
        with self._lock:
            session = self._running()
            share = self._checked(Part(tokens, cache, logits, hidden))
            ids, own = share.ids, share.cache
            own.reserve(own.length + len(ids))
            binding = own.bindings.get(hidden)
            if binding is None:
                binding = own.bindings[hidden] = Binding(session, self.spec, own, self._rotary, hidden)
            with _as_model_error():
                output = binding.run(ids, own.length, share.wanted)
            own.length += len(ids)
            return output

    @property
    def batch_slots(self) -> int:
        batch = self._batch
        return 1 if batch is None else batch.slots

    def forward_batch(self, parts: Sequence[Part]) -> list[ForwardOutput]:
        self._running()
        if self._batch is None or len(parts) < 2:  # a single sequence is faster in the graph for one
            return one_after_another(self, parts, self._checked)
        with self._lock:
            self._running()
            batch = self._batch
            if batch is None or len(parts) > batch.slots:
                raise ValueError(f"a batch of {len(parts)} sequences was given, it takes {self.batch_slots}")
            shares = ready_parts(parts, self._checked)
            with _as_model_error():
                outputs = batch.run(shares)
            for share in shares:
                share.cache.length += len(share.ids)
                share.cache.outputs.drop()  # of when it ran alone: the batch has rows of its own
            return outputs

    def prepare_batch(self, slots: int) -> int:
        check_slots(slots)
        with self._lock:
            if slots == 1:
                self._batch = None
                return 0
            self._running()
            if self._batch is None or self._batch.slots < slots:
                self._batch = None  # first give back what a smaller one takes
                self._batch = BatchRunner(self._graph, self.spec, slots, self._rotary, self._threads)
            return self._batch.nbytes

    def embed(self, ids: Sequence[int]) -> FloatArray:
        return self._table("embedding").rows(ids)

    def head_rows(self, ids: Sequence[int]) -> FloatArray:
        return self._table("embedding" if self.spec.tie_embeddings else "head").rows(ids)

    def _table(self, name: str) -> TableRows:
        """Rows of the embedding or the head, read from the converted graph: no second copy of it in memory."""
        table = self._tables.get(name)
        if table is None:
            with self._lock:
                self._running()
                find = embedding_rows if name == "embedding" else head_rows
                table = self._tables.setdefault(name, find(self._graph))
        return table

    def close(self) -> None:
        with self._noting:
            pools = list(self._pools)
        for pool in pools:
            pool.close()
        with self._lock:
            self._session = self._batch = None
            for table in self._tables.values():
                table.close()
            self._tables.clear()
            with self._noting:
                caches = list(self._caches)
            for cache in caches:
                cache.bindings.clear()  # each holds the session, and with it the weights
        if self._scratch is not None:
            self._scratch.cleanup()

    def _running(self) -> ort.InferenceSession:
        """The session. Raises ModelError after `close`."""
        if self._session is None:
            raise closed()
        return self._session

    def _checked(self, part: Part) -> Share:
        ids, cache, wanted = checked(part, OnnxCache, self)
        return Share(ids, cache, wanted, part.hidden)


@contextlib.contextmanager
def _as_model_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of which ONNX Runtime's own errors are subclasses
        raise ModelError(f"ONNX Runtime failed: {str(error)[:300]}") from error


def _on_demand(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Zeros whose memory is taken page by page, as they are written.

    Not `np.zeros`: numpy asks for huge pages, and one of those spans the whole context of a head.
    """
    size = math.prod(shape) * 4
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return np.frombuffer(mmap.mmap(-1, size, **flags), np.float32).reshape(shape)
