"""One step of a head draft as an ONNX graph whose weights are named only: they are handed over when it is loaded.

Inputs: embedding, hidden float32 [1, r, hidden_size] (r new rows); past_key, past_value float32
[1, kv_heads, capacity, head_dim]; seqlens_k int32 [1] (rows after this call, minus 1), total_length int32 [1]; cos, sin
float32 [>= capacity, head_dim/2], of the positions of the buffer's rows.
Outputs, of the last row: token int64 [1] (a place in `vocab`), confidence float32 [1], feature float32 [1, 1,
hidden_size], next_embedding float32 [1, 1, hidden_size] (of `token`), logits float32 [1, 1, vocab_rows]; present_key,
present_value, bound to the very buffers of the past.
Constants: those of `drafts.head_image.layout`, and a few small numbers of its own.

A block of guesses is one call a step, with the outputs of one bound as inputs of the next. All steps of a block in one
ONNX `Loop` were not faster: the loop copies keys and values in every turn, which costs about what the calls do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import TensorProto, helper

from drafts.head_spec import HeadSpec
from edgespec.models.onnx.linear import block_product
from edgespec.models.onnx.writer import MICROSOFT, GraphBuilder

_ZERO = 128  # of 8-bit blocks as ONNX Runtime takes them

Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def head_graph(spec: HeadSpec, constants: Layout, temperature: float) -> bytes:
    """The graph, without the numbers of `constants`: name -> (type, shape).

    "head/q" is among them only where the LM head is not the embedding.
    """
    graph = _HeadGraph(spec, constants, temperature)
    graph.build()
    return graph.builder.model("head")


class _Builder(GraphBuilder):
    """A builder that also knows constants by name alone."""

    def promised(self, name: str, dtype: np.dtype, shape: Sequence[int]) -> None:
        tensor = TensorProto(name=name, dims=shape, data_type=helper.np_dtype_to_tensor_dtype(dtype))
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="given")  # what is handed over by name needs no file
        self._constants[name] = tensor


class _HeadGraph:
    def __init__(self, spec: HeadSpec, constants: Layout, temperature: float) -> None:
        self.builder = _Builder()
        self.spec = spec
        self.temperature = temperature
        self.tied = "head/q" not in constants
        for name, (dtype, shape) in constants.items():
            self.builder.promised(name, dtype, shape)

    def build(self) -> None:
        builder, spec = self.builder, self.spec
        row: list[int | str] = [1, "r", spec.hidden_size]
        for name in ("embedding", "hidden"):
            builder.input(name, TensorProto.FLOAT, row)
        attended, residual = self._attention()
        feature = self._mlp(residual, self._matrix("o", attended))
        shape = (spec.vocab_rows, spec.hidden_size)
        table = "embedding" if self.tied else "head"
        logits = block_product(builder, feature, f"{table}/q", f"{table}/scale", shape, "logits")
        token = builder.node("ArgMax", [logits], "token/rows", axis=-1, keepdims=0)
        self._choice(logits, token)
        self._next_embedding()
        builder.output("feature", TensorProto.FLOAT, [1, 1, spec.hidden_size])
        builder.output("logits", TensorProto.FLOAT, [1, 1, spec.vocab_rows])

    def _matrix(self, name: str, x: str) -> str:
        return block_product(self.builder, x, f"{name}/q", f"{name}/scale", self.spec.matrices[name], f"{name}/product")

    def _norm(self, x: str, name: str, out: str) -> str:
        epsilon = self.spec.rms_norm_eps
        return self.builder.node("SimplifiedLayerNormalization", [x, name], out, axis=-1, epsilon=epsilon)

    def _sum_norm(self, x: str, branch: str, name: str, outputs: list[str]) -> None:
        """outputs[0] = norm of x + branch; outputs[3], if named, the sum."""
        inputs, epsilon = [x, branch, name], self.spec.rms_norm_eps
        self.builder.node("SkipSimplifiedLayerNormalization", inputs, outputs, domain=MICROSOFT, epsilon=epsilon)

    def _attention(self) -> tuple[str, str]:
        """The last row of what attention gives, and of the residual: [1, 1, ...] each."""
        builder, spec = self.builder, self.spec
        normed = [self._norm("embedding", "embed_norm", "e"), self._norm("hidden", "hidden_norm", "h")]
        x = self._matrix("fc", builder.node("Concat", normed, "pair", axis=-1))
        packed = self._matrix("qkv", self._norm(x, "input_norm", "x/normed"))
        shape: list[int | str] = [1, spec.num_kv_heads, "capacity", spec.head_dim]
        for name in ("key", "value"):
            builder.input(f"past_{name}", TensorProto.FLOAT, shape)
            builder.output(f"present_{name}", TensorProto.FLOAT, shape)
        for name in ("seqlens_k", "total_length"):
            builder.input(name, TensorProto.INT32, [1])
        for name in ("cos", "sin"):
            builder.input(name, TensorProto.FLOAT, ["positions", spec.head_dim // 2])
        attended = builder.node(
            "GroupQueryAttention",
            [packed, "", "", "past_key", "past_value", "seqlens_k", "total_length", "cos", "sin"],
            ["attention", "present_key", "present_value"],
            domain=MICROSOFT,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            do_rotary=1,
            rotary_interleaved=0,
            local_window_size=spec.window,
        )
        last = builder.constant("last", np.array([-1], np.int64))
        return tuple(builder.node("Gather", [rows, last], f"{rows}/last", axis=1) for rows in (attended, x))  # type: ignore[return-value]

    def _mlp(self, residual: str, branch: str) -> str:
        builder, inner = self.builder, self.spec.intermediate_size
        self._sum_norm(residual, branch, "mlp_norm", ["m", "", "", "residual"])
        sizes = builder.constant("mlp/sizes", np.array([inner, inner], np.int64))
        builder.node("Split", [self._matrix("gate_up", "m"), sizes], ["gate", "up"], axis=-1)
        gate = builder.node("QuickGelu", ["gate"], "silu", domain=MICROSOFT, alpha=1.0)  # x sigmoid(x)
        down = self._matrix("down", builder.node("Mul", [gate, "up"], "gated"))
        self._sum_norm("residual", down, "out_norm", ["feature"])
        return "feature"

    def _choice(self, logits: str, token: str) -> None:
        """token [1], and its share of the calibrated distribution as confidence [1]."""
        builder = self.builder
        flat = builder.constant("flat", np.array([-1], np.int64))
        builder.node("Reshape", [token, flat], "token")
        builder.output("token", TensorProto.INT64, [1])
        inverse = builder.constant("inverse_temperature", np.array(1 / self.temperature, np.float32))
        law = builder.node("Softmax", [builder.node("Mul", [logits, inverse], "calibrated")], "law", axis=-1)
        top = builder.node("ReduceMax", [law, flat], "top", keepdims=0)
        builder.node("Reshape", [top, flat], "confidence")
        builder.output("confidence", TensorProto.FLOAT, [1])

    def _next_embedding(self) -> None:
        builder, spec = self.builder, self.spec
        scales = builder.constant("scales/shape", np.array([spec.vocab_rows, -1, 1], np.int64))
        by_row = builder.node("Reshape", ["embedding/scale", scales], "scales")  # constant: folded when it is loaded
        row = builder.node("Gather", ["embedding/q", "token"], "next/q")
        numbers = builder.node("Cast", [row], "next/float", to=1)
        zero = builder.constant("zero", np.array(_ZERO, np.float32))
        centred = builder.node("Sub", [numbers, zero], "next/centred")
        scaled = builder.node("Mul", [centred, builder.node("Gather", [by_row, "token"], "next/scale")], "next/scaled")
        shape = builder.constant("next/shape", np.array([1, 1, spec.hidden_size], np.int64))
        builder.node("Reshape", [scaled, shape], "next_embedding")
        builder.output("next_embedding", TensorProto.FLOAT, [1, 1, spec.hidden_size])
