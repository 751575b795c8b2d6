"""What the tests of training share: a tiny target, prompt files, and settings that finish in a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from drafts.train.config import TrainConfig, TrainTarget
from edgespec.models.build import build_decoder
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny

WORDS = ["the", "hen", "an", "inner", "letter", "toll", "order", "ink", "teller", "end", "antler", "tan", "inn", "her"]


def tiny_target(folder: Path, architecture: str = "llama", **changes: Any) -> TrainTarget:
    """A random target on torch, without a chat template; its answers never end by themselves unless asked."""
    torch.set_num_threads(1)
    write_tiny(folder, architecture, **{"eos_token_id": None, **changes})
    return open_target(folder)


def open_target(folder: Path) -> TrainTarget:
    weights = open_weights(folder)
    tokenizer = load_tokenizer(folder)
    return TrainTarget(
        "tiny",
        folder,
        weights,
        tokenizer,
        tokenizer.encode,
        (),
        lambda positions: build_decoder(weights, device="torch-cpu", positions=positions),
        "float32",
    )


def text(number: int) -> str:
    """A prompt of ten words that no other number has."""
    return " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(9)) + f" {number}"


def records(count: int, name: str = "p") -> list[dict[str, Any]]:
    return [
        {"id": f"{name}-{n:04d}", "source": f"owner/repo:{name}", "license": "MIT", "prompt": text(n)}
        for n in range(count)
    ]


def write_prompts(path: Path, lines: Sequence[Any]) -> Path:
    """JSON lines; texts are written as they are."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def quick(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "domain": "code",
        "name": "code",
        "max_new_tokens": 12,
        "vocab": 64,
        "updates": 4,
        "tokens_per_update": 60,
        "window": 16,
        "positions": 96,
        "batch": 8,
        "dtype": "float32",
        "sampled": 0.5,
        "measured": 2,
    }
    return TrainConfig(**(values | changes))
