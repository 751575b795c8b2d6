"""Drafts in the formats of others: standalone ones as they are, heads in the layout of EAGLE as far as it goes.

EAGLE's head (arXiv 2401.15077) is one llama layer over fc [embedding; hidden state], without the norms that this
project's heads have on both inputs, before attention, and at the end. What those norms multiply by is folded into the
matrices; what they divide by differs from row to row and becomes one typical number, measured on some text of the
target. The README beside the export says so, with how often the exported head still guesses the same token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from drafts.head import FILE_NAME, HeadFile, HeadSpec, HeadWeights
from drafts.manifest import Manifest, own_file
from drafts.train.errors import TrainingError, unwritable
from edgespec.files import write_bytes, write_text
from edgespec.models.rope import inverse_frequencies
from edgespec.models.spec import RopeSpec

if TYPE_CHECKING:
    from edgespec.models.base import Decoder

FORMATS = ("hf", "eagle")
_SMALLEST = 1e-3  # of the typical size of the final norm's weights; smaller ones are raised to it, to divide by them

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. notes: what differs from the draft, one sentence each; agreement: None, or the share of rows
    whose likeliest token is the same."""

    folder: Path
    notes: tuple[str, ...] = ()
    agreement: float | None = None


def export_hf(folder: Path, out: Path) -> Exported:
    """A standalone draft's files without the manifest: an ordinary checkpoint. Raises TrainingError, DraftError."""
    manifest = _exportable(folder)
    if manifest.kind != "standalone":
        raise TrainingError(
            f"draft {manifest.name} is a {manifest.kind}: it has no embedding and no LM head of its own, so it is no "
            "checkpoint; use --format eagle."
        )
    manifest.verify(folder)
    with _new_folder(out) as fresh:
        for name in manifest.files:
            shutil.copyfile(own_file(folder, name), fresh / name)
    return Exported(out)


def _exportable(folder: Path) -> Manifest:
    """The manifest of a draft that is a model. Raises TrainingError, DraftError."""
    manifest = Manifest.read(folder)
    if manifest.kind == "phrases":
        raise TrainingError(f"draft {manifest.name} is a table of phrases, for which other programs have no format.")
    return manifest


