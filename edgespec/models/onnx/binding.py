"""One sequence's buffers bound to the session of the graph for one sequence, and the rows that come out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgespec.models.base import FloatArray, ForwardOutput
from edgespec.models.checks import Ids
from edgespec.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnxruntime as ort

    from edgespec.models.onnx.decoder import OnnxCache

_KEPT_ROWS = 32  # rows whose buffer is kept between calls, at most
_ATTENTION_ROWS = 32  # attention works on a multiple of so many rows at a time, see graph


class Outputs:
    """Where the rows of one sequence that runs alone go: as many as were needed so far, up to `_KEPT_ROWS` for good.

    Both of its bindings write here: rows are valid until the next forward on the same cache, whichever it is.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._logits = np.empty((0, spec.vocab_size), np.float32)
        self._hidden = np.empty((0, spec.hidden_size), np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now."""
        return self._logits.nbytes + self._hidden.nbytes

    def logits(self, rows: int) -> FloatArray:
        self._logits = _enough(self._logits, rows)
        return self._logits[:rows]

    def hidden(self, rows: int) -> FloatArray:
        self._hidden = _enough(self._hidden, rows)
        return self._hidden[:rows]

    def drop(self) -> None:
        """Keep nothing; who still has rows has them."""
        self._logits, self._hidden = (np.empty((0, kept.shape[1]), np.float32) for kept in (self._logits, self._hidden))


class Binding:
    """One sequence's buffers bound to the session; only what changes from call to call is bound again."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: ModelSpec,
        cache: OnnxCache,
        rotary: tuple[FloatArray, FloatArray],
        hidden: bool,
    ) -> None:
        self._session = session
        self._spec = spec
        self._io = session.io_binding()
        self._bound: tuple[int, int] | None = None
        self._outputs = cache.outputs
        self._ids = np.zeros((1, 1), np.int64)
        self._rows = np.zeros(1, np.int64)
        self._with_hidden = hidden
        self._written = (0, 0)  # addresses that are bound for the rows
        names = {node.name for node in session.get_inputs()}
        self._pads_attention = "padding" in names
        self._padding = np.zeros((1, 1, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim), np.float32)
        self._count = np.zeros(1, np.int64)
        self._seqlens = np.zeros(1, np.int32)
        self._total = np.zeros(1, np.int32)
        fixed = {"seqlens_k": self._seqlens, "total_length": self._total, "cos": rotary[0], "sin": rotary[1]}
        self._rotary = rotary  # keeps the bound memory alive
        for name, array in fixed.items():
            bind(self._io.bind_input, name, array)
        for index, buffer in enumerate(cache.buffers):
            kind, layer = ("key", "value")[index % 2], index // 2
            bind(self._io.bind_input, f"past_{kind}_{layer}", buffer)
            bind(self._io.bind_output, f"present_{kind}_{layer}", buffer)

    def run(self, ids: Ids, start: int, wanted: int) -> ForwardOutput:
        """Append `ids` int64 [n] at position `start`; logits of the last `wanted` rows, valid until the next forward.

        Writes the cache's buffers, not its length. Raises what ONNX Runtime raises.
        """
        count = len(ids)
        if self._bound != (count, wanted):
            self._rebind(count, wanted)
        logits, hidden = self._bind_rows(wanted)
        self._ids[0, :count] = ids
        computed = with_company(count)
        self._seqlens[0] = start + computed - 1
        self._total[0] = start + computed
        self._session.run_with_iobinding(self._io)
        return ForwardOutput(logits, None if hidden is None else hidden[:count])

    def _rebind(self, count: int, wanted: int) -> None:
        self._bound = None  # a failure half-way binds anew next time
        self._count[0] = count
        company = with_company(count) - count
        rows = count if self._pads_attention else count + company
        self._ids = np.zeros((1, rows), np.int64)
        self._rows = np.arange(count - wanted, count, dtype=np.int64)
        self._written = (0, 0)
        bind(self._io.bind_input, "input_ids", self._ids)
        bind(self._io.bind_input, "rows", self._rows)
        if self._pads_attention:
            bind(self._io.bind_input, "count", self._count)
            bind(self._io.bind_input, "padding", self._padding[:, :company])
        self._bound = (count, wanted)

    def _bind_rows(self, wanted: int) -> tuple[FloatArray, FloatArray | None]:
        """Where logits and hidden states go, bound unless they are; another forward may have moved them."""
        logits = self._outputs.logits(wanted)
        hidden = self._outputs.hidden(self._ids.shape[1]) if self._with_hidden else None
        written = (logits.ctypes.data, 0 if hidden is None else hidden.ctypes.data)
        if self._written != written:
            bind(self._io.bind_output, "logits", logits)
            if hidden is not None:
                bind(self._io.bind_output, "hidden", hidden)
            self._written = written
        return logits, hidden


def _enough(buffer: FloatArray, rows: int) -> FloatArray:
    """`buffer`, or another one if it has too few rows, or was made for more than are kept."""
    if max(rows, 1) <= len(buffer) <= max(rows, _KEPT_ROWS):
        return buffer
    size = rows if rows > _KEPT_ROWS else 1 << max(rows - 1, 0).bit_length()
    return np.empty((size, buffer.shape[1]), np.float32)


def with_company(count: int) -> int:
    """How many rows are computed for `count`: one more where the last would be computed alone, see graph."""
    return count + (count % _ATTENTION_ROWS == 1)


def sized(buffer: FloatArray, rows: int, kept: int) -> FloatArray:
    """A buffer for `rows` rows: the given one, a larger one, or the usual size `kept` again after a large call."""
    needed = max(rows, kept)
    return buffer if len(buffer) == needed else np.empty((needed, buffer.shape[1]), np.float32)


def bind(bind_to: Any, name: str, array: npt.NDArray[Any]) -> None:
    bind_to(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
