"""Weights of the CUDA engine: int4 and int8 as the file has them, everything else in half precision.

Tensors are read one at a time and moved to the device, so the host never holds more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgespec.kernels.reference import Weight
from edgespec.kernels.weights import QuantisedTorch, can_stack, stacked
from edgespec.models.rope import rotary_tables
from edgespec.models.spec import ModelSpec
from edgespec.models.weights.opening import WeightFile


@dataclass(frozen=True, slots=True)
class Linear:
    """A product: one weight, or several that could not be stacked (other bits, groups or modes), by rows."""

    parts: tuple[Weight, ...]
    bias: Tensor | None

    def weights(self) -> list[Weight]:
        return [*self.parts, *([] if self.bias is None else [self.bias])]

    def tensors(self) -> list[Tensor]:
        found = [] if self.bias is None else [self.bias]
        for part in self.parts:
            found += part.tensors() if isinstance(part, QuantisedTorch) else [part]
        return found


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """One layer. q, k, v and gate, up are one product each where the file lets them be stacked."""

    input_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    def tensors(self) -> list[Tensor]:
        norms = [self.input_norm, self.mlp_norm, *(self.head_norms or ())]
        return norms + [t for linear in (self.qkv, self.output, self.gate_up, self.down) for t in linear.tensors()]


@dataclass(frozen=True, slots=True)
class CudaModel:
    """All weights of a decoder on the device, and the rotary tables float32 [positions, head_dim / 2]."""

    spec: ModelSpec
    dtype: torch.dtype
    embedding: Weight
    layers: tuple[CudaLayer, ...]
    norm: Tensor
    head: Linear
    cos: Tensor
    sin: Tensor

    def tensors(self) -> list[Tensor]:
        """Every tensor of the weights once, in a fixed order: what a slot's layout is made of."""
        found = self.embedding.tensors() if isinstance(self.embedding, QuantisedTorch) else [self.embedding]
        found += [t for layer in self.layers for t in layer.tensors()] + [self.norm]
        return found if self.spec.tie_embeddings else found + self.head.tensors()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


Sink = Callable[[Weight], Weight]


def load_model(
    weights: WeightFile,
    device: torch.device,
    dtype: torch.dtype,
    *,
    keep_blocks: bool,
    positions: int,
    sink: Sink | None = None,
) -> CudaModel:
    """Read all weights. keep_blocks: int4 and int8 stay as they are, else everything becomes `dtype`.

    sink: takes each finished weight on the host, in the order of `CudaModel.tensors`, and returns where it lies on the
    device; None = a copy there. Raises ModelError for weights that cannot be read, and what the device raises when its
    memory is out.
    """
    return _Reader(weights, dtype, keep_blocks, sink or (lambda weight: weight.to(device))).model(positions, device)


class _Reader:
    def __init__(self, weights: WeightFile, dtype: torch.dtype, keep_blocks: bool, sink: Sink) -> None:
        self._weights = weights
        self._dtype = dtype
        self._keep = keep_blocks
        self._sink = sink

    def model(self, positions: int, device: torch.device) -> CudaModel:
        spec = self._weights.spec
        embedding = self._sink(self._weight("model.embed_tokens.weight"))
        layers = tuple(self._layer(index) for index in range(spec.num_layers))
        norm = self._placed("model.norm.weight")
        head = Linear((embedding,), None) if spec.tie_embeddings else self._linear(["lm_head"], bias=False)
        cos, sin = (torch.from_numpy(table).to(device) for table in rotary_tables(spec, positions))
        return CudaModel(spec, self._dtype, embedding, layers, norm, head, cos, sin)

    def _layer(self, index: int) -> CudaLayer:
        spec, prefix = self._weights.spec, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        norms = tuple(self._placed(f"{attention}{part}_norm.weight") for part in "qk") if spec.qk_norm else None
        return CudaLayer(
            input_norm=self._placed(f"{prefix}input_layernorm.weight"),
            qkv=self._linear([f"{attention}{part}_proj" for part in "qkv"], bias=spec.qkv_bias),
            head_norms=None if norms is None else (norms[0], norms[1]),
            output=self._linear([f"{attention}o_proj"], bias=spec.output_bias),
            mlp_norm=self._placed(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear([f"{mlp}gate_proj", f"{mlp}up_proj"], bias=spec.mlp_bias),
            down=self._linear([f"{mlp}down_proj"], bias=spec.mlp_bias),
        )

    def _linear(self, names: Sequence[str], *, bias: bool) -> Linear:
        parts = tuple(self._sink(part) for part in _stacked([self._weight(f"{name}.weight") for name in names]))
        if not bias:
            return Linear(parts, None)
        biases = self._sink(torch.cat([self._tensor(f"{name}.bias") for name in names]))
        assert isinstance(biases, Tensor)
        return Linear(parts, biases)

    def _placed(self, name: str) -> Tensor:
        placed = self._sink(self._tensor(name))
        assert isinstance(placed, Tensor)
        return placed

    def _weight(self, name: str) -> Weight:
        """A matrix on the host, in the file's own form if that is kept."""
        kept = self._weights.quantised(name) if self._keep else None
        if kept is None:
            return self._tensor(name)
        return QuantisedTorch.from_arrays(
            bits=kept.bits, group=kept.group, q=kept.q, scale=kept.scale, zero=kept.zero, shift=kept.shift
        )

    def _tensor(self, name: str) -> Tensor:
        array = np.ascontiguousarray(self._weights.read(name))
        return torch.from_numpy(array).to(self._dtype)


def _stacked(parts: Sequence[Weight]) -> tuple[Weight, ...]:
    """One weight where all parts have the same form, else the parts as they are."""
    blocks = [part for part in parts if isinstance(part, QuantisedTorch)]
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(parts) > 1 and len(plain) == len(parts):
        return (torch.cat(plain),)
    if len(parts) > 1 and len(blocks) == len(parts) and can_stack(blocks):
        return (stacked(blocks),)
    return tuple(parts)
