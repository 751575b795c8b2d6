"""The graph for several sequences at once, made of the graph for one (see graph): only attention differs.

Everything but attention treats each row by itself, so it takes the rows of all sequences side by side, [1, T, hidden].
Attention needs each sequence's own past: its rows are handed out to `slots` attention nodes, each with its own buffers,
and put together again. Constants stay where the graph for one has them, in the same weight file.

Inputs beside input_ids and rows: spread int64 [P] (which row of T is which row of attention; a sequence whose last row
would be computed alone has any other row as company, whose result is dropped, for the reason that graph.py gives; an
unused slot has two such rows), counts int64 [slots] (attention's rows in each slot, at least 2, together P), gathered
int64 [T] (which row of P is which row of T); seqlens_k_s, total_length_s int32 [1] and past_key_i_s, past_value_i_s for
every slot s, with present_key_i_s and present_value_i_s among the outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, helper

from edgespec.models.onnx.writer import GRAPH_NAME

if TYPE_CHECKING:
    from onnx import NodeProto, ValueInfoProto

_PADDING = ("padding", "count")  # the inputs that pad attention in the graph for one
_LENGTHS = ("seqlens_k", "total_length")


def batch_graph(folder: Path, slots: int) -> bytes:
    """The graph for `slots` sequences, of the one in `folder`; its weight file is the one there.

    Raises what reading and parsing a damaged graph raises: OSError, or an error of protobuf's.
    """
    model = onnx.load(str(folder / GRAPH_NAME), load_external_data=False)
    single = model.graph
    nodes = _rewired(_without_padding(list(single.node)), slots)
    values = {value.name: value for value in (*single.input, *single.output)}
    attention = [node for node in single.node if node.op_type == "GroupQueryAttention"]
    pasts = [values[name] for node in attention for name in node.input[3:5]]
    presents = [values[name] for node in attention for name in node.output[1:3]]
    per_slot = {value.name for value in (*pasts, *presents)} | {*_LENGTHS}
    inputs = [value for value in single.input if value.name not in per_slot | {*_PADDING}]
    inputs += [
        helper.make_tensor_value_info("spread", TensorProto.INT64, ["spread"]),
        helper.make_tensor_value_info("counts", TensorProto.INT64, [slots]),
        helper.make_tensor_value_info("gathered", TensorProto.INT64, ["n"]),
    ]
    inputs += [_of_slot(value, slot) for slot in range(slots) for value in (*(values[n] for n in _LENGTHS), *pasts)]
    outputs = [value for value in single.output if value.name not in per_slot]
    outputs += [_of_slot(value, slot) for slot in range(slots) for value in presents]
    graph = helper.make_graph(nodes, "batch", inputs, outputs, list(single.initializer))
    made = helper.make_model(graph, opset_imports=model.opset_import, producer_name=model.producer_name)
    made.ir_version = model.ir_version
    serialised: bytes = made.SerializeToString()
    return serialised


def packed_bytes(folder: Path) -> int:
    """Bytes of memory that ONNX Runtime takes for the products of a graph: it keeps each weight in an order of its own.

    Every session has such a copy, whatever file its constants come from. Raises as `batch_graph`.
    """
    graph = onnx.load(str(folder / GRAPH_NAME), load_external_data=False).graph
    sizes = {constant.name: _size(constant) for constant in graph.initializer}
    total = 0
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            total += sizes[node.input[1]]
        elif node.op_type == "MatMulNBits":  # beside each scale it keeps a sum of the block
            total += sizes[node.input[1]] + 2 * sizes[node.input[2]]
    return total


def _size(constant: TensorProto) -> int:
    lengths = [int(entry.value) for entry in constant.external_data if entry.key == "length"]
    return lengths[0] if lengths else len(constant.raw_data)


def _without_padding(nodes: list[NodeProto]) -> list[NodeProto]:
    """Drop the nodes that pad attention and cut its result in the graph for one."""
    same: dict[str, str] = {}  # what a dropped node returns -> what it was given
    kept = []
    for node in nodes:
        for index, name in enumerate(node.input):
            node.input[index] = same.get(name, name)
        if set(node.input) & set(_PADDING):
            same[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    return kept


def _rewired(nodes: list[NodeProto], slots: int) -> list[NodeProto]:
    """Each attention node becomes one for every slot."""
    made: list[NodeProto] = []
    for node in nodes:
        made += _attention(node, slots) if node.op_type == "GroupQueryAttention" else [node]
    return made


def _attention(node: NodeProto, slots: int) -> list[NodeProto]:
    query, out = node.input[0], node.output[0]
    before: list[NodeProto] = []
    if node.input[1]:  # normed apart; packed again, one node spreads all three
        query = f"{out}/packed"
        before.append(helper.make_node("Concat", list(node.input[:3]), [query], name=f"{query}/Concat", axis=-1))
    spread, parts = f"{out}/spread", [f"{out}/part_{slot}" for slot in range(slots)]
    before += [
        helper.make_node("Gather", [query, "spread"], [spread], name=f"{spread}/Gather", axis=1),
        helper.make_node("Split", [spread, "counts"], parts, name=f"{spread}/Split", axis=1),
    ]
    attended = [_in_slot(node, part, slot) for slot, part in enumerate(parts)]
    joined = f"{out}/joined"
    results = [one.output[0] for one in attended]
    after = [
        helper.make_node("Concat", results, [joined], name=f"{joined}/Concat", axis=1),
        helper.make_node("Gather", [joined, "gathered"], [out], name=f"{out}/Gather", axis=1),
    ]
    return [*before, *attended, *after]


def _in_slot(node: NodeProto, packed: str, slot: int) -> NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.name = f"{node.name}/{slot}"
    # query, key, value, past key and value, seqlens_k, total_length, cos, sin
    made.input[:] = [packed, "", "", *(f"{name}_{slot}" for name in node.input[3:7]), *node.input[7:]]
    made.output[:] = [f"{name}_{slot}" for name in node.output]
    return made


def _of_slot(value: ValueInfoProto, slot: int) -> ValueInfoProto:
    made = onnx.ValueInfoProto()
    made.CopyFrom(value)
    made.name = f"{value.name}_{slot}"
    for dim in made.type.tensor_type.shape.dim:
        if dim.dim_param:  # caches differ in capacity
            dim.dim_param = f"{dim.dim_param}_{slot}"
    return made
