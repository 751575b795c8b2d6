"""The transformer layer as plain functions on torch tensors: its weights, normalisation, rotation, attention, MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.models.spec import ModelSpec
from edgespec.models.weights.opening import WeightFile


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer. Matrices are [out, in]; q/k/v and gate/up are stacked by rows, one product each."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def tensors(self) -> list[Tensor]:
        """The tensors that this layer really has."""
        values = (getattr(self, item.name) for item in fields(self))
        return [value for value in values if value is not None]


class WeightReader:
    """Reads tensors of a WeightFile one at a time into their final place, so no second copy of the model exists."""

    def __init__(self, weights: WeightFile, device: torch.device, dtype: torch.dtype) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, dequantised; float32 on the CPU uses the array that was read, without a copy."""
        return torch.from_numpy(self._weights.read(name)).to(self._device, self._dtype)

    def stacked(self, names: Sequence[str]) -> Tensor:
        """Several tensors with equal trailing shape as one, by rows."""
        shapes = [self._weights.shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        stack = torch.empty((rows, *shapes[0][1:]), device=self._device, dtype=self._dtype)
        begin = 0
        for name, shape in zip(names, shapes):
            stack[begin : begin + shape[0]] = torch.from_numpy(self._weights.read(name))
            begin += shape[0]
        return stack

    def layer(self, spec: ModelSpec, index: int) -> LayerWeights:
        """All weights of layer `index`, with the biases and norms that `spec` asks for."""
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = [f"{attention}{name}_proj" for name in "qkv"]
        gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]
        return LayerWeights(
            input_norm=self.tensor(f"{prefix}input_layernorm.weight"),
            qkv=self.stacked([f"{name}.weight" for name in qkv]),
            qkv_bias=self.stacked([f"{name}.bias" for name in qkv]) if spec.qkv_bias else None,
            q_norm=self.tensor(f"{attention}q_norm.weight") if spec.qk_norm else None,
            k_norm=self.tensor(f"{attention}k_norm.weight") if spec.qk_norm else None,
            output=self.tensor(f"{attention}o_proj.weight"),
            output_bias=self.tensor(f"{attention}o_proj.bias") if spec.output_bias else None,
            mlp_norm=self.tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.stacked([f"{name}.weight" for name in gate_up]),
            gate_up_bias=self.stacked([f"{name}.bias" for name in gate_up]) if spec.mlp_bias else None,
            down=self.tensor(f"{mlp}down_proj.weight"),
            down_bias=self.tensor(f"{mlp}down_proj.bias") if spec.mlp_bias else None,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one step share: n new positions, and `span` cache positions they may look at.

    positions: int64 [n]; cos, sin: float32 [n, 1, head_dim/2]; masks: per window bool [n, span], True where a query
    must not look.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    span: int
    masks: dict[int | None, Tensor]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [n, heads, head_dim]; the two halves of a head are the two coordinates of each pair."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def hidden_keys(positions: Tensor, span: int, window: int | None) -> Tensor:
    """Bool [n, span]: True where the query at `positions[i]` must not look at key j (later, or before its window)."""
    keys = torch.arange(span, device=positions.device)
    queries = positions[:, None]
    hidden = keys > queries
    return hidden if window is None else hidden | (keys <= queries - window)


def attention(
    x: Tensor, layer: LayerWeights, keys: Tensor, values: Tensor, step: Step, window: int | None, spec: ModelSpec
) -> Tensor:
    """Self-attention of x [n, hidden], which writes the new keys and values [kv_heads, capacity, head_dim] in place."""
    n, width = x.shape[0], spec.head_dim
    queries_end = spec.num_heads * width
    projected = F.linear(x, layer.qkv, layer.qkv_bias)
    q = projected[:, :queries_end].view(n, spec.num_heads, width)
    k, v = projected[:, queries_end:].view(n, 2, spec.num_kv_heads, width).unbind(1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, spec.rms_norm_eps), rms_norm(k, layer.k_norm, spec.rms_norm_eps)
    q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
    keys.index_copy_(1, step.positions, k.transpose(0, 1))
    values.index_copy_(1, step.positions, v.transpose(0, 1))

    # Query heads that share a key head become more rows of one product, so keys and values are never repeated.
    group = spec.num_heads // spec.num_kv_heads
    q = q.view(n, spec.num_kv_heads, group, width).permute(1, 2, 0, 3).reshape(spec.num_kv_heads, group * n, width)
    scores = torch.bmm(q, keys[:, : step.span].transpose(1, 2)) * width**-0.5
    scores = scores.view(spec.num_kv_heads, group, n, step.span).masked_fill(step.masks[window], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
    mixed = torch.bmm(weights.view(spec.num_kv_heads, group * n, step.span), values[:, : step.span])
    mixed = mixed.view(spec.num_kv_heads, group, n, width).permute(2, 0, 1, 3).reshape(n, queries_end)
    return F.linear(mixed, layer.output, layer.output_bias)


def mlp(x: Tensor, layer: LayerWeights) -> Tensor:
    """Gated MLP with SiLU."""
    gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
