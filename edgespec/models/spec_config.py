"""ModelSpec from a Hugging Face config.json, with the defaults and the reading order of transformers' own classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from edgespec.errors import ModelError
from edgespec.models.spec import Architecture, ModelSpec, RopeKind, RopeSpec, check_consistency, stop_ids

CLASSES = {  # of transformers
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MISSING = object()


class _Settings:
    """Typed access to config keys; every wrong type is a ModelError that names the key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def integer(self, key: str, default: Any = _MISSING) -> int:
        value = self._get(key, default)
        if type(value) is not int:
            raise self.error(key, value, "a whole number")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float):
            raise self.error(key, value, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.error(key, value, "a number") from None

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "true or false")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:  # transformers treats null as absent for these keys
            value = default
        if value is _MISSING:
            raise ModelError(f"{self.source}: {key} is missing; this is not the config of a supported model.")
        return value

    def error(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"{self.source}: {key} is {str(value)[:80]!r}, it must be {wanted}.")


def spec_from_config(
    config: Mapping[str, Any], *, source: str, generation_config: Mapping[str, Any] | None = None
) -> ModelSpec:
    """See `ModelSpec.from_config`."""
    settings = _Settings(config, source)
    architecture = _architecture(config, source)
    _refuse_features(config, source)
    heads = settings.integer("num_attention_heads")
    hidden = settings.integer("hidden_size")
    layers = settings.integer("num_hidden_layers")
    if not 1 <= layers <= 2048 or heads < 1:
        raise ModelError(f"{source}: {layers} layers with {heads} attention heads are not a supported model.")
    vocab = settings.integer("vocab_size")
    attention_bias = architecture in ("llama", "qwen3") and settings.flag("attention_bias", False)
    return check_consistency(
        ModelSpec(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=settings.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=settings.integer(
                "num_key_value_heads", 8 if _absent_in_mistral(config, architecture) else heads
            ),
            head_dim=_head_dim(settings, architecture, hidden, heads),
            max_positions=settings.integer("max_position_embeddings"),
            rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
            rope=_rope(settings),
            tie_embeddings=settings.flag("tie_word_embeddings", False),
            qkv_bias=architecture == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=architecture == "llama" and settings.flag("mlp_bias", False),
            qk_norm=architecture == "qwen3",
            windows=_windows(settings, architecture, layers),
            bos_token_id=_token_id(config, generation_config),
            eos_token_ids=stop_ids(
                [config.get("eos_token_id"), (generation_config or {}).get("eos_token_id")], vocab, source
            ),
        ),
        source,
    )


def _absent_in_mistral(config: Mapping[str, Any], architecture: str) -> bool:
    return architecture == "mistral" and "num_key_value_heads" not in config  # null there means "as many as heads"


def _architecture(config: Mapping[str, Any], source: str) -> Architecture:
    model_type, classes = config.get("model_type"), config.get("architectures")
    supported = ", ".join(CLASSES)
    if not isinstance(model_type, str) or model_type not in CLASSES:
        label = f"{str(model_type)[:80]!r}" if model_type is not None else "not given"
        raise ModelError(f"{source}: model_type is {label}, which is not supported (supported: {supported}).")
    if classes and classes != [CLASSES[model_type]]:
        raise ModelError(
            f"{source}: architectures is {str(classes)[:80]}; with model_type {model_type} only "
            f"{CLASSES[model_type]} is supported."
        )
    return cast(Architecture, model_type)


