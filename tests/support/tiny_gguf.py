"""Tiny GGUF files, written as llama.cpp's converter writes them: the twin of `tiny.write_tiny`'s folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.tiny import CHAT_TEMPLATE, MERGES, SPECIALS, tiny_config, tiny_tensors, tiny_tokenizer

_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """As in "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{suffix}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rotary rows -> interleaved ones, as files of the "llama" architecture have them."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def add_tokenizer(writer: gguf.GGUFWriter, size: int, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """The vocabulary of `tiny_tokenizer(size)`, as GGUF metadata."""
    vocabulary = tiny_tokenizer(size).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    quant: str = "F32",
    seed: int = 0,
    scale: float = 0.3,
    tokenizer_size: int = 280,
    chat_template: str | None = CHAT_TEMPLATE,
    tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    raw_kind: str = "Q4_K",
    **changes: Any,
) -> Path:
    """Write the model of `write_tiny(architecture, seed=..., **changes)` as a GGUF file and return its path.

    quant: type of the matrices whose rows are whole blocks (norms and biases stay F32); the gguf package cannot make
    "Q4_K", "Q5_K" and "Q6_K". tensors: other weights, by Hugging Face name; uint8 arrays are ready-made blocks of type
    `raw_kind`. metadata: further keys (int, float or str).
    extra: further float32 tensors, by GGUF name. "mistral" is written as "llama", as the converter does.
    """
    config = tiny_config(architecture, **changes)
    name = "llama" if architecture == "mistral" else architecture
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if architecture == "mistral" and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    if tokenizer_size:
        add_tokenizer(writer, tokenizer_size, chat_template)
    weights = tiny_tensors(config, seed, scale) if tensors is None else tensors
    for key, array in weights.items():
        if array.dtype == np.uint8:
            writer.add_tensor(gguf_name(key), array, raw_dtype=gguf.GGMLQuantizationType[raw_kind])
        else:
            _add_tensor(writer, key, array, config, quant, interleaved=name == "llama")
    for key, array in (extra or {}).items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, config: dict[str, Any], quant: str, *, interleaved: bool
) -> None:
    if interleaved and ".q_proj." in name:
        array = permute(array, config["num_attention_heads"])
    if interleaved and ".k_proj." in name:
        array = permute(array, config["num_key_value_heads"])
    kind = gguf.GGMLQuantizationType[quant]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    array = np.ascontiguousarray(array, np.float32)
    if array.ndim == 1 or array.shape[-1] % block or quant == "F32":
        writer.add_tensor(gguf_name(name), array)
    elif quant == "F16":
        writer.add_tensor(gguf_name(name), array.astype(np.float16))
    else:
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
