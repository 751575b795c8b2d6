"""Trace folders with two heads and a table of phrases, and a ranker that looks at the last tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.bench.simulation.scenario import Base
from edgespec.bench.simulation.texts import read_corpus
from predictor.costs import CostTable
from predictor.features import FloatArray, Layout, TextFeatures
from predictor.traces import TraceDraft, TracedText, TraceHeader, TraceWriter
from tests.support import traces

VERIFY = {1: 0.010, 2: 0.0105, 3: 0.011, 4: 0.0115}
COSTS = {
    "verify": {str(width): seconds for width, seconds in VERIFY.items()},
    "drafts": {"left": 0.0004, "right": 0.0004},
    "load_seconds": {"left": 0.02, "right": 0.02},
}
WORDS = TraceDraft("words", "phrases", "general", traces.sha("words"), 10, free=True)


def header(**changes: Any) -> TraceHeader:
    drafts = (*traces.header().drafts, WORDS)
    return traces.header(**{"confidences": True, "drafts": drafts} | changes)


def text(seed: int, made: TraceHeader | None = None) -> TracedText:
    """As `traces.made_up`; the heads are sure of all, the table guesses at every third position and is right there."""
    made = made or header()
    plain = traces.made_up(seed, made=traces.header(stride=made.stride))
    columns = plain.accepts.shape[1]
    words = (np.arange(columns) % 3 == 0).astype(np.uint8)
    confidences = np.full((3, columns, made.gamma_max), 255, np.uint8)
    confidences[2] = 0
    confidences[2, :, 0] = 200 * words
    return dataclasses.replace(
        plain,
        accepts=np.concatenate([plain.accepts, words[None]]),
        confidences=confidences if made.confidences else None,
    )


def folder(path: Path, count: int = 8, costs: Mapping[str, Any] | None = COSTS, **changes: Any) -> Path:
    made = header(**changes)
    writer = TraceWriter(path, made)
    for seed in range(count):
        writer.add(text(seed, made))
    if costs is not None:
        writer.set_costs(costs)
    return path


def base(path: Path, count: int = 8) -> Base:
    """A folder's texts with the costs in it, and no ranker."""
    corpus = read_corpus([folder(path, count)], ranker="off")
    return Base(corpus, CostTable.from_json({**COSTS, "loads": COSTS["load_seconds"]}))


class FakeRanker:
    """Ranks by the features' sum, and keeps what it was asked."""

    def __init__(self) -> None:
        self.layout = Layout(traces.HIDDEN, traces.DRAFTS)
        self.asked: list[FloatArray] = []

    def features(self) -> TextFeatures:
        return TextFeatures(self.layout)

    def rank(self, vector: FloatArray) -> dict[str, float]:
        self.asked.append(vector)
        return {"left": 0.5, "right": 0.4}