def _refuse_features(config: Mapping[str, Any], source: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{source}: hidden_act is {str(activation)[:40]!r}; only 'silu' is supported.")
    if config.get("quantization_config") is not None:
        raise ModelError(
            f"{source}: quantization_config asks for pre-quantised weights, which are not supported; "
            "use the original checkpoint or a GGUF file."
        )
    for key in ("rope_interleaved", "use_mrope", "num_local_experts", "num_experts"):
        if config.get(key):
            raise ModelError(f"{source}: {key} is set, which is not supported.")


def _head_dim(settings: _Settings, architecture: str, hidden: int, heads: int) -> int:
    if settings.values.get("head_dim") is not None:
        return settings.integer("head_dim")
    if architecture == "qwen3":
        return 128
    if hidden % heads:
        raise ModelError(
            f"{settings.source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and head_dim is not given."
        )
    return hidden // heads


def _token_id(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> int | None:
    for settings in (config, generation_config or {}):
        value = settings.get("bos_token_id")
        if type(value) is int and value >= 0:
            return value
    return None


def _windows(settings: _Settings, architecture: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, as each architecture's class in transformers decides it."""
    config = settings.values
    types = config.get("layer_types")
    if types is not None:
        known = isinstance(types, list) and all(t in ("full_attention", "sliding_attention") for t in types)
        if not known or len(types) != layers:
            raise settings.error("layer_types", types, f"{layers} times full_attention or sliding_attention")
    if architecture in ("llama", "mistral"):
        window = None
        if architecture == "mistral":
            no_window = config.get("sliding_window", 4096) is None
            window = None if no_window else settings.integer("sliding_window", 4096)
        if types is not None and set(types) != {"full_attention" if window is None else "sliding_attention"}:
            raise ModelError(
                f"{settings.source}: layer_types mixes windows, which is not supported for {architecture}."
            )
        return (window,) * layers
    if not settings.flag("use_sliding_window", False) or (
        "sliding_window" in config and config["sliding_window"] is None
    ):
        if types is not None and "sliding_attention" in types:
            raise ModelError(f"{settings.source}: layer_types has sliding_attention but use_sliding_window is off.")
        return (None,) * layers
    window = settings.integer("sliding_window", 4096)
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = settings.integer("max_window_layers", 28)
    return tuple(window if index >= first else None for index in range(layers))


def _rope(settings: _Settings) -> RopeSpec:
    """From `rope_theta` + `rope_scaling` (old form) or `rope_parameters` (transformers 5)."""
    config, source = settings.values, settings.source
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(name) or {}
    if not isinstance(scaling, Mapping):
        raise settings.error(name, scaling, "an object")
    if "full_attention" in scaling or "sliding_attention" in scaling:
        per_type = [value for value in scaling.values() if value is not None]
        if not per_type or any(v != per_type[0] for v in per_type) or not isinstance(per_type[0], Mapping):
            raise ModelError(f"{source}: {name} differs between layer types, which is not supported.")
        scaling = per_type[0]
    rope = _Settings(scaling, f"{source}: {name}")
    theta = rope.number("rope_theta", settings.number("rope_theta", 10000.0))
    if rope.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor is set, which is not supported.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "factors":  # edgespec's own: what GGUF files say by a tensor
        factors = scaling.get("factors")
        if not isinstance(factors, list) or not all(type(f) in (int, float) for f in factors):
            raise rope.error("factors", factors, "a list of numbers")
        return RopeSpec(theta, "factors", factors=tuple(map(float, factors)))
    if kind not in ("default", "linear", "llama3", "yarn") or "mrope_section" in scaling:
        raise ModelError(
            f"{source}: rope type {str(kind)[:40]!r} is not supported (supported: default, linear, llama3, yarn)."
        )
    if kind == "default":
        if scaling.get("factor", 1.0) not in (None, 1, 1.0):
            raise ModelError(f"{source}: {name} has a factor but no rope_type, so its meaning is unknown.")
        return RopeSpec(theta)
    original = settings.integer(
        "original_max_position_embeddings",
        scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings"),
    )
    if kind == "yarn" and scaling.get("factor") is None:
        factor = settings.integer("max_position_embeddings") / max(original, 1)
    else:
        factor = rope.number("factor")

    def optional(key: str) -> float | None:
        return None if scaling.get(key) is None else rope.number(key)

    return RopeSpec(
        theta,
        cast(RopeKind, kind),
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor", _MISSING if kind == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", _MISSING if kind == "llama3" else 4.0),
        original_max_positions=None if kind == "linear" else original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        attention_factor=optional("attention_factor"),
        truncate=rope.flag("truncate", True),
    )
