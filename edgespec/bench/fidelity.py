"""How close each weight format is to the float32 target: teacher-forced over real texts, position by position."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import PromptError

if TYPE_CHECKING:
    from edgespec.models.base import Decoder

FORMATS = ("float32", "exact", "int8")
WINDOW = 512  # tokens of one text that are read in one go, each with an empty cache
CHUNK = 64  # rows of logits held at a time

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Fidelity:
    """Sums over positions of one format against the reference. KL is in nats, reference || format."""

    positions: int = 0
    agreed: int = 0
    divergence: list[Array] = field(default_factory=list)
    cosine: list[Array] = field(default_factory=list)

    def add(self, reference: Array, logits: Array, hidden_reference: Array, hidden: Array) -> None:
        """Take in rows of logits [n, vocab] and of hidden states [n, hidden_size]."""
        expected, found = _log_softmax(reference), _log_softmax(logits)
        self.divergence.append((np.exp(expected) * (expected - found)).sum(axis=-1))
        self.cosine.append(_cosine(hidden_reference, hidden))
        self.agreed += int((reference.argmax(axis=-1) == logits.argmax(axis=-1)).sum())
        self.positions += len(reference)

    def to_dict(self) -> dict[str, Any]:
        """The published numbers."""
        divergence, cosine = np.concatenate(self.divergence), np.concatenate(self.cosine)
        return {
            "positions": self.positions,
            "kl_mean": float(divergence.mean()),
            "kl_max": float(divergence.max()),
            "top1_agreement": self.agreed / self.positions,
            "cosine_mean": float(cosine.mean()),
            "cosine_min": float(cosine.min()),
        }


def _log_softmax(rows: Array) -> Array:
    wide = np.asarray(rows, np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _cosine(left: Array, right: Array) -> Array:
    a, b = np.asarray(left, np.float64), np.asarray(right, np.float64)
    return np.asarray((a * b).sum(axis=-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)))


def compare(
    reference: Decoder,
    decoder: Decoder,
    sequences: Iterable[Sequence[int]],
    step: Callable[[int], None] = lambda n: None,
) -> Fidelity:
    """Run both decoders over the same token ids and compare every position; `step(n)` after each n positions."""
    fidelity = Fidelity()
    for sequence in sequences:
        expected_cache, cache = reference.new_cache(len(sequence)), decoder.new_cache(len(sequence))
        for start in range(0, len(sequence), CHUNK):
            chunk = list(sequence[start : start + CHUNK])
            expected = reference.forward(chunk, expected_cache, hidden=True)
            found = decoder.forward(chunk, cache, hidden=True)
            assert expected.hidden is not None
            assert found.hidden is not None
            fidelity.add(expected.logits, found.logits, expected.hidden, found.hidden)
            step(len(chunk))
    return fidelity


def windows(sequences: Iterable[Sequence[int]], limit: int | None, size: int = WINDOW) -> list[list[int]]:
    """Cut token ids into windows of at most `size`, in all no more than `limit` tokens (the last window is cut)."""
    cut: list[list[int]] = []
    left = limit
    for sequence in sequences:
        for start in range(0, len(sequence), size):
            window = list(sequence[start : start + size])
            if left is not None:
                window = window[:left]
                left -= len(window)
            if window:
                cut.append(window)
    return cut


def read_questions(path: Path) -> list[str]:
    """The first turn of each question of a file in Spec-Bench's form (JSON lines with "turns")."""
    found = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            turn = json.loads(line)["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            turn = None
        if not isinstance(turn, str):
            raise PromptError(f'{path}, line {number}: not a question; each line needs JSON with "turns": [text, ...].')
        found.append(turn)
    if not found:
        raise PromptError(f"{path} holds no questions.")
    return found


def read_text(path: Path) -> str:
    """A text file, as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PromptError(f"{path} cannot be read: {reason}.") from None
