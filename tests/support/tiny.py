"""Tiny random models on disk: the fixture "T" of the tests and its variants, as ordinary Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ["h e", "l l", "Ġ t", "Ġt he", "i n", "a n", "e r", "o r"]


def tiny_config(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """config.json of a 2-layer model: hidden 32, 4 heads (2 for keys/values), vocabulary 288."""
    config: dict[str, Any] = {
        "architectures": [architecture.capitalize() + "ForCausalLM"],
        "model_type": architecture,
        "vocab_size": 288,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    config.update(changes)
    return config


def tiny_tensors(config: dict[str, Any], seed: int = 0, scale: float = 0.3) -> dict[str, np.ndarray]:
    """Random float32 weights for `config`, by Hugging Face name; the same seed gives the same weights."""
    rng = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(vocab, hidden), "model.norm.weight": 1 + 0.1 * normal(hidden)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden)}
        shapes |= {"v_proj": (keys, hidden), "o_proj": (hidden, queries)}
        for name, shape in shapes.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = normal(*shape)
            biased = config["model_type"] == "qwen2" or config.get("attention_bias", False)
            if biased and (name != "o_proj" or config.get("attention_bias", False)):
                tensors[f"{prefix}self_attn.{name}.bias"] = normal(shape[0])
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}self_attn.{name}.weight"] = 1 + 0.1 * normal(head)
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        for name, shape in shapes.items():
            tensors[f"{prefix}mlp.{name}.weight"] = normal(*shape)
            if config.get("mlp_bias", False):
                tensors[f"{prefix}mlp.{name}.bias"] = normal(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + 0.1 * normal(hidden)
    return tensors


def tiny_tokenizer(vocab: int = 280) -> Tokenizer:
    """Byte-level BPE: 3 specials, 256 bytes, a few merges, cut or filled to `vocab` ids (fillers are words `wN`)."""
    tokens = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [m.replace(" ", "") for m in MERGES]
    tokens += [f"w{i}" for i in range(len(tokens), vocab)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS])
    return tokenizer


def write_tiny(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    scale: float = 0.3,
    tokenizer_size: int = 280,
    chat_template: str | None = CHAT_TEMPLATE,
    **changes: Any,
) -> Path:
    """Write a complete model folder (config, weights, tokenizer) and return it. `changes` go into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(architecture, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_tensors(config, seed, scale), folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer(tokenizer_size).save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "add_bos_token": False}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
