"""A real engine with a tiny model, to be served by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec import Engine, RuntimeConfig, SamplingParams

WAIT = 60.0
PROMPTS = ["the hen and the hen and the hen", "a", "one two three four", "the cat sat on the mat and the", "zz", "so"]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def load(folder: Path, drafts: Any = ("ngram", "itself"), **settings: Any) -> Engine:
    """drafts: "itself" is the target as its own draft."""
    drafts = tuple(str(folder) if name == "itself" else name for name in drafts)
    settings = {"threads": 1, "weight_format": "float32", **settings}
    return Engine.from_pretrained(config=RuntimeConfig(model=str(folder), drafts=drafts, **settings))