def export_eagle(folder: Path, out: Path, target: Decoder, texts: Sequence[Sequence[int]]) -> Exported:
    """A head in EAGLE's layout, float16. texts: ids on which typical sizes are measured, those of the draft's domain
    if possible. Raises TrainingError, DraftError."""
    manifest = _exportable(folder)
    if manifest.kind != "head":
        raise TrainingError(f"draft {manifest.name} is a {manifest.kind} checkpoint; use --format hf.")
    manifest.verify(folder)
    spec = HeadSpec.from_mapping(manifest.architecture)
    head = _Head.of(HeadFile.read(folder / FILE_NAME, spec))
    inputs = [_inputs(target, text) for text in texts if len(text) > 1]
    if not inputs:
        raise TrainingError("an export needs some text of the target to measure typical sizes on.")
    eagle = fold(head, inputs)
    agreement = _agreement(head, eagle, inputs, target.head_rows(head.vocab))
    notes = _notes(head, agreement)
    tensors = eagle_tensors(eagle)
    from safetensors.numpy import save

    with _new_folder(out) as fresh:
        write_bytes(fresh / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        write_text(fresh / "config.json", json.dumps(_config(spec, target), indent=2) + "\n")
        write_text(fresh / "draft_vocabulary.json", json.dumps(_vocabulary(head.vocab)) + "\n")
        write_text(fresh / "README.txt", _readme(manifest, notes))
    return Exported(out, notes, agreement)


# The layer in numpy, with and without the norms that EAGLE lacks.


@dataclass(frozen=True, slots=True)
class _Head:
    """matrices and vectors by the names of `HeadSpec`; a norm that is missing from `vectors` is left out."""

    spec: HeadSpec
    matrices: Mapping[str, FloatArray]
    vectors: Mapping[str, FloatArray]
    vocab: list[int]

    @classmethod
    def of(cls, weights: HeadWeights) -> _Head:
        matrices = {name: matrix.dequantised() for name, matrix in weights.matrices.items()}
        return cls(weights.spec, matrices, weights.vectors, weights.vocab.tolist())

    def norm(self, x: FloatArray, name: str) -> FloatArray:
        vector = self.vectors.get(name)
        return x if vector is None else x / _rms(x, self.spec.rms_norm_eps) * vector

    def run(self, embeds: FloatArray, hidden: FloatArray) -> dict[str, FloatArray]:
        """Rows [n, hidden_size] of the residual stream ("mixed", "attended", "final") and the features ("feature")."""
        both = np.concatenate((self.norm(embeds, "embed_norm"), self.norm(hidden, "hidden_norm")), -1)
        mixed = both @ self.matrices["fc"].T
        attended = mixed + self._attention(self.norm(mixed, "input_norm")) @ self.matrices["o"].T
        gate, up = np.split(self.norm(attended, "mlp_norm") @ self.matrices["gate_up"].T, 2, -1)
        final = attended + (gate / (1 + np.exp(-gate)) * up) @ self.matrices["down"].T
        return {"mixed": mixed, "attended": attended, "final": final, "feature": self.norm(final, "out_norm")}

    def _attention(self, x: FloatArray) -> FloatArray:
        s, n = self.spec, len(x)
        packed = (x @ self.matrices["qkv"].T).reshape(n, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        q, k, v = np.split(packed, [s.num_heads, s.num_heads + s.num_kv_heads], 1)
        frequencies, _ = inverse_frequencies(RopeSpec(s.rope_theta), s.head_dim)
        angles = np.arange(n)[:, None, None] * frequencies
        q, k = _rotated(q, angles), _rotated(k, angles)
        group = s.num_heads // s.num_kv_heads
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = np.einsum("ahd,bhd->hab", q, k) * s.head_dim**-0.5
        at = np.arange(n)
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - s.window)
        scores = np.where(seen, scores, -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        mixed: FloatArray = np.einsum("hab,bhd->ahd", chances, v).reshape(n, -1).astype(np.float32)
        return mixed


def fold(head: _Head, inputs: Sequence[tuple[FloatArray, FloatArray]]) -> _Head:
    """The head without the norms that EAGLE's layer lacks, as near as matrices can come on `inputs`."""
    runs = [head.run(embeds, hidden) for embeds, hidden in inputs]
    eps = head.spec.rms_norm_eps

    def typical(rows: Sequence[FloatArray]) -> float:
        return float(np.median(np.concatenate([_rms(each, eps) for each in rows])))

    out = head.vectors["out_norm"] / typical([run["final"] for run in runs])
    least = _SMALLEST * float(np.median(np.abs(out)))
    out = np.where(np.abs(out) < least, np.copysign(least, out), out)
    # The residual stream is scaled by `out`, so that what leaves the layer looks as after the final norm.
    stretched = np.median(
        np.concatenate([_rms(run["attended"] * out, eps) / _rms(run["attended"], eps) for run in runs])
    )
    old = head.matrices
    entries = np.concatenate(
        (
            head.vectors["embed_norm"] / typical([embeds for embeds, _ in inputs]),
            head.vectors["hidden_norm"] / typical([hidden for _, hidden in inputs]),
        )
    )
    before = head.vectors["input_norm"] / typical([run["mixed"] for run in runs])
    matrices = {
        "fc": out[:, None] * old["fc"] * entries,
        "qkv": old["qkv"] * (before / out),
        "o": out[:, None] * old["o"],
        "gate_up": old["gate_up"],
        "down": out[:, None] * old["down"],
    }
    kept = {"mlp_norm": (head.vectors["mlp_norm"] / out * stretched).astype(np.float32)}
    return _Head(head.spec, {n: m.astype(np.float32) for n, m in matrices.items()}, kept, head.vocab)


def eagle_tensors(head: _Head) -> dict[str, npt.NDArray[np.float16]]:
    """Tensors by the names that EAGLE-1's loaders look for. TrainingError for numbers beyond float16."""
    s = head.spec
    q, k, v = np.split(head.matrices["qkv"], [s.num_heads * s.head_dim, (s.num_heads + s.num_kv_heads) * s.head_dim])
    gate, up = np.split(head.matrices["gate_up"], 2)
    layer = "layers.0."
    named = {
        "fc.weight": head.matrices["fc"],
        f"{layer}self_attn.q_proj.weight": q,
        f"{layer}self_attn.k_proj.weight": k,
        f"{layer}self_attn.v_proj.weight": v,
        f"{layer}self_attn.o_proj.weight": head.matrices["o"],
        f"{layer}post_attention_layernorm.weight": head.vectors["mlp_norm"],
        f"{layer}mlp.gate_proj.weight": gate,
        f"{layer}mlp.up_proj.weight": up,
        f"{layer}mlp.down_proj.weight": head.matrices["down"],
    }
    with np.errstate(over="ignore"):
        tensors = {name: np.ascontiguousarray(value, np.float16) for name, value in named.items()}
    wide = [name for name, value in tensors.items() if not np.isfinite(value).all()]
    if wide:
        raise TrainingError(f"tensor {wide[0]} of the export does not fit float16; this head cannot be exported.")
    return tensors


def _inputs(target: Decoder, text: Sequence[int]) -> tuple[FloatArray, FloatArray]:
    """Embeddings of the tokens 1 .. n - 1 of `text`, and hidden states of those before them."""
    hidden = target.forward(text, target.new_cache(len(text)), logits=0, hidden=True).hidden
    if hidden is None:
        raise TrainingError("the target's engine gives no hidden states, which a head draft reads.")
    return np.array(target.embed(list(text[1:])), np.float32), np.array(hidden[:-1], np.float32)


def _agreement(one: _Head, other: _Head, inputs: Sequence[tuple[FloatArray, FloatArray]], rows: FloatArray) -> float:
    same = [
        (one.run(*each)["feature"] @ rows.T).argmax(-1) == (other.run(*each)["feature"] @ rows.T).argmax(-1)
        for each in inputs
    ]
    return float(np.concatenate(same).mean())


def _rms(x: FloatArray, eps: float) -> FloatArray:
    size: FloatArray = np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return size


def _rotated(x: FloatArray, angles: npt.NDArray[np.float64]) -> FloatArray:
    first, second = np.split(x, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1).astype(np.float32)


# The files beside the weights


def _config(spec: HeadSpec, target: Decoder) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": target.spec.vocab_size,
        "max_position_embeddings": target.spec.max_positions,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "tie_word_embeddings": False,
        "dtype": "float16",
    }
    if target.spec.bos_token_id is not None:
        config["bos_token_id"] = target.spec.bos_token_id
    if target.spec.eos_token_ids:
        config["eos_token_id"] = target.spec.eos_token_ids[0]
    return config


def _vocabulary(vocab: Sequence[int]) -> dict[str, Any]:
    """The reduced vocabulary as EAGLE-3 writes one: what is added to a draft's id to get the target's."""
    return {"draft_vocab_size": len(vocab), "d2t": [token - place for place, token in enumerate(vocab)]}


def _notes(head: _Head, agreement: float) -> tuple[str, ...]:
    window, size = head.spec.window, len(head.vocab)
    return (
        "EAGLE's layer has no norm on the embedding, on the hidden state, before attention, and at its end. Their "
        "weights are folded into the matrices, and the root mean squares that they divide by are replaced by one "
        f"typical number each: on the texts measured, {agreement:.0%} of the first guesses stay the same.",
        f"The head was fitted with attention over the last {window} rows; EAGLE's attention has no window.",
        f"The head proposes {size} tokens; EAGLE-1 loaders use the target's whole LM head. draft_vocabulary.json lists "
        "the tokens as EAGLE-3's d2t does.",
        "Embedding and LM head are the target's, and are not in the export.",
    )


def _readme(manifest: Manifest, notes: Sequence[str]) -> str:
    lines = [
        f"Draft {manifest.name} for {manifest.target.name}, in the layout of EAGLE-1 (float16).",
        "",
        "Tensor names are those that the llama loaders of vLLM and SGLang look for. config.json names",
        "LlamaForCausalLM, as EAGLE's own checkpoints do; SGLang wants LlamaForCausalLMEagle there.",
        "",
        "What is not as in the draft itself:",
        *(f"- {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A hidden folder that becomes `out` if the block succeeds. TrainingError if it cannot."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainingError(f"{out}: exists already; give --out a folder that is not there yet.")
    fresh = out.parent / f".{out.name}.new"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        yield fresh
        fresh.replace(out)
    except OSError as error:
        raise unwritable(out, error, "Nothing was written.") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
