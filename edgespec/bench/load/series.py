"""A stretch over time, thin enough for a picture and for JSON."""

from __future__ import annotations

import math
from typing import Any

from edgespec.bench.load.records import Sample, Stretch

MOST_POINTS = 240


Piece = list[tuple[float, Sample]]  # (seconds of the batch that are in it, the batch)


def series(stretch: Stretch, points: int = MOST_POINTS) -> dict[str, Any]:
    """Means of equal pieces of time, each batch as heavy as it is long there; a piece without a batch is idle (zeros,
    and None for what only batches say). elastic: every event."""
    end = max(stretch.ended, max((s.time for s in stretch.samples), default=0.0)) or 1.0
    step = end / points
    pieces: list[Piece] = [[] for _ in range(points)]
    for sample in stretch.samples:
        begin = max(sample.time - sample.seconds, 0.0)
        for place in range(int(begin / step), min(int(sample.time / step), points - 1) + 1):
            seconds = min(sample.time, (place + 1) * step) - max(begin, place * step)
            if seconds > 0:
                pieces[place].append((seconds, sample))
    found: dict[str, Any] = {
        "arm": stretch.arm,
        "rate": stretch.rate,
        "window": list(stretch.window),
        "time": [round((place + 0.5) * step, 4) for place in range(points)],
        "sequences": [_mean(piece, "sequences", 0.0) for piece in pieces],
        "queued": [_mean(piece, "queued", 0.0) for piece in pieces],
        "gamma": [_mean(piece, "gamma", None) for piece in pieces],
        "kv_free": [_mean(piece, "kv_free", None) for piece in pieces],
        "resident": [_mean(piece, "resident", None) for piece in pieces],
        "elastic": [[round(s.time, 4), s.elastic] for s in stretch.samples if s.elastic],
    }
    return found


def _mean(piece: Piece, name: str, empty: float | None) -> float | None:
    known = [(getattr(s, name), seconds) for seconds, s in piece if getattr(s, name) is not None]
    weight = math.fsum(seconds for _, seconds in known)
    return round(math.fsum(v * seconds for v, seconds in known) / weight, 4) if weight else empty
