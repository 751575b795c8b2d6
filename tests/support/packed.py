"""Tiny GPTQ and AWQ checkpoints, packed number by number as their formats are described."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from edgespec.models.convert.conversion import Kind, Wanted, convert
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny

AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # which output of eight each four bits of an integer hold, lowest first
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "gptq": {},
    "gptq, groups of 64": {"group": 64},
    "gptq, groups of 128": {"group": 128},
    "gptq, one group": {"group": -1},
    "gptq, symmetric": {"symmetric": True},
    "gptq v2": {"version": "gptq_v2"},
    "gptq, float32 scales": {"scales": np.float32},
    "gptq v2, 8 bits": {"version": "gptq_v2", "bits": 8, "group": 64},
    "gptq, 8 bits": {"bits": 8},
    "gptq, 8 bits, symmetric": {"bits": 8, "symmetric": True, "group": 128},
    "gptq, qwen2": {"architecture": "qwen2"},
    "awq": {"method": "awq"},
    "awq, groups of 128": {"method": "awq", "group": 128, "tie_word_embeddings": True},
}


@dataclass
class Packed:
    """A folder, and the numbers that its weights stand for, float32 by name."""

    folder: Path
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def save(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors")

    def settings(self, **changes: Any) -> None:
        """Change quantization_config."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] = {**config["quantization_config"], **changes}
        path.write_text(json.dumps(config))


def along_inputs(q: np.ndarray, bits: int) -> np.ndarray:
    """[N, K] -> int32 [K * bits / 32, N], as GPTQ packs weights."""
    each = 32 // bits
    out = np.zeros((q.shape[1] // each, q.shape[0]), np.uint32)
    for k in range(q.shape[1]):
        out[k // each] |= q[:, k].astype(np.uint32) << np.uint32(bits * (k % each))
    return out.view(np.int32)


def along_outputs(values: np.ndarray, bits: int, places: list[int]) -> np.ndarray:
    """[N, n] -> int32 [n, N * bits / 32]; four or eight bits number i hold output places[i]."""
    each = 32 // bits
    out = np.zeros((values.shape[1], values.shape[0] // each), np.uint32)
    for n in range(values.shape[0]):
        out[:, n // each] |= values[n].astype(np.uint32) << np.uint32(bits * places.index(n % each))
    return out.view(np.int32)


def less_one(zeros: np.ndarray, bits: int) -> np.ndarray:
    """One less in every number of each integer, as GPTQModel makes the "gptq" format of "gptq_v2": in one subtraction,
    in which a 0 borrows from its neighbour."""
    ones = {4: 0x11111111, 8: 0x01010101}[bits]
    return (zeros.view(np.uint32) - np.uint32(ones)).view(np.int32)


def write_packed(
    folder: Path,
    method: str = "gptq",
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    version: str = "gptq",
    shuffled: bool = False,
    seed: int = 0,
    architecture: str = "llama",
    scales: type[np.floating[Any]] = np.float16,
    **changes: Any,
) -> Packed:
    """A random model whose linear layers are packed; embedding, LM head, norms and biases are float16.

    group -1: one for all inputs. symmetric: every zero point is the middle. version: of GPTQ's format, "gptq" (zero
    points less one, see `less_one`) or "gptq_v2". scales: their type in the file. shuffled: inputs belong to groups in
    random order, as with desc_act.
    """
    rng = np.random.default_rng(seed)
    config = tiny_config(architecture, **{**SHAPE, **changes})
    write_tiny(folder, architecture, **{**SHAPE, **changes})
    config["quantization_config"] = {"quant_method": method, "bits": bits, "group_size": group}
    if method == "gptq":
        config["quantization_config"] |= {"desc_act": shuffled, "sym": symmetric, "checkpoint_format": version}
    else:
        config["quantization_config"] |= {"zero_point": True, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(config))
    made = Packed(folder)
    for name, array in tiny_tensors(config, seed).items():
        if name.split(".")[-2] not in LINEAR or name.endswith(".bias"):
            made.tensors[name] = array.astype(np.float16)
            made.weights[name] = made.tensors[name].astype(np.float32)
            continue
        outputs, inputs = array.shape
        length = inputs if group == -1 else group
        owner = np.arange(inputs) // length
        if shuffled:
            owner = rng.permutation(owner)
        q = rng.integers(0, 2**bits, (outputs, inputs))
        zero = rng.integers(0, 2**bits, (outputs, inputs // length))
        if symmetric:
            zero[:] = 2 ** (bits - 1)
        scale = (rng.uniform(0.5, 1.5, zero.shape) * 0.3 / 2 ** (bits - 1)).astype(np.float16)
        numbers = (q - zero[:, owner]).astype(np.float32)
        made.weights[name] = scale.astype(np.float32)[:, owner] * numbers
        stem = name.removesuffix(".weight")
        plain = list(range(32 // bits))
        if method == "awq":
            made.tensors[f"{stem}.qweight"] = along_outputs(q, 4, AWQ_PLACES)
            made.tensors[f"{stem}.qzeros"] = along_outputs(zero, 4, AWQ_PLACES)
        else:
            made.tensors[f"{stem}.qweight"] = along_inputs(q, bits)
            zeros = along_outputs(zero, bits, plain)
            made.tensors[f"{stem}.qzeros"] = less_one(zeros, bits) if version == "gptq" else zeros
            made.tensors[f"{stem}.g_idx"] = owner.astype(np.int32)
        made.tensors[f"{stem}.scales"] = np.ascontiguousarray(scale.T.astype(scales))
    made.save()
    return made


def converted(source: Path, out: Path, bits: int = 4, **options: Any) -> dict[str, Kind]:
    """`convert`, with the fields of `Wanted` among the options."""
    wanted = Wanted(bits, **{k: options.pop(k) for k in ("group", "mode", "tables") if k in options})
    with open_weights(source) as weights:
        return convert(weights, load_tokenizer(source), out, wanted, threads=2, **options)
