"""What a head must propose, written as plainly as possible and independently of the product's code: numpy, float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafts.head import HeadWeights


def dequantised(weights: HeadWeights) -> dict[str, np.ndarray]:
    """Every matrix as float32 [rows, cols], from the stored numbers and scales."""
    found = {}
    for name, matrix in weights.matrices.items():
        rows, cols = matrix.q.shape
        found[name] = np.array(
            [
                [np.float32(matrix.scale[r, c // 32]) * np.float32(matrix.q[r, c]) for c in range(cols)]
                for r in range(rows)
            ]
        )
    return found


def rounded_rows(rows: np.ndarray) -> np.ndarray:
    """A table after rounding to 8 bits, in blocks of 32 with a float32 scale."""
    blocks = rows.reshape(len(rows), -1, 32)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    scale[scale == 0] = 1
    return (np.round(blocks / scale) * scale).reshape(rows.shape).astype(np.float32)


@dataclass
class Step:
    """One guess: its place in the vocabulary, its confidence, and all logits."""

    place: int
    confidence: float
    logits: np.ndarray

    @property
    def margin(self) -> float:
        """By how much the best logit leads: less than the rounding of activations decides nothing."""
        best = np.sort(self.logits)
        return float(best[-1] - best[-2])


class HeadReference:
    """embedding, head: the target's whole tables, float32 [tokens, hidden_size]."""

    def __init__(self, weights: HeadWeights, embedding: np.ndarray, head: np.ndarray, temperature: float = 1.0) -> None:
        self.spec = weights.spec
        self.matrices = dequantised(weights)
        self.vectors = weights.vectors
        self.vocab = weights.vocab
        self.embedding = embedding
        self.own_rows = rounded_rows(embedding[weights.vocab])
        self.head_rows = rounded_rows(head[weights.vocab])
        self.temperature = temperature

    def propose(
        self, tokens: Sequence[int], hidden: np.ndarray, first: int, gamma: int, follow: Sequence[int] | None = None
    ) -> list[Step]:
        """`gamma` guesses after `tokens`, from the hidden states of positions `first` .. len(tokens) - 2.

        hidden: float32 [len(tokens) - 1 - first, hidden_size]. follow: the tokens that were taken instead of the best.
        """
        assert len(hidden) == len(tokens) - 1 - first
        rows = [(hidden[i], self.embedding[tokens[first + i + 1]], first + i) for i in range(len(hidden))]
        steps: list[Step] = []
        for number in range(gamma):
            feature = self._feature(rows[-self.spec.window :])
            logits = self.head_rows @ feature
            law = np.exp((logits - logits.max()) / self.temperature)
            place = int(np.argmax(logits))
            steps.append(Step(place, float(law[place] / law.sum()), logits))
            taken = self.own_rows[place]
            if follow is not None and number < len(follow) and follow[number] != self.vocab[place]:
                taken = self.embedding[follow[number]]
            rows.append((feature, taken, rows[-1][2] + 1))
        return steps

    def _feature(self, rows: list[tuple[np.ndarray, np.ndarray, int]]) -> np.ndarray:
        s, m, v = self.spec, self.matrices, self.vectors
        keys, values = [], []
        for hidden, embedding, position in rows:
            pair = [self._rms(embedding) * v["embed_norm"], self._rms(hidden) * v["hidden_norm"]]
            x = m["fc"] @ np.concatenate(pair)
            qkv = m["qkv"] @ (self._rms(x) * v["input_norm"])
            heads = qkv.reshape(s.num_heads + 2 * s.num_kv_heads, s.head_dim)
            query = self._rotated(heads[: s.num_heads], position)
            keys.append(self._rotated(heads[s.num_heads : s.num_heads + s.num_kv_heads], position))
            values.append(heads[s.num_heads + s.num_kv_heads :])
        attended = []
        for head in range(s.num_heads):
            shared = head // (s.num_heads // s.num_kv_heads)
            scores = np.array([key[shared] @ query[head] for key in keys]) / np.sqrt(s.head_dim)
            weights = np.exp(scores - scores.max())
            attended.append(sum(w * value[shared] for w, value in zip(weights / weights.sum(), values)))
        x = x + m["o"] @ np.concatenate(attended)
        gate, up = np.split(m["gate_up"] @ (self._rms(x) * v["mlp_norm"]), 2)
        x = x + m["down"] @ (gate / (1 + np.exp(-gate)) * up)
        return (self._rms(x) * v["out_norm"]).astype(np.float32)

    def _rms(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + self.spec.rms_norm_eps)

    def _rotated(self, heads: np.ndarray, position: int) -> np.ndarray:
        half = self.spec.head_dim // 2
        angle = position * self.spec.rope_theta ** (-np.arange(half) / half)
        first, second = heads[:, :half], heads[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
