"""ModelSpec: the architecture numbers of a model, read from config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.errors import ModelError

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]

# Far above any real model; a number beyond them is damage, and would only lead to a huge allocation.
_LIMITS = {
    "vocab_size": 1 << 23,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_layers": 2048,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 4096,
    "max_positions": 1 << 28,
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base and, where the config asks for it, how its frequencies are scaled.

    kind "default" ignores the other fields. "linear": factor. "llama3": factor, low_freq_factor, high_freq_factor,
    original_max_positions. "yarn": factor, original_max_positions, beta_fast, beta_slow, mscale, mscale_all_dim,
    attention_factor (None = 0.1 ln(factor) + 1), truncate. "factors": one divisor per frequency (GGUF rope_freqs).
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the engines need to know about a decoder-only transformer besides its weights.

    vocab_size: rows of the embedding and of the LM head (may exceed the tokenizer's size: padding rows).
    windows: one entry per layer: the sliding window in tokens (a query sees itself and window-1 positions before it),
        or None.
    eos_token_ids: union of what config, generation config and GGUF metadata say; may be empty.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    def position_bytes(self, itemsize: int = 4) -> int:
        """Bytes of keys and values of one position, of numbers of `itemsize` bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, source: str, generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        """From a Hugging Face config.json (old or transformers-5 form). `source` names the file in errors.

        Raises ModelError for a missing, inconsistent or unsupported setting.
        """
        from edgespec.models.spec_config import spec_from_config

        return spec_from_config(config, source=source, generation_config=generation_config)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]], *, source: str
    ) -> ModelSpec:
        """From GGUF metadata and the shapes of the file's tensors (by GGUF name, rows first).

        Raises ModelError for a missing, inconsistent or unsupported setting. A `rope_freqs.weight` tensor is not read
        here: `open_weights` replaces `rope` by its factors.
        """
        from edgespec.models.spec_gguf import spec_from_gguf

        return spec_from_gguf(metadata, tensor_shapes, source=source)


def required_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a model of this spec has; tied embeddings are listed once, as embed_tokens."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linear = {
        "self_attn.q_proj": ((queries, hidden), spec.qkv_bias),
        "self_attn.k_proj": ((keys, hidden), spec.qkv_bias),
        "self_attn.v_proj": ((keys, hidden), spec.qkv_bias),
        "self_attn.o_proj": ((hidden, queries), spec.output_bias),
        "mlp.gate_proj": ((inner, hidden), spec.mlp_bias),
        "mlp.up_proj": ((inner, hidden), spec.mlp_bias),
        "mlp.down_proj": ((hidden, inner), spec.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (shape, biased) in linear.items():
        layer[f"{name}.weight"] = shape
        if biased:
            layer[f"{name}.bias"] = shape[:1]
    if spec.qk_norm:
        layer |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_embeddings:
        tensors["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return tensors


def check_consistency(spec: ModelSpec, source: str) -> ModelSpec:
    """`spec` itself if its numbers can belong to a model, else ModelError naming the number."""
    for name, limit in _LIMITS.items():
        value = getattr(spec, name)
        if not 1 <= value <= limit:
            raise ModelError(f"{source}: {name} is {value}, which no supported model has (1 to {limit}).")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"{source}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key/value heads."
        )
    if spec.head_dim % 2:
        raise ModelError(f"{source}: head_dim is {spec.head_dim}; rotary embeddings need an even number.")
    if not (math.isfinite(spec.rms_norm_eps) and 0 <= spec.rms_norm_eps < 1):
        raise ModelError(f"{source}: rms_norm_eps is {spec.rms_norm_eps}, it must be small and not negative.")
    if len(spec.windows) != spec.num_layers or any(w is not None and w < 1 for w in spec.windows):
        raise ModelError(f"{source}: the sliding windows {spec.windows} do not fit {spec.num_layers} layers.")
    _check_rope(spec, source)
    return spec


def _check_rope(spec: ModelSpec, source: str) -> None:
    rope = spec.rope
    numbers: dict[str, float | None] = {
        "theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
    for name, value in numbers.items():
        if value is not None and not (math.isfinite(value) and 0 < value < 1e18):
            raise ModelError(f"{source}: rope {name} is {value}, it must be a positive number.")
    for extra in (rope.mscale, rope.mscale_all_dim):
        if extra is not None and not (math.isfinite(extra) and 0 <= extra < 1e6):
            raise ModelError(f"{source}: rope mscale is {extra}, it must be a number that is not negative.")
    if rope.kind in ("llama3", "yarn") and rope.original_max_positions is None:
        raise ModelError(f"{source}: rope type {rope.kind} needs original_max_position_embeddings.")
    if rope.kind == "llama3" and rope.low_freq_factor == rope.high_freq_factor:
        raise ModelError(f"{source}: rope low_freq_factor and high_freq_factor must differ.")
    if rope.kind == "yarn" and rope.theta == 1:
        raise ModelError(f"{source}: rope theta must not be 1 with yarn.")
    if rope.factors is not None:
        if len(rope.factors) != spec.head_dim // 2 or not all(math.isfinite(f) and f > 0 for f in rope.factors):
            raise ModelError(f"{source}: the rotary factors must be {spec.head_dim // 2} positive numbers.")


def stop_ids(values: Iterable[Any], vocab_size: int, source: str) -> tuple[int, ...]:
    """Union, in order, of eos settings (an id, a list of ids, or None). Ids that no row can produce are left out."""
    ids: dict[int, None] = {}
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if type(item) is not int:
                raise ModelError(f"{source}: eos_token_id holds {str(item)[:60]!r}, it must be an id or a list of ids.")
            if 0 <= item < vocab_size:
                ids[item] = None
    return tuple(ids)
