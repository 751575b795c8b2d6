"""The CPU engine: a decoder run by ONNX Runtime, with keys and values bound once per sequence.

Rolling back is setting a smaller length: attention reads only the first `length` positions of the buffers.
"""

from __future__ import annotations

import math
import mmap
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import ConfigError, ModelError
from edgespec.models.base import FloatArray, ForwardOutput, KVCache
from edgespec.models.cpu import usable_threads
from edgespec.models.onnx_cache import graph_folder
from edgespec.models.onnx_rows import TableRows, embedding_rows, head_rows
from edgespec.models.rope import rotary_tables
from edgespec.models.spec import ModelSpec
from edgespec.models.weights import WeightFile

if TYPE_CHECKING:
    import onnxruntime as ort

WEIGHT_FORMATS = ("exact", "int8", "float32")
_KEPT_ROWS = 32  # logits rows whose buffer is kept between calls


class OnnxCache:
    """Keys and values of one sequence: float32 [1, kv_heads, capacity, head_dim] per layer.

    The buffers span the whole capacity, but the system backs only pages that were written: memory follows `length`.
    """

    def __init__(self, owner: OnnxDecoder, capacity: int) -> None:
        spec = owner.spec
        self.owner = owner
        self.length = 0
        self.capacity = capacity
        shape = (1, spec.num_kv_heads, capacity + 1, spec.head_dim)  # one more for the row that pads a single one
        self.buffers = [_on_demand(shape) for _ in range(2 * spec.num_layers)]
        self.bindings: dict[bool, _Binding] = {}
        self._position_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4

    @property
    def nbytes(self) -> int:
        return self.length * self._position_bytes

    def crop(self, length: int) -> int:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} positions to {length}")
        dropped = self.length - length
        self.length = length
        return dropped


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
        self.positions = min(positions or self.spec.max_positions, self.spec.max_positions)
        self._lock = threading.Lock()
        self._caches: weakref.WeakSet[OnnxCache] = weakref.WeakSet()
        self._scratch = None if cache_dir else tempfile.TemporaryDirectory(prefix="edgespec-graph-")
        folder = Path(self._scratch.name) if self._scratch else cache_dir
        assert folder is not None
        graph = graph_folder(weights, weight_format, folder)
        self._session: ort.InferenceSession | None = _session(graph, threads)
        self._graph = graph
        self._tables: dict[str, TableRows] = {}
        self.nbytes = (graph / "weights.bin").stat().st_size
        self._rotary = rotary_tables(self.spec, self.positions + 1)  # one for the row that pads a single one

    def new_cache(self, capacity: int | None = None) -> OnnxCache:
        if capacity is not None and capacity < 1:
            raise ValueError(f"a cache needs room for at least one position, not {capacity}")
        cache = OnnxCache(self, min(capacity or self.positions, self.positions))
        self._caches.add(cache)
        return cache

    def forward(
        self, tokens: Sequence[int], cache: KVCache, *, logits: int | None = None, hidden: bool = False
    ) -> ForwardOutput:
        if not isinstance(cache, OnnxCache) or cache.owner is not self:
            raise ValueError("the cache belongs to another decoder")
        with self._lock:
            if self._session is None:
                raise ModelError("the model is closed.")
            ids = self._checked(tokens, cache)
            wanted = len(ids) if logits is None else logits
            if not 0 <= wanted <= len(ids):
                raise ValueError(f"logits of {wanted} positions were asked for, of {len(ids)} tokens")
            binding = cache.bindings.get(hidden)
            if binding is None:
                binding = cache.bindings[hidden] = _Binding(self._session, self.spec, cache, self._rotary, hidden)
            try:
                output = binding.run(ids, cache.length, wanted)
            except RuntimeError as error:  # of which ONNX Runtime's own errors are subclasses
                raise ModelError(f"ONNX Runtime failed: {str(error)[:300]}") from error
            cache.length += len(ids)
            return output

    def embed(self, ids: Sequence[int]) -> FloatArray:
        return self._table("embedding").rows(ids)

    def head_rows(self, ids: Sequence[int]) -> FloatArray:
        return self._table("embedding" if self.spec.tie_embeddings else "head").rows(ids)

    def _table(self, name: str) -> TableRows:
        """Rows of the embedding or the head, read from the converted graph: no second copy of it in memory."""
        table = self._tables.get(name)
        if table is None:
            with self._lock:
                if self._session is None:
                    raise ModelError("the model is closed.")
                find = embedding_rows if name == "embedding" else head_rows
                table = self._tables.setdefault(name, find(self._graph))
        return table

    def close(self) -> None:
        with self._lock:
            self._session = None
            for table in self._tables.values():
                table.close()
            self._tables.clear()
            for cache in self._caches:
                cache.bindings.clear()  # each holds the session, and with it the weights
        if self._scratch is not None:
            self._scratch.cleanup()

    def _checked(self, tokens: Sequence[int], cache: OnnxCache) -> npt.NDArray[np.int64]:
        ids = np.asarray(tokens, np.int64)
        if ids.ndim != 1 or not len(ids):
            raise ValueError("forward needs at least one token")
        if ids.min() < 0 or ids.max() >= self.spec.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.spec.vocab_size - 1}, got {ids.min()}..{ids.max()}")
        if cache.length + len(ids) > cache.capacity:
            raise ModelError(f"{cache.length} + {len(ids)} tokens do not fit the context of {cache.capacity}.")
        return ids


