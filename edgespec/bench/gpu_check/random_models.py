"""Models with the shapes of real ones and random weights, made in memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from edgespec.models.spec import ModelSpec, RopeSpec
from edgespec.models.weights.opening import WeightFile
from edgespec.models.weights.quantised import Layout, QuantisedTensor

_ROWS_AT_ONCE = 1 << 22  # random bytes that are drawn once; larger tensors repeat them


def spec(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocabulary: int, **changes: Any
) -> ModelSpec:
    """A Qwen2 unless `changes` says otherwise."""
    fields: dict[str, Any] = {
        "architecture": "qwen2",
        "max_positions": 4096,
        "rms_norm_eps": 1e-6,
        "rope": RopeSpec(1e6),
        "tie_embeddings": True,
        "qkv_bias": True,
        "windows": (None,) * layers,
    }
    return ModelSpec(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, **(fields | changes),
    )  # fmt: skip


# Shapes as in the config.json of each model on the hub.
QWEN_7B = spec(3584, 28, 28, 4, 128, 18944, 152064, tie_embeddings=False)
QWEN_3B = spec(2048, 36, 16, 2, 128, 11008, 151936)
QWEN_HALF_B = spec(896, 24, 14, 2, 64, 4864, 151936)
TINY = spec(64, 2, 4, 2, 16, 96, 320, max_positions=512)
TINY_DRAFT = spec(32, 1, 2, 1, 16, 64, 320, max_positions=512)


class RandomWeights:
    """Looks like a `WeightFile`. bits: of matrices, None = plain numbers. The same seed gives the same numbers."""

    def __init__(self, model: ModelSpec, *, seed: int = 0, bits: int | None = 4, group: int = 32) -> None:
        self.spec = model
        self._seed, self._bits, self._group = seed, bits, group
        self._shapes = dict(_shapes(model))
        self._bytes = np.random.default_rng(seed).integers(0, 256, _ROWS_AT_ONCE, np.uint8)

    @property
    def file(self) -> WeightFile:
        return cast(WeightFile, self)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def layout(self, name: str) -> Layout | None:
        bits = self._bits_of(name)
        return None if bits is None else Layout(bits, self._group, "symmetric")

    def by_rows(self, name: str) -> bool:
        return False

    def pieces(self, name: str, numbers: int) -> Iterator[npt.NDArray[np.float32]]:
        yield self.read(name)

    def quantised_pieces(self, name: str, numbers: int) -> Iterator[QuantisedTensor]:
        kept = self.quantised(name)
        if kept is not None:
            yield kept

    def read(self, name: str) -> npt.NDArray[np.float32]:
        kept = self.quantised(name)
        if kept is not None:
            return _dequantised(kept)
        shape = self._shapes[name]
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        numbers = rng.standard_normal(shape, np.float32) * np.float32(0.1 if len(shape) == 1 else shape[1] ** -0.5)
        return numbers + np.float32(1) if name.endswith("norm.weight") else numbers

    def quantised(self, name: str) -> QuantisedTensor | None:
        bits = self._bits_of(name)
        if bits is None:
            return None
        rows, columns = self._shapes[name]
        start = zlib.crc32(name.encode()) % (_ROWS_AT_ONCE // 2)
        q = np.resize(self._bytes[start:], (rows, columns * bits // 8))
        # Results of about the size of their inputs: uniform 4 (8) bits have a deviation of 4.6 (74).
        scale = np.full((rows, columns // self._group), (4.6 if bits == 4 else 74.0) ** -1 * columns**-0.5, np.float16)
        return QuantisedTensor(bits, self._group, q if bits == 4 else q.view(np.int8), scale)

    def _bits_of(self, name: str) -> int | None:
        """Embeddings have 8 bits where the rest has 4, as in files that people have."""
        if self._bits is None or len(self._shapes[name]) == 1:
            return None
        return 8 if "embed" in name or "lm_head" in name else self._bits


def _dequantised(kept: QuantisedTensor) -> npt.NDArray[np.float32]:
    rows, columns = kept.shape
    q = kept.values().astype(np.float32) - np.float32(8 if kept.bits == 4 else 0)
    return (q * kept.scale.astype(np.float32)[..., None]).reshape(rows, columns)


def _shapes(model: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    wide, q, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inner, found = model.intermediate_size, [("model.embed_tokens.weight", (model.vocab_size, model.hidden_size))]
    shapes: list[tuple[str, tuple[int, ...]]] = [*found]
    for index in range(model.num_layers):
        prefix = f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes.append((f"{attention}{part}_proj.weight", (rows, wide)))
            if model.qkv_bias:
                shapes.append((f"{attention}{part}_proj.bias", (rows,)))
            if model.qk_norm and part != "v":
                shapes.append((f"{attention}{part}_norm.weight", (model.head_dim,)))
        shapes += [
            (f"{attention}o_proj.weight", (wide, q)),
            (f"{prefix}input_layernorm.weight", (wide,)),
            (f"{prefix}post_attention_layernorm.weight", (wide,)),
            (f"{prefix}mlp.gate_proj.weight", (inner, wide)),
            (f"{prefix}mlp.up_proj.weight", (inner, wide)),
            (f"{prefix}mlp.down_proj.weight", (wide, inner)),
        ]
    shapes.append(("model.norm.weight", (wide,)))
    if not model.tie_embeddings:
        shapes.append(("lm_head.weight", (model.vocab_size, wide)))
    return shapes
