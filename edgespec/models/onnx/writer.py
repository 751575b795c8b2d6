"""Builds ONNX graphs: small ones in memory, models on disk tensor by tensor (never a second copy in memory)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"
WEIGHTS_NAME = "weights.bin"
GRAPH_NAME = "graph.onnx"
_EMBEDDED_BYTES = 1024  # smaller constants live in the graph file itself
_ALIGNMENT = 4096  # whole pages, so that ONNX Runtime can map each tensor by itself


class GraphBuilder:
    """Collects nodes and constants in memory. Names of values are unique."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def node(
        self, op: str, inputs: Sequence[str], outputs: str | Sequence[str], *, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node and return the name of its first output."""
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        made = helper.make_node(op, list(inputs), names, name=f"{names[0]}/{op}", domain=domain, **attributes)
        self._nodes.append(made)
        return names[0]

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        """Add a constant unless one of this name exists already; returns the name."""
        if name not in self._constants:
            self._constants[name] = self._stored(name, np.ascontiguousarray(value))
        return name

    def _stored(self, name: str, value: npt.NDArray[Any]) -> onnx.TensorProto:
        return numpy_helper.from_array(value, name)

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[int | str]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))

    def model(self, name: str) -> bytes:
        """The whole graph, as ONNX Runtime reads it."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, list(self._constants.values()))
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="edgespec")
        model.ir_version = 10
        serialised: bytes = model.SerializeToString()
        return serialised


class GraphWriter(GraphBuilder):
    """A builder whose constants go to the weight file as they come."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._data: BinaryIO = open(folder / WEIGHTS_NAME, "wb")  # noqa: SIM115  closed by finish or abandon

    def _stored(self, name: str, value: npt.NDArray[Any]) -> onnx.TensorProto:
        if value.nbytes <= _EMBEDDED_BYTES:
            return numpy_helper.from_array(value, name)
        return self._external(name, value)

    def _external(self, name: str, value: npt.NDArray[Any]) -> onnx.TensorProto:
        self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
        tensor = TensorProto(name=name, dims=value.shape, data_type=helper.np_dtype_to_tensor_dtype(value.dtype))
        tensor.data_location = TensorProto.EXTERNAL
        entries = {"location": WEIGHTS_NAME, "offset": str(self._data.tell()), "length": str(value.nbytes)}
        for key, text in entries.items():
            tensor.external_data.add(key=key, value=text)
        self._data.write(value.data.cast("B"))
        return tensor

    def finish(self) -> None:
        """Write the graph file and make both files durable."""
        with open(self._folder / GRAPH_NAME, "wb") as file:
            file.write(self.model("decoder"))
            _to_disk(file)
        _to_disk(self._data)
        self._data.close()

    def abandon(self) -> None:
        self._data.close()


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
