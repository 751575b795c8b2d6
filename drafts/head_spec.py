"""The architecture of a head draft, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from edgespec.errors import DraftError

BLOCK = 32  # weights that share a scale, along a matrix' columns
VECTORS = ("embed_norm", "hidden_norm", "input_norm", "mlp_norm", "out_norm")
_LARGEST = 1 << 20  # of any whole number; products of two stay far from overflow


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One decoder layer over [embedding of the next token; hidden state], see `drafts.head`.

    hidden_size: the target's. vocab_rows: how many of the target's tokens it can propose. window: rows that attention
    looks at, the last one included. Raises DraftError for numbers that no head can have.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_rows: int
    window: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                if type(value) is not int or not 1 <= value <= _LARGEST:
                    raise DraftError(f"{field.name} of a head is {value!r}; it must be a whole number from 1.")
            elif type(value) not in (int, float) or not (math.isfinite(value) and 0 < value < 1e18):
                raise DraftError(f"{field.name} of a head is {value!r}; it must be a positive number.")
        if self.num_heads % self.num_kv_heads:
            raise DraftError(f"{self.num_heads} heads of a draft cannot share {self.num_kv_heads} key/value heads.")
        if self.head_dim % 16:
            raise DraftError(f"head_dim of a head is {self.head_dim}; it must be a multiple of 16.")
        widths = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_heads * head_dim": self.num_heads * self.head_dim,
        }
        for name, width in widths.items():
            if width % BLOCK:
                raise DraftError(
                    f"{name} of a head is {width}; it must be a multiple of {BLOCK}, the block of a scale."
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> HeadSpec:
        """From `[architecture]` of a draft.toml: exactly the fields of this class, else DraftError."""
        names = [field.name for field in fields(cls)]
        unknown, missing = sorted(set(map(str, values)) - set(names)), [n for n in names if n not in values]
        if unknown or missing:
            wrong = f"has no number {unknown[0][:60]!r}" if unknown else f"needs the number {missing[0]!r}"
            raise DraftError(f"the architecture of a head {wrong}; its numbers are {', '.join(names)}.")
        return cls(**values)

    def to_mapping(self) -> dict[str, int | float]:
        """The numbers, for `[architecture]`."""
        return asdict(self)

    @property
    def key(self) -> str:
        """Heads with the same key have tensors of the same shapes and run in the same graph."""
        s = self
        return (
            f"head-{s.hidden_size}-{s.num_heads}x{s.num_kv_heads}x{s.head_dim}-{s.intermediate_size}"
            f"-v{s.vocab_rows}-w{s.window}-t{float(s.rope_theta)!r}-e{float(s.rms_norm_eps)!r}"
        )

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> [rows, cols] of every matrix."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries = self.num_heads * self.head_dim
        return {
            "fc": (hidden, 2 * hidden),
            "qkv": (queries + 2 * self.num_kv_heads * self.head_dim, hidden),
            "o": (hidden, queries),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }

    @property
    def parameters(self) -> int:
        """Numbers in all matrices and vectors."""
        return sum(rows * cols for rows, cols in self.matrices.values()) + len(VECTORS) * self.hidden_size
