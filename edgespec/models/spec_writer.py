"""config.json of a ModelSpec, in the form of transformers 5: the inverse of `spec_config`."""

from __future__ import annotations

from typing import Any

from edgespec.errors import ModelError
from edgespec.models.spec import ModelSpec, RopeSpec
from edgespec.models.spec_config import CLASSES

_YARN = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """config.json that `ModelSpec.from_config` reads as `spec`. Raises ModelError for what its class cannot express.

    The rope type "factors" (GGUF's rope_freqs) is edgespec's own; other programs refuse it.
    """
    config: dict[str, Any] = {
        "architectures": [CLASSES[spec.architecture]],
        "model_type": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": _rope(spec.rope),
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids) or None,
    }
    if spec.architecture == "qwen2":
        ordinary = spec.qkv_bias and not spec.output_bias
    elif spec.architecture == "mistral":
        ordinary = not spec.qkv_bias and not spec.output_bias
    else:
        ordinary = spec.qkv_bias == spec.output_bias
        config["attention_bias"] = spec.qkv_bias
    if spec.architecture == "llama":
        config["mlp_bias"] = spec.mlp_bias
    if not ordinary or (spec.mlp_bias and spec.architecture != "llama"):
        raise ModelError(f"config.json of {CLASSES[spec.architecture]} has no place for this model's biases.")
    return config | _windows(spec)


def _rope(rope: RopeSpec) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    names = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": _YARN}
    for name in names.get(rope.kind, ()):
        value = getattr(rope, name)
        if value is not None:
            parameters[name] = value
    if rope.kind in ("llama3", "yarn") and rope.original_max_positions is not None:
        parameters["original_max_position_embeddings"] = rope.original_max_positions
    if rope.factors is not None:
        parameters["factors"] = list(rope.factors)
    return parameters


def _windows(spec: ModelSpec) -> dict[str, Any]:
    sizes = {window for window in spec.windows if window is not None}
    if not sizes:
        return {"sliding_window": None} if spec.architecture == "mistral" else {}
    everywhere = all(window is not None for window in spec.windows)
    if len(sizes) == 1 and spec.architecture == "mistral" and everywhere:
        return {"sliding_window": sizes.pop()}
    if len(sizes) == 1 and spec.architecture in ("qwen2", "qwen3"):
        layers = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
        return {"use_sliding_window": True, "sliding_window": sizes.pop(), "layer_types": layers}
    raise ModelError("config.json cannot express this model's sliding windows.")
