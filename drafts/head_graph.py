"""One step of a head draft as an ONNX graph, built in memory.

Inputs: embedding, hidden float32 [1, r, hidden_size] (r new rows); past_key, past_value float32
[1, kv_heads, capacity, head_dim]; seqlens_k int32 [1] (rows after this call, minus 1), total_length int32 [1]; cos, sin
float32 [>= capacity, head_dim/2], of the positions of the buffer's rows.
Outputs, of the last row: token int64 [1] (a place in `vocab`), confidence float32 [1], feature float32 [1, 1,
hidden_size], next_embedding float32 [1, 1, hidden_size] (of `token`), logits float32 [1, 1, vocab_rows]; present_key,
present_value, bound to the very buffers of the past.

A block of guesses is one call a step, with the outputs of one bound as inputs of the next. All steps of a block in one
ONNX `Loop` were not faster: the loop copies keys and values in every turn, which costs about what the calls do.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from drafts.head_file import FloatArray, HeadWeights
from edgespec.models.onnx_linear import BLOCK, block_product, quantise_int8
from edgespec.models.onnx_writer import MICROSOFT, GraphBuilder

_ZERO = 128  # of 8-bit blocks as ONNX Runtime takes them


def head_graph(
    weights: HeadWeights, embedding: FloatArray, head: FloatArray | None, temperature: float
) -> tuple[bytes, int]:
    """The graph, and the bytes of its constants.

    embedding: the target's input embeddings of `weights.vocab`, float32 [vocab_rows, hidden_size]; head: the rows of
    its LM head for them, None if they are the same.
    """
    graph = _HeadGraph(weights, temperature)
    graph.build(embedding, head)
    return graph.builder.model("head"), graph.nbytes


class _HeadGraph:
    def __init__(self, weights: HeadWeights, temperature: float) -> None:
        self.builder = GraphBuilder()
        self.weights = weights
        self.spec = weights.spec
        self.temperature = temperature
        self.nbytes = 0

    def build(self, embedding: FloatArray, head: FloatArray | None) -> None:
        builder, spec = self.builder, self.spec
        row: list[int | str] = [1, "r", spec.hidden_size]
        for name in ("embedding", "hidden"):
            builder.input(name, TensorProto.FLOAT, row)
        attended, residual = self._attention()
        feature = self._mlp(residual, self._matrix("o", attended))
        table = self._table("embedding", embedding)
        logits_table = table if head is None else self._table("head", head)
        shape = (spec.vocab_rows, spec.hidden_size)
        logits = block_product(builder, feature, *logits_table, shape, "logits")
        token = builder.node("ArgMax", [logits], "token/rows", axis=-1, keepdims=0)
        self._choice(logits, token)
        self._next_embedding(table)
        builder.output("feature", TensorProto.FLOAT, [1, 1, spec.hidden_size])
        builder.output("logits", TensorProto.FLOAT, [1, 1, spec.vocab_rows])

    def _constant(self, name: str, value: np.ndarray) -> str:
        self.nbytes += value.nbytes
        return self.builder.constant(name, value)

    def _matrix(self, name: str, x: str) -> str:
        matrix, (rows, cols) = self.weights.matrices[name], self.spec.matrices[name]
        q = (matrix.q.astype(np.int16) + _ZERO).astype(np.uint8).reshape(rows, cols // BLOCK, BLOCK)
        weight = self._constant(f"{name}/q", q)
        scale = self._constant(f"{name}/scale", matrix.scale.astype(np.float32).reshape(-1))
        return block_product(self.builder, x, weight, scale, (rows, cols), f"{name}/product")

    def _table(self, name: str, rows: FloatArray) -> tuple[str, str]:
        """Names of the numbers [vocab_rows, blocks, 32] and scales [vocab_rows * blocks] of the table."""
        blocks = quantise_int8(rows)
        q = self._constant(f"{name}/q", blocks.q)
        return q, self._constant(f"{name}/scale", blocks.scale.reshape(-1))

    def _vector(self, name: str) -> str:
        return self._constant(name, self.weights.vectors[name])

    def _norm(self, x: str, name: str, out: str) -> str:
        epsilon = self.spec.rms_norm_eps
        return self.builder.node("SimplifiedLayerNormalization", [x, self._vector(name)], out, axis=-1, epsilon=epsilon)

    def _sum_norm(self, x: str, branch: str, name: str, outputs: list[str]) -> None:
        """outputs[0] = norm of x + branch; outputs[3], if named, the sum."""
        inputs, epsilon = [x, branch, self._vector(name)], self.spec.rms_norm_eps
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
        last = self._constant("last", np.array([-1], np.int64))
        return tuple(builder.node("Gather", [rows, last], f"{rows}/last", axis=1) for rows in (attended, x))  # type: ignore[return-value]

    def _mlp(self, residual: str, branch: str) -> str:
        builder, inner = self.builder, self.spec.intermediate_size
        self._sum_norm(residual, branch, "mlp_norm", ["m", "", "", "residual"])
        sizes = self._constant("mlp/sizes", np.array([inner, inner], np.int64))
        builder.node("Split", [self._matrix("gate_up", "m"), sizes], ["gate", "up"], axis=-1)
        gate = builder.node("QuickGelu", ["gate"], "silu", domain=MICROSOFT, alpha=1.0)  # x sigmoid(x)
        down = self._matrix("down", builder.node("Mul", [gate, "up"], "gated"))
        self._sum_norm("residual", down, "out_norm", ["feature"])
        return "feature"

    def _choice(self, logits: str, token: str) -> None:
        """token [1], and its share of the calibrated distribution as confidence [1]."""
        builder = self.builder
        flat = self._constant("flat", np.array([-1], np.int64))
        builder.node("Reshape", [token, flat], "token")
        builder.output("token", TensorProto.INT64, [1])
        inverse = self._constant("inverse_temperature", np.array(1 / self.temperature, np.float32))
        law = builder.node("Softmax", [builder.node("Mul", [logits, inverse], "calibrated")], "law", axis=-1)
        top = builder.node("ReduceMax", [law, flat], "top", keepdims=0)
        builder.node("Reshape", [top, flat], "confidence")
        builder.output("confidence", TensorProto.FLOAT, [1])

    def _next_embedding(self, table: tuple[str, str]) -> None:
        builder, spec = self.builder, self.spec
        scales = self._constant("scales/shape", np.array([spec.vocab_rows, -1, 1], np.int64))
        by_row = builder.node("Reshape", [table[1], scales], "scales")  # a constant: folded when the graph is loaded
        numbers = builder.node("Cast", [builder.node("Gather", [table[0], "token"], "next/q")], "next/float", to=1)
        zero = self._constant("zero", np.array(_ZERO, np.float32))
        centred = builder.node("Sub", [numbers, zero], "next/centred")
        scaled = builder.node("Mul", [centred, builder.node("Gather", [by_row, "token"], "next/scale")], "next/scaled")
        shape = self._constant("next/shape", np.array([1, 1, spec.hidden_size], np.int64))
        builder.node("Reshape", [scaled, shape], "next_embedding")
        builder.output("next_embedding", TensorProto.FLOAT, [1, 1, spec.hidden_size])
