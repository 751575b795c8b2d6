"""The decoder as an ONNX graph for ONNX Runtime's CPU provider.

Inputs: input_ids int64 [1, n]; rows int64 [k] (positions whose logits are wanted); seqlens_k int32 [1] (length after
this call, minus 1); total_length int32 [1]; cos, sin float32 [positions, head_dim/2]; past_key_i / past_value_i
float32 [1, kv_heads, capacity, head_dim]. Outputs: logits float32 [k, vocab]; hidden float32 [n, hidden] after the
final norm; present_key_i / present_value_i, bound to the very buffers of the past.

One row is special: ONNX Runtime computes attention (and float32 products) of a single row with other kernels than of
several, and the last bits differ; with activations rounded to 8 bits that grows to visible differences in the logits.
Attention meets that case in longer calls too: it takes query rows in blocks of twice the head size (fewer where the
L2 cache is small), and the last block may have one row left. Head sizes are multiples of 16 and caches powers of two:
calls of 1, 33, 65, ... rows are those in which that may happen. There the decoder adds another row behind, whose result
is thrown away. Block-quantised products do not depend on the number of rows, so those graphs take that row as
`padding` float32 [1, p, qkv] (p = 1 in such a call, else 0) only where attention needs it; `count` int64 [1] = n says
how many rows to keep. Float32 graphs have no such inputs; there the decoder feeds another token. Then logits are the
same bits whatever the block length was.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto

from edgespec.models.onnx.linear import BLOCK, LinearBuilder, load_blocks
from edgespec.models.onnx.writer import MICROSOFT, GraphWriter
from edgespec.models.spec import ModelSpec
from edgespec.models.weights.opening import WeightFile


def write_graph(weights: WeightFile, weight_format: str, folder: Path) -> None:
    """Write graph.onnx and weights.bin into `folder`. Raises ModelError for damaged weights."""
    writer = GraphWriter(folder)
    try:
        _DecoderGraph(writer, weights, weight_format).build()
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


class _DecoderGraph:
    def __init__(self, writer: GraphWriter, weights: WeightFile, weight_format: str) -> None:
        self.writer = writer
        self.weights = weights
        self.spec: ModelSpec = weights.spec
        self.format = weight_format
        self.linear = LinearBuilder(writer, weights, weight_format)
        self.pads_attention = weight_format != "float32" and not _float_layers(weights.spec)

    def build(self) -> None:
        writer, spec = self.writer, self.spec
        writer.input("input_ids", TensorProto.INT64, [1, "n"])
        writer.input("rows", TensorProto.INT64, ["k"])
        writer.input("seqlens_k", TensorProto.INT32, [1])
        writer.input("total_length", TensorProto.INT32, [1])
        if self.pads_attention:
            writer.input(
                "padding", TensorProto.FLOAT, [1, "p", (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim]
            )
            writer.input("count", TensorProto.INT64, [1])
        for name in ("cos", "sin"):
            writer.input(name, TensorProto.FLOAT, ["positions", spec.head_dim // 2])
        residual, branch = self._embedding(), ""
        for layer in range(spec.num_layers):
            residual, branch = self._layer(layer, residual, branch)
        _, normed = self._norm("model.norm", residual, branch)
        self._head(normed)

    def _embedding(self) -> str:
        writer, name = self.writer, "model.embed_tokens.weight"
        blocks = load_blocks(self.weights, name, self.format)
        self.tied = blocks  # the head needs them again if it is tied
        if blocks is None:
            return writer.node("Gather", [writer.constant(name, self.weights.read(name)), "input_ids"], "embedding")
        q, scale = writer.constant(f"{name}/q", blocks.q), writer.constant(f"{name}/scale", blocks.scale[..., None])
        picked = writer.node("Gather", [q, "input_ids"], "embedding/q")
        numbers = writer.node("Cast", [picked], "embedding/float", to=TensorProto.FLOAT)
        zero = writer.constant("embedding/zero", np.array(2 ** (blocks.bits - 1), np.float32))
        centred = writer.node("Sub", [numbers, zero], "embedding/centred")
        scaled = writer.node(
            "Mul", [centred, writer.node("Gather", [scale, "input_ids"], "embedding/scale")], "embedding/scaled"
        )
        if blocks.shift is not None:
            shift = writer.constant(f"{name}/shift", blocks.shift[..., None])
            scaled = writer.node(
                "Add", [scaled, writer.node("Gather", [shift, "input_ids"], "embedding/shift")], "embedding/sum"
            )
        shape = writer.constant("embedding/shape", np.array([1, -1, self.spec.hidden_size], np.int64))
        return writer.node("Reshape", [scaled, shape], "embedding")

    def _norm(self, name: str, residual: str, branch: str) -> tuple[str, str]:
        """(residual + branch, its normed form); an empty branch adds nothing."""
        weight = self.writer.constant(f"{name}.weight", self.weights.read(f"{name}.weight"))
        epsilon, out = self.spec.rms_norm_eps, f"{name}/normed"
        if not branch:
            node = self.writer.node("SimplifiedLayerNormalization", [residual, weight], out, axis=-1, epsilon=epsilon)
            return residual, node
        outputs = [out, "", "", f"{name}/residual"]
        inputs = [residual, branch, weight]
        self.writer.node("SkipSimplifiedLayerNormalization", inputs, outputs, domain=MICROSOFT, epsilon=epsilon)
        return f"{name}/residual", out

    def _layer(self, layer: int, residual: str, branch: str) -> tuple[str, str]:
        prefix = f"model.layers.{layer}"
        residual, normed = self._norm(f"{prefix}.input_layernorm", residual, branch)
        attended = self._attention(layer, normed)
        branch = self.linear.add(attended, [f"{prefix}.self_attn.o_proj"], f"{prefix}/o")
        residual, normed = self._norm(f"{prefix}.post_attention_layernorm", residual, branch)
        return residual, self._mlp(prefix, normed)

    def _attention(self, layer: int, x: str) -> str:
        writer, spec, prefix = self.writer, self.spec, f"model.layers.{layer}"
        shape: list[int | str] = [1, spec.num_kv_heads, "capacity", spec.head_dim]
        past = [writer.input(f"past_{kind}_{layer}", TensorProto.FLOAT, shape) for kind in ("key", "value")]
        present = [f"present_{kind}_{layer}" for kind in ("key", "value")]
        for name in present:
            writer.output(name, TensorProto.FLOAT, shape)
        packed = self.linear.add(x, [f"{prefix}.self_attn.{part}_proj" for part in "qkv"], f"{prefix}/qkv")
        if self.pads_attention:
            packed = writer.node("Concat", [packed, "padding"], f"{prefix}/qkv_padded", axis=1)
        query = self._normed_heads(prefix, packed) if spec.qk_norm else [packed, "", ""]
        window = spec.windows[layer]
        attended = writer.node(
            "GroupQueryAttention",
            [*query, *past, "seqlens_k", "total_length", "cos", "sin"],
            [f"{prefix}/attention", *present],
            domain=MICROSOFT,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            do_rotary=1,
            rotary_interleaved=0,
            local_window_size=-1 if window is None else window,
        )
        if not self.pads_attention:
            return attended
        start, axis = (
            writer.constant("attention/start", np.array([0], np.int64)),
            writer.constant("attention/axis", np.array([1], np.int64)),
        )
        return writer.node("Slice", [attended, start, "count", axis], f"{prefix}/attention_rows")

    def _normed_heads(self, prefix: str, packed: str) -> list[str]:
        """Split q, k, v and norm each head of q and k (qwen3)."""
        writer, spec = self.writer, self.spec
        widths = {"q": spec.num_heads * spec.head_dim, "k": spec.num_kv_heads * spec.head_dim}
        sizes = writer.constant("qkv/sizes", np.array([widths["q"], widths["k"], widths["k"]], np.int64))
        parts = [f"{prefix}/{part}" for part in "qkv"]
        writer.node("Split", [packed, sizes], parts, axis=-1)
        for index, (part, heads_count) in enumerate((("q", spec.num_heads), ("k", spec.num_kv_heads))):
            heads = writer.constant(f"heads/shape_{part}", np.array([1, -1, heads_count, spec.head_dim], np.int64))
            flat = writer.constant(f"heads/flat_{part}", np.array([1, -1, widths[part]], np.int64))
            name = f"{prefix}.self_attn.{part}_norm"
            split = writer.node("Reshape", [parts[index], heads], f"{name}/heads")
            _, normed = self._norm(name, split, "")
            parts[index] = writer.node("Reshape", [normed, flat], f"{name}/flat")
        return parts

    def _mlp(self, prefix: str, x: str) -> str:
        writer, inner = self.writer, self.spec.intermediate_size
        both = self.linear.add(x, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], f"{prefix}/gate_up")
        sizes = writer.constant("mlp/sizes", np.array([inner, inner], np.int64))
        writer.node("Split", [both, sizes], [f"{prefix}/gate", f"{prefix}/up"], axis=-1)
        gate = writer.node(
            "QuickGelu", [f"{prefix}/gate"], f"{prefix}/silu", domain=MICROSOFT, alpha=1.0
        )  # x sigmoid(x)
        product = writer.node("Mul", [gate, f"{prefix}/up"], f"{prefix}/gated")
        return self.linear.add(product, [f"{prefix}.mlp.down_proj"], f"{prefix}/down")

    def _head(self, normed: str) -> None:
        writer, spec = self.writer, self.spec
        axis = writer.constant("batch_axis", np.array([0], np.int64))
        writer.node("Squeeze", [normed, axis], "hidden")
        writer.node("Gather", ["hidden", "rows"], "hidden/rows", axis=0)
        name = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
        blocks = self.tied if spec.tie_embeddings else load_blocks(self.weights, name, self.format)
        if blocks is None:
            weight = writer.constant(name, self.weights.read(name))  # shared with the embedding where tied
            writer.node("Gemm", ["hidden/rows", weight], "logits", transB=1)
        else:
            # An 8-bit tied head uses the embedding's own constant; a 4-bit one packs two numbers a byte.
            self.linear.product("hidden/rows", blocks, "logits", weight_name=f"{name}/q" if blocks.bits == 8 else None)
        writer.output("logits", TensorProto.FLOAT, ["k", spec.vocab_size])
        writer.output("hidden", TensorProto.FLOAT, ["n", spec.hidden_size])


def _float_layers(spec: ModelSpec) -> bool:
    """Whether some matrix has no blocks of 32 along its input, and so stays float32 in every format."""
    return any(width % BLOCK for width in (spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim))
