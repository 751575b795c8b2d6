"""Single rows of the embedding and the LM head, read from a converted graph's weight file.

The graph holds these tables as constants that ONNX Runtime maps; a few rows at a time are read from the same file by
position, so no second copy of a table is ever in memory. Names and forms are those that `graph` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import ModelError
from edgespec.models.base import FloatArray
from edgespec.models.checks import Ids, token_ids
from edgespec.models.weights.files import ReadOnlyFile

if TYPE_CHECKING:
    from onnx import NodeProto

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class _Constant:
    """One constant of a graph: its numbers if they are in memory, else where they lie in the weight file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: ReadOnlyFile
    offset: int
    numbers: npt.NDArray[Any] | None

    def read(self, ids: Ids) -> npt.NDArray[Any]:
        """The rows (along the first axis) of `ids`. Rows that lie side by side are read at once."""
        if self.numbers is not None:
            return self.numbers.reshape(self.shape)[ids]
        out = np.empty((len(ids), *self.shape[1:]), self.dtype)
        raw = out.view(np.uint8).reshape(len(ids), -1)
        width = raw.shape[1]
        starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1).tolist()
        for begin, end in zip(starts, [*starts[1:], len(ids)]):
            at = self.offset + int(ids[begin]) * width
            self.file.read_into(raw[begin:end].reshape(-1), at, f"rows of {self.name}")
        return out


class TableRows:
    """A matrix [vocab, hidden] of a graph whose rows are read when asked for. Safe to share between threads."""

    def __init__(self, file: ReadOnlyFile, parts: Mapping[str, _Constant], bits: int) -> None:
        """Either "table" float32, or "q" uint8 [vocab, blocks, 32] (or 16: two a byte, the low half first) with "scale"
        and maybe "shift" float32 [vocab, blocks, 1]: w = scale * (q - 2^(bits-1)) + shift.
        """
        self._file = file
        self._parts = parts
        self._zero = np.float32(2 ** (bits - 1))
        self._count = parts["table" if "table" in parts else "q"].shape[0]

    def rows(self, ids: Sequence[int]) -> FloatArray:
        """float32 [n, hidden]. Raises ValueError for ids without a row, ModelError if it cannot be read."""
        wanted = token_ids(ids, self._count)
        table = self._parts.get("table")
        if table is not None:
            return table.read(wanted)
        q = self._parts["q"].read(wanted)
        if q.shape[2] == 16:
            q = np.stack((q & 15, q >> 4), axis=-1).reshape(len(q), -1, 32)
        numbers: FloatArray = (q.astype(np.float32) - self._zero) * self._parts["scale"].read(wanted)
        if "shift" in self._parts:
            numbers += self._parts["shift"].read(wanted)
        return numbers.reshape(len(wanted), -1)

    def close(self) -> None:
        self._file.close()


def embedding_rows(folder: Path) -> TableRows:
    """The input embedding of the graph in `folder`. Raises ModelError if it cannot be read."""
    constants, _, file = _open(folder)
    if _EMBEDDING in constants:
        return TableRows(file, {"table": constants[_EMBEDDING]}, 8)
    named = {key: f"{_EMBEDDING}/{key}" for key in ("q", "scale", "shift")}
    zero = constants["embedding/zero"].numbers  # the numbers are one a byte whatever their bits: this tells how many
    assert zero is not None
    return TableRows(file, {k: constants[n] for k, n in named.items() if n in constants}, int(zero.item()).bit_length())


def head_rows(folder: Path) -> TableRows:
    """The LM head of the graph in `folder` where it is not the embedding. Raises ModelError if it cannot be read."""
    constants, nodes, file = _open(folder)
    if _HEAD in constants:
        return TableRows(file, {"table": constants[_HEAD]}, 8)
    product = next(node for node in nodes if node.op_type == "MatMulNBits" and node.input[0] == "hidden/rows")
    bits = next(attribute.i for attribute in product.attribute if attribute.name == "bits")
    q = constants[product.input[1]]
    shape = (*q.shape[:2], 1)
    parts = {"q": q, "scale": replace(constants[product.input[2]], shape=shape)}
    shift = constants.get("logits/shift")
    if shift is not None:  # stored for a product, so a token's numbers do not lie side by side
        numbers = shift.read(np.arange(shift.shape[0])).T.reshape(shape)
        parts["shift"] = replace(shift, shape=shape, numbers=np.ascontiguousarray(numbers))
    return TableRows(file, parts, bits)


def _open(folder: Path) -> tuple[dict[str, _Constant], list[NodeProto], ReadOnlyFile]:
    """The constants by name, the nodes, and the weight file of the graph in `folder`."""
    import onnx
    from onnx import helper, numpy_helper

    from edgespec.models.onnx.writer import GRAPH_NAME, WEIGHTS_NAME

    try:
        graph = onnx.load(str(folder / GRAPH_NAME), load_external_data=False).graph
    except Exception as error:  # protobuf has errors of its own
        raise ModelError(f"{folder / GRAPH_NAME}: the converted model cannot be read ({error}).") from error
    file = ReadOnlyFile(folder / WEIGHTS_NAME)
    constants = {}
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        constants[tensor.name] = _Constant(
            tensor.name,
            tuple(tensor.dims),
            np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)),
            file,
            int(entries.get("offset", 0)),
            None if entries else numpy_helper.to_array(tensor),
        )
    return constants, list(graph.node), file
