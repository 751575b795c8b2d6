"""Random heads for tiny targets, in memory and on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafts.base import LoadCancelled
from drafts.head import FILE_NAME, HeadDraft, HeadSpec, HeadWeights, write_head_file
from drafts.head_file import HeadFile
from drafts.head_image import StoredHead
from drafts.load_now import OwnSlot, Unhindered
from drafts.manifest import FileInfo
from edgespec.models.base import Decoder

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_rows": 96,
    "window": 24,
}


def tiny_spec(**changes: Any) -> HeadSpec:
    """The architecture of a head that fits the tiny target (hidden size 32)."""
    return HeadSpec(**{**TINY, **changes})


def tiny_vocab(spec: HeadSpec, tokens: int = 280, seed: int = 0) -> list[int]:
    """`spec.vocab_rows` of the first `tokens` ids, at random, ascending."""
    chosen = np.random.default_rng(seed).choice(tokens, spec.vocab_rows, replace=False)
    return sorted(int(token) for token in chosen)


def random_tensors(
    spec: HeadSpec, vocab: Sequence[int] | None = None, seed: int = 0, scale: float = 0.3
) -> dict[str, np.ndarray]:
    """Float32 tensors by name, before quantisation; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {
        name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in spec.matrices.items()
    }
    for name in ("embed_norm", "hidden_norm", "input_norm", "mlp_norm", "out_norm"):
        tensors[name] = (1 + 0.1 * rng.standard_normal(spec.hidden_size)).astype(np.float32)
    tensors["vocab"] = np.array(tiny_vocab(spec, seed=seed) if vocab is None else vocab, np.int32)
    return tensors


def random_head(
    spec: HeadSpec | None = None, vocab: Sequence[int] | None = None, seed: int = 0, scale: float = 0.3
) -> HeadWeights:
    spec = spec or tiny_spec()
    return HeadWeights.quantised(spec, random_tensors(spec, vocab, seed, scale))


def write_head(
    folder: Path,
    spec: HeadSpec | None = None,
    vocab: Sequence[int] | None = None,
    seed: int = 0,
    scale: float = 0.3,
) -> Path:
    """Write a random head's `head.safetensors` (no draft.toml) into `folder` and return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    write_head_file(path, random_head(spec, vocab, seed, scale))
    return path


def fitted_head(target: Decoder, texts: Sequence[Sequence[int]], spec: HeadSpec | None = None) -> HeadWeights:
    """A head that is often right about `target`'s `texts`: least squares from its inputs to LM head rows.

    Attention and MLP hardly matter in it. Its vocabulary are the tokens that the texts hold most often.
    """
    spec = spec or tiny_spec()
    counts = Counter(token for text in texts for token in text)
    common = [token for token, _ in counts.most_common(spec.vocab_rows)]
    rest = [token for token in range(target.spec.vocab_size) if token not in counts]
    tensors = random_tensors(spec, sorted((common + rest)[: spec.vocab_rows]), scale=0.01)
    pairs, goals = [], []
    for text in texts:
        cache = target.new_cache()
        hidden = target.forward(list(text), cache, logits=0, hidden=True).hidden
        assert hidden is not None
        inputs = [_rms(target.embed(text[1:-1])), _rms(hidden[: len(text) - 2])]
        pairs.append(np.concatenate(inputs, axis=1))
        goals.append(_rms(target.head_rows(text[2:])))
    x, y = np.concatenate(pairs), np.concatenate(goals)
    solved = np.linalg.solve(x.T @ x + 0.1 * np.eye(x.shape[1]), x.T @ y).T
    for name in ("embed_norm", "hidden_norm"):
        tensors[name] = np.ones(spec.hidden_size, np.float32)
    tensors["fc"] = solved.astype(np.float32)
    tensors["out_norm"] = np.full(spec.hidden_size, 3.0, np.float32)
    return HeadWeights.quantised(spec, tensors)


def _rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)


class Hindered(Unhindered):
    """Counts the places where a load may be called off, and calls it off at the `end`th of them (0: nowhere)."""

    def __init__(self, end: int = 0) -> None:
        self.end = end
        self.places = 0
        self.nbytes = 0

    def checkpoint(self) -> None:
        self.places += 1
        if self.places == self.end:
            raise LoadCancelled

    def read(self, fd: int, into: memoryview, offset: int) -> None:
        self.checkpoint()
        super().read(fd, into, offset)
        self.nbytes += len(into)


def stored_head(
    folder: Path, target: Decoder, *, spec: HeadSpec | None = None, vocab: Sequence[int] | None = None, seed: int = 0
) -> HeadDraft:
    """A draft whose weights are in `folder` and not loaded; images go to the folder `images` beside it."""
    spec = spec or tiny_spec()
    path = write_head(folder, spec, vocab, seed)
    return draft_of(path, target, spec)


def draft_of(path: Path, target: Decoder, spec: HeadSpec, temperature: float = 1.0) -> HeadDraft:
    """The draft whose weights are in `path`, believed to be as they are now."""
    folder = path.parent
    source = StoredHead(
        folder,
        FileInfo.of(path),
        lambda: HeadFile.read(path, spec),
        name=folder.name,
        fingerprint="f" * 64,
        images=folder.parent / "images",
    )
    return HeadDraft(folder.name, spec, source, target, temperature=temperature, threads=1)


def load_into(draft: HeadDraft, control: Unhindered | None = None) -> OwnSlot:
    """Load `draft` into a slot of its own, which is returned."""
    slot = OwnSlot(draft.buffer_bytes)
    draft.load(slot, control or Unhindered())
    return slot
