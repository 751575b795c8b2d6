"""Traces made up by a rule: which of two drafts is right can be told from a text's tokens and hidden states."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from predictor.traces import TraceDraft, TracedText, TraceHeader, TraceWriter, text_key

HIDDEN, GAMMA, NEW = 8, 3, 40
DRAFTS = ("left", "right")


def sha(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()


def header(**changes: Any) -> TraceHeader:
    settings: dict[str, Any] = {
        "target": {"name": "tiny", "fingerprint": sha("tiny")},
        "hidden_size": HIDDEN,
        "gamma_max": GAMMA,
        "stride": 1,
        "max_new_tokens": NEW,
        "recent": 4,
        "prompt_window": 256,
        "confidences": False,
        "drafts": tuple(TraceDraft(name, "head", name, sha(name), 10, expected=0.5) for name in DRAFTS),
    }
    return TraceHeader(**{**settings, **changes})


def made_up(seed: int, *, made: TraceHeader | None = None, shuffled: bool = False) -> TracedText:
    """A text of the side that the seed says: its draft is right at four of five positions, the other at one of four.

    shuffled: which draft is the good one has nothing to do with the text.
    """
    made, rng = made or header(), np.random.default_rng(seed)
    side = seed % 2
    prompt = rng.integers(100 * side, 100 * side + 60, 12)
    answer = rng.integers(100 * side, 100 * side + 60, NEW)
    columns = len(range(1, NEW, made.stride))
    good = int(rng.integers(2)) if shuffled else side
    chance = np.array([[0.25], [0.25]])
    chance[good] = 0.8
    left = np.minimum(NEW - np.arange(1, NEW, made.stride), made.gamma_max)
    accepts = np.minimum((rng.random((2, columns)) < chance) * rng.integers(1, GAMMA + 1, (2, columns)), left)
    direction = np.full(HIDDEN, 2.0 * side - 1)
    hidden = direction + rng.standard_normal((made.recent + NEW - 1, HIDDEN))
    return TracedText(
        key=text_key(prompt.tolist()),
        name=f"{DRAFTS[side]}-{seed}",
        domain=DRAFTS[side],
        prompt=prompt.astype(np.int32),
        answer=answer.astype(np.int32),
        accepts=accepts.astype(np.uint8),
        lookup_level=np.zeros(columns, np.uint8),
        lookup_accepts=np.zeros(columns, np.uint8),
        hidden=hidden.astype(np.float16),
        prompt_hidden=(direction + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32),
        confidences=rng.integers(0, 256, (2, columns, made.gamma_max)).astype(np.uint8) if made.confidences else None,
    )


def write_traces(folder: Path, count: int, *, first: int = 0, shuffled: bool = False, **changes: Any) -> Path:
    """A folder of `count` texts, of both sides in turn."""
    made = header(**changes)
    writer = TraceWriter(folder, made)
    for seed in range(first, first + count):
        writer.add(made_up(seed, made=made, shuffled=shuffled))
    return folder
