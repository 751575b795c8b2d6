"""A losslessness check that any machine can run in a second: a tiny random model, with and without drafts.

The weights are random, so the text means nothing; but greedy decoding of a random model soon repeats itself, which
gives prompt lookup something to accept and something to get wrong.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from edgespec.models.base import Decoder

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 32, 64, 2, 2, 1, 16
_TOKENS = 258  # two special tokens and the 256 bytes
_GAMMAS = (1, 2, 3, 5, 8)
_PROMPT = "a b a b a b c a b a b"
_SEED = 3  # its answer repeats itself in places, so that some guesses hold and others do not


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the check found. problem is None if every run gave the plain run's tokens."""

    tokens: int
    accepted: int
    problem: str | None


def write_random_model(folder: Path, seed: int = _SEED) -> Path:
    """Write a complete float32 llama folder (config, weights, byte tokenizer) of about 100 kB and return it."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _TOKENS,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_byte_tokenizer()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False})
    )
    _write_safetensors(folder / "model.safetensors", _random_weights(np.random.default_rng(seed)))
    return folder


def _random_weights(rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    ones = np.ones(_HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": normal(_TOKENS, _HIDDEN), "model.norm.weight": ones}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": normal(_HEADS * _HEAD, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": normal(_KV_HEADS * _HEAD, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": normal(_KV_HEADS * _HEAD, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": normal(_HIDDEN, _HEADS * _HEAD),
            f"{prefix}.mlp.gate_proj.weight": normal(_INNER, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": normal(_INNER, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": normal(_HIDDEN, _INNER),
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_attention_layernorm.weight": ones,
        }
    return weights


def _write_safetensors(path: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    """The format is a length, a JSON header and the raw bytes: small enough to need no package for it."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.tobytes() for tensor in tensors.values()))


def _byte_tokenizer() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges: one token a byte."""
    from edgespec.models.byte_level import BYTES_BY_CHARACTER

    vocabulary = {text: number for number, text in enumerate(["<s>", "</s>", *BYTES_BY_CHARACTER])}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": text, **special} for number, text in enumerate(("<s>", "</s>"))],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def run(load: Callable[..., Any], *, device: Literal["cpu", "cuda"] = "cpu", new_tokens: int = 48) -> SelfTest:
    """Compare plain greedy decoding with lookup at several gammas, in float32.

    load: `Engine.from_pretrained` (or a stand-in). device: of the engine. Errors of the engine go to the caller.
    """
    from edgespec.config import RuntimeConfig
    from edgespec.decoding.params import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory(prefix="edgespec-selftest-") as name:
        folder = write_random_model(Path(name))
        config = RuntimeConfig(
            model=str(folder),
            drafts=("ngram",),
            gamma=4,
            device=device,
            weight_format="float32",
            threads=1,
            home=folder,
        )
        with load(config=config) as engine:
            engine.use_draft("off")
            plain = engine.generate(_PROMPT, params, raw=True).token_ids
            engine.use_draft("auto")
            accepted = 0
            for gamma in _GAMMAS:
                engine.gamma = gamma
                result = engine.generate(_PROMPT, params, raw=True)
                accepted += result.stats.accepted_tokens
                if result.token_ids != plain:
                    return SelfTest(len(plain), accepted, _difference(plain, result.token_ids, gamma))
    if len(plain) != new_tokens:
        return SelfTest(len(plain), accepted, f"plain decoding gave {len(plain)} tokens instead of {new_tokens}")
    if not accepted:
        return SelfTest(len(plain), accepted, "no drafted token was ever accepted, so nothing was compared")
    return SelfTest(len(plain), accepted, None)


def same_bits(threads: int | None = None) -> dict[str, bool]:
    """Weight format -> whether logits are the same bits for blocks of every length on this machine.

    Where they are, speculation is exact in that format too, not only up to near ties.
    """
    from edgespec.models.onnx.decoder import WEIGHT_FORMATS, OnnxDecoder
    from edgespec.models.weights.opening import open_weights

    tokens = np.random.default_rng(_SEED).integers(2, _TOKENS, 96).tolist()
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="edgespec-selftest-") as name,
        open_weights(write_random_model(Path(name))) as weights,
    ):
        for weight_format in WEIGHT_FORMATS:
            decoder = OnnxDecoder(weights, weight_format=weight_format, threads=threads)
            whole = _logits(decoder, tokens, len(tokens))
            found[weight_format] = all(np.array_equal(_logits(decoder, tokens, n), whole) for n in (1, 2, 3, 8, 33))
            decoder.close()
    return found


def _logits(decoder: Decoder, tokens: list[int], size: int) -> npt.NDArray[np.float32]:
    """Rows of all positions, computed in blocks of `size`."""
    cache = decoder.new_cache()
    blocks = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    return np.concatenate([decoder.forward(block, cache).logits.copy() for block in blocks])


def _difference(plain: tuple[int, ...], other: tuple[int, ...], gamma: int) -> str:
    position = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    return f"with gamma {gamma} the output leaves plain decoding at token {position + 1}"
