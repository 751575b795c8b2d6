"""Writing a ranker's ONNX file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictor.features import FloatArray
from predictor.ranker import INPUT, METADATA, OUTPUT, RankerInfo

OPSET, IR_VERSION = 17, 9


def ranker_bytes(info: RankerInfo, layers: Sequence[tuple[FloatArray, FloatArray]]) -> bytes:
    """The file's content: sigmoid(W_n relu(... relu(W_1 x + b_1)) + b_n).

    layers: (W [outputs, inputs], b [outputs]) from first to last.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants, x = [], [], INPUT
    for place, (weight, bias) in enumerate(layers):
        names = [f"weight{place}", f"bias{place}"]
        for name, value in zip(names, (weight, bias)):
            constants.append(numpy_helper.from_array(np.ascontiguousarray(value, np.float32), name))
        nodes.append(helper.make_node("Gemm", [x, *names], [f"sum{place}"], transB=1))
        last = place == len(layers) - 1
        x = OUTPUT if last else f"unit{place}"
        nodes.append(helper.make_node("Sigmoid" if last else "Relu", [f"sum{place}"], [x]))
    graph = helper.make_graph(
        nodes,
        "ranker",
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["n", layers[0][0].shape[1]])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["n", len(layers[-1][0])])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    helper.set_model_props(model, {METADATA: info.to_text()})
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))
