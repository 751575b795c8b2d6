"""ModelSpec from GGUF metadata, and the names GGUF gives to tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from edgespec.errors import ModelError
from edgespec.models.spec import Architecture, ModelSpec, RopeSpec, check_consistency, stop_ids

ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
# Settings that change the computation and that no supported architecture has: refused when set.
_REFUSED = (
    "expert_count",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)


def canonical_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None for a tensor that is none of a supported model's."""
    match = _BLOCK.fullmatch(name)
    if match:
        layer, part, suffix = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{suffix}" if part in _LAYER else None
    part, _, suffix = name.rpartition(".")
    return f"{_TOP[part]}.{suffix}" if part in _TOP and suffix == "weight" else None


class _Metadata:
    """Typed access to the keys of one architecture."""

    def __init__(self, values: Mapping[str, Any], architecture: str, source: str) -> None:
        self.values = values
        self.architecture = architecture
        self.source = source

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # some keys may be given per layer
        if type(value) is not int:
            raise self.error(key, value, "a whole number, the same for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float):
            raise self.error(key, value, "a number")
        return float(cast(float, value))

    def error(self, key: str, value: Any, wanted: str) -> ModelError:
        shown = "missing" if value is None else repr(str(value)[:80])
        return ModelError(f"{self.source}: {self.architecture}.{key} is {shown}, it must be {wanted}.")


def spec_from_gguf(
    metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]], *, source: str
) -> ModelSpec:
    """See `ModelSpec.from_gguf`."""
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        label = "missing" if name is None else repr(str(name)[:80])
        raise ModelError(
            f"{source}: general.architecture is {label}, which is not supported "
            f"(supported: {', '.join(_ARCHITECTURES)})."
        )
    architecture = cast(Architecture, name)
    values = _Metadata(metadata, architecture, source)
    for key in _REFUSED:
        if values.get(key):
            raise ModelError(f"{source}: {architecture}.{key} is set, which is not supported.")
    heads, hidden = values.integer("attention.head_count"), values.integer("embedding_length")
    layers = values.integer("block_count")
    if heads < 1 or not 1 <= layers <= 2048:
        raise ModelError(f"{source}: {layers} layers with {heads} attention heads are not a supported model.")
    vocab = _vocabulary(values, tensor_shapes)
    return check_consistency(
        ModelSpec(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=values.integer("feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=values.integer("attention.head_count_kv", heads),
            head_dim=_head_dim(values, hidden, heads),
            max_positions=values.integer("context_length"),
            rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
            rope=_rope(values),
            tie_embeddings="output.weight" not in tensor_shapes,
            qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
            output_bias="blk.0.attn_output.bias" in tensor_shapes,
            mlp_bias="blk.0.ffn_up.bias" in tensor_shapes,
            qk_norm=architecture == "qwen3",
            windows=_windows(values, layers),
            bos_token_id=_token_id(metadata, "bos", vocab),
            eos_token_ids=stop_ids(
                [metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")], vocab, source
            ),
        ),
        source,
    )


def _vocabulary(values: _Metadata, shapes: Mapping[str, tuple[int, ...]]) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None:
        raise ModelError(f"{values.source}: tensor token_embd.weight is missing; the file is incomplete.")
    rows = shape[0]
    declared = values.integer("vocab_size", rows)
    if declared != rows:
        raise ModelError(
            f"{values.source}: {values.architecture}.vocab_size is {declared} but tensor token_embd.weight "
            f"has {rows} rows."
        )
    tokens = values.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise ModelError(
            f"{values.source}: the vocabulary has {len(tokens)} tokens but tensor token_embd.weight has {rows} rows."
        )
    return rows


def _head_dim(values: _Metadata, hidden: int, heads: int) -> int:
    if values.get("attention.key_length") is None and hidden % heads:
        raise ModelError(f"{values.source}: embedding_length {hidden} is not a multiple of {heads} attention heads.")
    size = values.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = values.integer(key, size)
        if other != size:
            raise ModelError(f"{values.source}: {key} is {other} but heads have {size} numbers; this is not supported.")
    return size


def _windows(values: _Metadata, layers: int) -> tuple[int | None, ...]:
    window = values.integer("attention.sliding_window", 0)
    if not window:
        return (None,) * layers
    if values.architecture != "llama":
        raise ModelError(
            f"{values.source}: attention.sliding_window is not supported for {values.architecture} GGUF files."
        )
    return (window,) * layers  # Mistral files arrive as "llama"; all their layers use the window


def _rope(values: _Metadata) -> RopeSpec:
    theta = values.number("rope.freq_base", 10000.0)
    kind = values.get("rope.scaling.type")
    legacy = values.get("rope.scale_linear")  # name of the linear factor before scaling types existed
    if kind is None and legacy is not None:
        kind = "linear"
    if kind in (None, "none"):
        if values.get("rope.scaling.factor") not in (None, 0, 1):
            raise ModelError(f"{values.source}: rope.scaling.factor is set but rope.scaling.type is not.")
        return RopeSpec(theta)
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{values.source}: rope.scaling.type {str(kind)[:40]!r} is not supported (linear and yarn are)."
        )
    factor = values.number("rope.scaling.factor", None if legacy is None else values.number("rope.scale_linear"))
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=factor)
    unset = {
        "yarn_ext_factor": (1.0, -1.0),
        "yarn_attn_factor": (1.0,),
        "attn_factor": (1.0,),
        "yarn_log_multiplier": (0.0,),
    }
    for key, neutral in unset.items():
        if values.number(f"rope.scaling.{key}", neutral[0]) not in neutral:
            raise ModelError(f"{values.source}: rope.scaling.{key} is set, which is not supported.")
    return RopeSpec(
        theta,
        "yarn",
        factor=factor,
        original_max_positions=values.integer("rope.scaling.original_context_length", values.integer("context_length")),
        beta_fast=values.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=values.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _token_id(metadata: Mapping[str, Any], name: str, vocab: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if type(value) is int and 0 <= value < vocab else None