class _Binding:
    """One sequence's buffers bound to the session; only what changes from call to call is bound again."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: ModelSpec,
        cache: OnnxCache,
        rotary: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
        hidden: bool,
    ) -> None:
        self._session = session
        self._spec = spec
        self._io = session.io_binding()
        self._bound: tuple[int, int] | None = None
        self._ids = np.zeros(1, np.int64)
        self._rows = np.zeros(1, np.int64)
        self._logits = np.empty((_KEPT_ROWS, spec.vocab_size), np.float32)
        self._hidden = np.empty((_KEPT_ROWS, spec.hidden_size), np.float32) if hidden else None
        names = {node.name for node in session.get_inputs()}
        self._pads_attention = "padding" in names
        self._padding = np.zeros((1, 1, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim), np.float32)
        self._count = np.zeros(1, np.int64)
        self._seqlens = np.zeros(1, np.int32)
        self._total = np.zeros(1, np.int32)
        fixed = {"seqlens_k": self._seqlens, "total_length": self._total, "cos": rotary[0], "sin": rotary[1]}
        self._rotary = rotary  # keeps the bound memory alive
        for name, array in fixed.items():
            _bind(self._io.bind_input, name, array)
        for index, buffer in enumerate(cache.buffers):
            kind, layer = ("key", "value")[index % 2], index // 2
            _bind(self._io.bind_input, f"past_{kind}_{layer}", buffer)
            _bind(self._io.bind_output, f"present_{kind}_{layer}", buffer)

    def run(self, ids: npt.NDArray[np.int64], start: int, wanted: int) -> ForwardOutput:
        count = len(ids)
        if self._bound != (count, wanted):
            self._rebind(count, wanted)
        self._ids[0, :count] = ids
        computed = max(count, 2)  # a single row gets company, see onnx_graph
        self._seqlens[0] = start + computed - 1
        self._total[0] = start + computed
        self._session.run_with_iobinding(self._io)
        hidden = None if self._hidden is None else self._hidden[:count]
        return ForwardOutput(self._logits[:wanted], hidden)

    def _rebind(self, count: int, wanted: int) -> None:
        self._bound = None  # a failure half-way binds anew next time
        self._count[0] = count
        rows = count if self._pads_attention else max(count, 2)
        self._ids = np.zeros((1, rows), np.int64)
        self._rows = np.arange(count - wanted, count, dtype=np.int64)
        self._logits = _sized(self._logits, wanted)
        _bind(self._io.bind_input, "input_ids", self._ids)
        _bind(self._io.bind_input, "rows", self._rows)
        _bind(self._io.bind_output, "logits", self._logits[:wanted])
        if self._pads_attention:
            _bind(self._io.bind_input, "count", self._count)
            _bind(self._io.bind_input, "padding", self._padding[:, : 1 if count == 1 else 0])
        if self._hidden is not None:
            self._hidden = _sized(self._hidden, rows)
            _bind(self._io.bind_output, "hidden", self._hidden[:rows])
        self._bound = (count, wanted)


def _on_demand(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Zeros whose memory is taken page by page, as they are written.

    Not `np.zeros`: numpy asks for huge pages, and one of those spans the whole context of a head.
    """
    size = math.prod(shape) * 4
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return np.frombuffer(mmap.mmap(-1, size, **flags), np.float32).reshape(shape)


def _sized(buffer: npt.NDArray[np.float32], rows: int) -> npt.NDArray[np.float32]:
    """A buffer for `rows` rows: the given one, a larger one, or the usual size again after a large call."""
    needed = max(rows, _KEPT_ROWS)
    return buffer if len(buffer) == needed else np.empty((needed, buffer.shape[1]), np.float32)


def _bind(bind: Any, name: str, array: npt.NDArray[Any]) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _session(folder: Path, threads: int | None) -> ort.InferenceSession:
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise ConfigError("the CPU engine needs ONNX Runtime: pip install 'edgespec[cpu]'.") from error
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or usable_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Workers spin while a forward runs, and sleep as soon as it ends: waiting for input must not cost a core.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(str(folder / "graph.onnx"), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises classes of its own, all derived from Exception
        raise ModelError(f"{folder}: ONNX Runtime cannot load the converted model ({str(error)[:200]}).") from error
