"""What a training is made of: the target, and every setting that decides what comes out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drafts.manifest import RESERVED, Manifest
from drafts.train.errors import TrainingError
from edgespec.errors import DraftError

if TYPE_CHECKING:
    from edgespec.models.base import Decoder
    from edgespec.models.tokenizer import Tokenizer
    from edgespec.models.weights.opening import WeightFile

KINDS = ("head", "standalone", "phrases")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class TrainTarget:
    """The target as training needs it.

    path: its file or folder. encode: a user's text -> ids, through the chat template. eos_ids: what ends an answer.
    decoder: makes the engine that acceptance is measured with, whose weight format is `measured_with`.
    """

    name: str
    path: Path
    weights: WeightFile
    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]
    eos_ids: tuple[int, ...]
    decoder: Callable[[int], Decoder]  # called with the positions of the longest text
    measured_with: str = "exact"


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Everything that decides what comes out (with target, prompts, and the draft to start from).

    sampled: share of the prompts answered once more at temperature 0.7. vocab: tokens a head may propose. updates: 0 =
    as many as make `epochs`. learning_rate: 0 = the kind's own. layers: of a standalone draft, "" = two at each end.
    window: rows a head looks back. limit: prompts taken of each file, 0 = all. measured: held-out prompts of each group
    on which acceptance is measured. batch: answers written at once; positions: of the longest prompt with its answer.
    """

    domain: str
    name: str
    kind: str = "head"
    max_new_tokens: int = 160
    sampled: float = 0.3
    vocab: int = 4096
    epochs: float = 4.0
    updates: int = 0
    tokens_per_update: int = 3000
    learning_rate: float = 0.0
    layers: str = ""
    window: int = 256
    limit: int = 0
    measured: int = 24
    batch: int = 96
    positions: int = 1280
    seed: int = 0
    device: str = "cpu"
    dtype: str = "bfloat16"
    licence: str = "Apache-2.0"

    def __post_init__(self) -> None:
        for flag, value in (("--name", self.name), ("--domain", self.domain)):
            check_name(flag, value)
        numbers = ("max_new_tokens", "vocab", "tokens_per_update", "window", "measured", "batch", "positions")
        for name in numbers:
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.kind not in KINDS:
            raise TrainingError(f"--kind {self.kind!r} is unknown; it is one of {', '.join(KINDS)}.")
        if not self.licence.strip() or not self.licence.isprintable():
            raise TrainingError("--licence must be one line of text, such as Apache-2.0.")
        if not 0 <= self.sampled <= 1:
            raise TrainingError(f"--sampled is {self.sampled}; it is a share between 0 and 1.")
        if self.max_new_tokens < 4 or self.positions <= self.max_new_tokens:
            raise TrainingError(f"--max-new-tokens {self.max_new_tokens} must be from 4 to {self.positions - 1}.")
        if self.updates < 0 or self.epochs <= 0 or self.learning_rate < 0 or self.seed < 0 or self.limit < 0:
            raise TrainingError("--updates, --epochs, --learning-rate, --limit and --seed must not be negative.")


def check_name(what: str, value: str) -> None:
    """TrainingError unless a manifest may hold `value` as a name."""
    if not _NAME.fullmatch(value) or value in RESERVED:
        raise TrainingError(
            f"{what} {value[:80]!r}: give at most 64 letters, digits, '.', '_' and '-', and none of the words "
            f"{', '.join(RESERVED)}."
        )


def read_start(folder: Path) -> Manifest:
    """The manifest of the draft to start from. TrainingError if it is none."""
    try:
        return Manifest.read(folder)
    except DraftError as error:
        raise TrainingError(f"--from {folder}: {error}") from error
