"""ModelSpec: reading configs as transformers does, refusing what cannot work, and the rotary tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelError
from edgespec.models.rope import inverse_frequencies, rotary_tables
from edgespec.models.spec import ModelSpec, RopeSpec, required_tensors
from tests.support.tiny import tiny_config, tiny_tensors

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]


def spec_of(config: dict[str, Any], **generation: Any) -> ModelSpec:
    return ModelSpec.from_config(config, source="config.json", generation_config=generation or None)


def hf_config(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    values = dict(config)
    return AutoConfig.for_model(values.pop("model_type"), **values)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_required_tensors_are_those_of_the_architecture(architecture: str) -> None:
    config = tiny_config(architecture)
    shapes = {name: array.shape for name, array in tiny_tensors(config).items()}
    assert required_tensors(spec_of(config)) == shapes


def test_biases_follow_the_config() -> None:
    config = tiny_config("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    spec = spec_of(config)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.tie_embeddings) == (True, True, True, True)
    assert required_tensors(spec).keys() == tiny_tensors(config).keys()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_of_absent_keys_equal_transformers(architecture: str) -> None:
    config = tiny_config(architecture, num_attention_heads=8, hidden_size=64)
    for key in ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act"):
        del config[key]
    reference = hf_config(config)
    if architecture.startswith("qwen"):
        config["num_key_value_heads"] = reference.num_key_value_heads = (
            4  # transformers' default (32) fits no such model
        )
    spec = spec_of(config)
    head_dim = getattr(reference, "head_dim", None) or 64 // 8
    assert spec.head_dim == head_dim
    assert spec.num_kv_heads == reference.num_key_value_heads
    assert spec.rms_norm_eps == reference.rms_norm_eps
    assert spec.rope.theta == reference.rope_parameters["rope_theta"]
    assert spec.tie_embeddings == reference.tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"sliding_window": 8}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}),
        (
            "qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_windows_equal_transformers(architecture: str, changes: dict[str, Any]) -> None:
    config = tiny_config(architecture, **changes)
    reference = hf_config(config)
    window = getattr(reference, "sliding_window", None)
    types = getattr(reference, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window is not None else "full_attention"] * 2
    expected = tuple(window if kind == "sliding_attention" else None for kind in types)
    assert spec_of(config).windows == expected


ROPES: list[dict[str, Any]] = [
    {"rope_theta": 10000.0},
    {"rope_theta": 100000.0, "rope_scaling": None},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5000.0}, "rope_theta": None},
    {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 1000.0,
        },
    },
    {
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "truncate": False,
        },
    },
    {
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.8},
        "original_max_position_embeddings": 100,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: str(list(r.values())[-1])[:40])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_rotary_tables_equal_transformers(rope: dict[str, Any], head_dim: int) -> None:
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = tiny_config("llama", head_dim=head_dim) | rope
    config = {key: value for key, value in config.items() if value is not None}
    module = LlamaRotaryEmbedding(hf_config(config))
    spec = spec_of(config)
    frequencies, factor = inverse_frequencies(spec.rope, head_dim)
    np.testing.assert_allclose(frequencies, module.inv_freq.numpy(), rtol=1e-6)
    assert factor == pytest.approx(module.attention_scaling, rel=1e-12)
    positions = 200
    cos, sin = module(torch.zeros(1), torch.arange(positions)[None])
    ours = rotary_tables(spec, positions)
    assert all(table.dtype == np.float32 and table.shape == (positions, head_dim // 2) for table in ours)
    np.testing.assert_allclose(ours[0], cos[0, :, : head_dim // 2].numpy(), atol=4e-5)
    np.testing.assert_allclose(ours[1], sin[0, :, : head_dim // 2].numpy(), atol=4e-5)


def test_rotary_tables_are_exact_far_out() -> None:
    spec = spec_of(tiny_config("llama"))
    cos, sin = rotary_tables(spec, 70000)
    angle = 69999.0 * 10000.0 ** (-2 / 8)
    assert cos[69999, 1] == np.float32(np.cos(angle))
    assert sin[69999, 1] == np.float32(np.sin(angle))


def test_rotary_factors_divide_frequencies() -> None:
    rope = RopeSpec(10000.0, "factors", factors=(1.0, 2.0, 4.0, 8.0))
    base, _ = inverse_frequencies(RopeSpec(10000.0), 8)
    frequencies, factor = inverse_frequencies(rope, 8)
    assert factor == 1.0
    np.testing.assert_array_equal(frequencies, base / np.array([1, 2, 4, 8]))


def test_stop_ids_are_a_union() -> None:
    # B088: config, generation config and their lists all count; ids that no row has are left out.
    config = tiny_config("llama", eos_token_id=[2, 5])
    assert spec_of(config, eos_token_id=[7, 2, 288, -1]).eos_token_ids == (2, 5, 7)
    assert spec_of(tiny_config("llama", eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox'"),  # B124
        ({"model_type": None}, "model_type is not given"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"architectures": ["LlamaModel"]}, "LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "rope type"),
        ({"rope_scaling": {"factor": 2.0}}, "no rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor is 0.0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"full_attention": None}}, "differs between layer types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rope_theta": -1.0}, "theta is -1.0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "288"}, "vocab_size is '288'"),
        ({"hidden_size": 32.0}, "hidden_size is '32.0'"),
        ({"hidden_size": True}, "hidden_size is 'True'"),
        ({"num_hidden_layers": 0}, "0 layers"),
        ({"num_hidden_layers": 1 << 30}, "layers"),
        ({"num_attention_heads": 0}, "0 attention heads"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 6}, "not a multiple"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"max_position_embeddings": 0}, "max_positions is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(tiny_config("llama", **changes))
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "mixes windows"),
        ("mistral", {"sliding_window": 0}, "sliding windows"),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window is off"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": "8"}, "sliding_window"),
        ("qwen3", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types"),
    ],
)
def test_window_settings_that_cannot_work(architecture: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tiny_config(architecture, **changes))


GGUF_SHAPES = {"token_embd.weight": (288, 32), "output.weight": (288, 32)}


def gguf_metadata(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    values |= changes
    return {"general.architecture": "llama", **{f"llama.{k}": v for k, v in values.items() if v is not None}}


def test_gguf_numbers_equal_the_config() -> None:
    metadata = gguf_metadata() | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 0}
    assert ModelSpec.from_gguf(metadata, GGUF_SHAPES, source="m.gguf") == spec_of(tiny_config("llama"))


def test_gguf_details() -> None:
    def spec(**changes: Any) -> ModelSpec:
        return ModelSpec.from_gguf(gguf_metadata(**changes), GGUF_SHAPES, source="m.gguf")

    assert spec(**{"attention.head_count_kv": [2, 2]}).num_kv_heads == 2
    assert spec(**{"attention.key_length": 16}).head_dim == 16
    assert spec(**{"attention.sliding_window": 8}).windows == (8, 8)
    assert spec(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}).rope == RopeSpec(
        10000.0, "linear", factor=4.0
    )
    yarn = spec(
        **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    ).rope
    config = tiny_config("llama", rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    assert yarn == spec_of(config).rope
    tied = ModelSpec.from_gguf(gguf_metadata(), {"token_embd.weight": (288, 32)}, source="m.gguf")
    assert tied.tie_embeddings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_count": 8}, "expert_count"),
        ({"attention.head_count": None}, "attention.head_count is missing"),
        ({"attention.head_count_kv": [2, 4]}, "same for all layers"),
        ({"vocab_size": 300}, "vocab_size is 300 but tensor token_embd.weight has 288 rows"),  # B067
        ({"rope.dimension_count": 4}, "rope.dimension_count is 4"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.factor": 2.0}, "rope.scaling.type is not"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.factor is missing"),
        ({"embedding_length": 30}, "not a multiple"),
        ({"block_count": 1 << 31}, "layers"),
    ],
)
def test_gguf_settings_that_cannot_work(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ModelSpec.from_gguf(gguf_metadata(**changes), GGUF_SHAPES, source="m.gguf")


def test_gguf_of_another_architecture_is_named() -> None:
    with pytest.raises(ModelError, match=r"general.architecture is 'gemma3'"):  # B124
        ModelSpec.from_gguf({"general.architecture": "gemma3"}, GGUF_SHAPES, source="m.gguf")


def test_spec_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec_of(tiny_config()).vocab_size = 1  # type: ignore[misc]
