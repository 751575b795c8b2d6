"""Weights of the CUDA engine: int4 and int8 as the file has them, everything else in half precision.

Weights are read in pieces of some rows, each of which moves to where it stays on the device before the next is read: on
a Jetson what the host holds meanwhile is taken from the one memory that was planned to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from edgespec.kernels.reference import Weight
from edgespec.kernels.weights import QuantisedTorch
from edgespec.models.rope import rotary_tables
from edgespec.models.spec import ModelSpec
from edgespec.models.weights.opening import WeightFile
from edgespec.models.weights.quantised import Layout, QuantisedTensor
from edgespec.models.weights.stored_packed import COLUMNS

PIECE = 1 << 19  # numbers of a piece, about
# Bytes of the host that a number takes while it is read, by what is done to it (a test measures them): dequantised, or
# kept as it is; of the packings of GPTQ and AWQ, whose matrices come whole, less, but more for some outputs at a time.
_FLOAT_BYTES, _KEPT_BYTES = 32, 6
_PACKED_FLOAT_BYTES, _PACKED_BYTES, _UNPACKING_BYTES = 8, 4, 12


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


@dataclass(frozen=True)
class Source:
    """A weight on its way to the device: its rows, and the pieces of some of them, on the host, in order.

    What reading them raises, going through them raises.
    """

    rows: int
    pieces: Iterable[Weight]


Sink = Callable[[Source], Weight]


def load_model(
    weights: WeightFile,
    device: torch.device,
    dtype: torch.dtype,
    *,
    keep_blocks: bool,
    positions: int,
    sink: Sink,
) -> CudaModel:
    """Read all weights. keep_blocks: int4 and int8 stay as they are, else everything becomes `dtype`.

    sink: takes each weight, in the order of reading, and returns where it lies on the device.
    Raises ModelError for weights that cannot be read, and what the device raises when its memory is out.
    """
    return _Reader(weights, dtype, keep_blocks, sink).model(positions, device)


def host_bytes(weights: WeightFile, keep_blocks: bool) -> int:
    """At most what `load_model` takes of the host's memory beside what it makes, known from headers alone."""
    return max(_host_bytes(weights, name, keep_blocks) for name in weights.names())


def _host_bytes(weights: WeightFile, name: str, keep_blocks: bool) -> int:
    shape, kept = weights.shape(name), keep_blocks and weights.layout(name) is not None
    row = math.prod(shape[1:])
    numbers = shape[0] * row
    if weights.by_rows(name):
        return min(numbers, max(PIECE, weights.spec.head_dim * row)) * (_KEPT_BYTES if kept else _FLOAT_BYTES)
    unpacking = min(shape[0], COLUMNS) * row * _UNPACKING_BYTES
    return numbers * (_PACKED_BYTES if kept else _PACKED_FLOAT_BYTES) + unpacking


class _Reader:
    def __init__(self, weights: WeightFile, dtype: torch.dtype, keep_blocks: bool, sink: Sink) -> None:
        self._weights = weights
        self._dtype = dtype
        self._keep = keep_blocks
        self._sink = sink

    def model(self, positions: int, device: torch.device) -> CudaModel:
        spec = self._weights.spec
        embedding = self._sink(self._read("model.embed_tokens.weight").source)
        layers = tuple(self._layer(index) for index in range(spec.num_layers))
        norm = self._vector("model.norm.weight")
        head = Linear((embedding,), None) if spec.tie_embeddings else self._linear(["lm_head"], bias=False)
        cos, sin = (torch.from_numpy(table).to(device) for table in rotary_tables(spec, positions))
        return CudaModel(spec, self._dtype, embedding, layers, norm, head, cos, sin)

    def _layer(self, index: int) -> CudaLayer:
        spec, prefix = self._weights.spec, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        norms = tuple(self._vector(f"{attention}{part}_norm.weight") for part in "qk") if spec.qk_norm else None
        return CudaLayer(
            input_norm=self._vector(f"{prefix}input_layernorm.weight"),
            qkv=self._linear([f"{attention}{part}_proj" for part in "qkv"], bias=spec.qkv_bias),
            head_norms=None if norms is None else (norms[0], norms[1]),
            output=self._linear([f"{attention}o_proj"], bias=spec.output_bias),
            mlp_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear([f"{mlp}gate_proj", f"{mlp}up_proj"], bias=spec.mlp_bias),
            down=self._linear([f"{mlp}down_proj"], bias=spec.mlp_bias),
        )

    def _linear(self, names: Sequence[str], *, bias: bool) -> Linear:
        """One weight where all parts have the same form, else the parts as they are."""
        read = [self._read(f"{name}.weight") for name in names]
        sources = [part.source for part in read]
        parts = tuple(map(self._sink, [_stacked(sources)] if len({part.form for part in read}) == 1 else sources))
        return Linear(parts, self._vector(*(f"{name}.bias" for name in names)) if bias else None)

    def _vector(self, *names: str) -> Tensor:
        placed = self._sink(_stacked([self._floats(name) for name in names]))
        assert isinstance(placed, Tensor)
        return placed

    def _read(self, name: str) -> _Read:
        """A matrix, in the file's own form if that is kept."""
        columns, layout = self._weights.shape(name)[1], self._weights.layout(name) if self._keep else None
        if layout is not None and not self._weights.by_rows(name):  # only the whole tells which form it has
            whole = self._weights.quantised(name)
            if whole is not None:
                return _Read((columns, whole.layout), Source(whole.shape[0], (_kept(whole),)))
        elif layout is not None:
            pieces = map(_kept, self._weights.quantised_pieces(name, PIECE))
            return _Read((columns, layout), Source(self._weights.shape(name)[0], pieces))
        return _Read((columns, None), self._floats(name))

    def _floats(self, name: str) -> Source:
        pieces = (torch.from_numpy(piece).to(self._dtype) for piece in self._weights.pieces(name, PIECE))
        return Source(self._weights.shape(name)[0], pieces)


@dataclass(frozen=True)
class _Read:
    """A matrix that is about to be read. form: what those share that can be one weight, one below the other."""

    form: tuple[int, Layout | None]
    source: Source


def _kept(made: QuantisedTensor) -> QuantisedTorch:
    return QuantisedTorch.from_arrays(
        bits=made.bits, group=made.group, q=made.q, scale=made.scale, zero=made.zero, shift=made.shift
    )


def _stacked(sources: Sequence[Source]) -> Source:
    """Weights of one form, one below the other."""
    return Source(sum(source.rows for source in sources), chain.from_iterable(source.pieces for source in sources))


def in_rows(whole: Weight, pieces: Iterable[Weight]) -> Iterator[tuple[Weight, Weight]]:
    """Each piece, with the rows of `whole` that it belongs to (fewer where there are not so many)."""
    begin = 0
    for piece in pieces:
        end = begin + piece.shape[0]
        yield whole.rows(begin, end) if isinstance(whole, QuantisedTorch) else whole[begin:end], piece
        begin = end


def tensors_of(weight: Weight) -> list[Tensor]:
    return weight.tensors() if isinstance(weight, QuantisedTorch) else [weight]
