"""The figures of one stretch: throughput, latencies, what met the deadline, and what the loop did meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from edgespec.bench.load.records import Sample, Served, Stretch

PERCENTILES = (50, 95, 99)
LATENCIES = ("ttft", "tpot", "latency")


class Deadline(NamedTuple):
    """What a request must keep to be of use: seconds to its first token, and for each token after it."""

    ttft: float
    tpot: float

    def met(self, one: Served) -> bool:
        """Whether a whole answer came in time. A single piece has no time per token, and meets it."""
        if one.outcome != "finished" or one.ttft is None or one.ttft > self.ttft:
            return False
        return one.tpot is None or one.tpot <= self.tpot


def figures(stretch: Stretch, deadline: Deadline) -> dict[str, Any]:
    """All figures of the stretch's window, as JSON values; None where nothing says what it is."""
    begin, end = stretch.window
    counted = stretch.counted()
    tokens = sum(n for one in stretch.served for time, n in one.pieces if begin <= time < end)
    loaded = loaded_seconds(stretch)
    met = [one for one in counted if deadline.met(one)]
    window = end - begin
    return {
        "window_s": window,
        "loaded_s": loaded,
        "tokens": tokens,
        "throughput": tokens / loaded if loaded > 0 else None,
        "tokens_per_second": tokens / window if window > 0 else None,
        "requests": _counts(counted),
        "offered": len(counted) / window if window > 0 else None,
        **{name: latencies(counted, name, stretch.ended) for name in LATENCIES},
        "goodput": {
            "share": len(met) / len(counted) if counted else None,
            "requests_per_second": len(met) / window if window > 0 else None,
        },
        "loop": loop([s for s in stretch.samples if begin <= s.time < end]),
        "reused_tokens": sum(one.reused_tokens for one in counted),
        "prompt_tokens": sum(one.prompt_tokens for one in counted),
        "latest_submission_s": max((one.submitted - one.at for one in counted if one.submitted is not None), default=0),
    }


def _counts(counted: Sequence[Served]) -> dict[str, int]:
    outcomes: list[str] = [one.outcome for one in counted]
    kinds = ("finished", "unfinished", "refused", "failed")
    return {"asked": len(counted), **{kind: outcomes.count(kind) for kind in kinds}}


def loaded_seconds(stretch: Stretch) -> float:
    """Seconds of the window in which at least one request was there: submitted, and not at its end. Only what was never
    answered was there to the end of the stretch; a refused one was not there at all."""
    begin, end = stretch.window
    spans = sorted(
        (max(one.submitted, begin), min(end, one.finished if one.finished is not None else stretch.ended))
        for one in stretch.served
        if one.submitted is not None and (one.finished is not None or one.outcome == "unfinished")
    )
    total, reached = 0.0, begin
    for start, stop in spans:
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def latencies(counted: Iterable[Served], name: str, ended: float) -> dict[str, Any]:
    """Percentiles and mean of "ttft", "tpot" or "latency" in seconds.

    Refused and failed requests have no times. One whose time had not come when the stretch ended counts as longer than
    all: a percentile that falls among those is None, and the mean, which counts what they had waited, is `at_least`.
    """
    known, waiting = [], []
    for one in counted:
        if one.outcome in ("refused", "failed") or (name == "tpot" and not one.pieces):
            continue
        value: float | None = getattr(one, name)
        if value is not None:
            known.append(value)
        elif one.outcome == "unfinished" and name != "tpot":
            waiting.append(ended - one.at)
    total = len(known) + len(waiting)
    known.sort()
    return {
        "n": total,
        **{f"p{q}": _rank(known, q, total) for q in PERCENTILES},
        "mean": math.fsum([*known, *waiting]) / total if total else None,
        "at_least": bool(waiting),
    }


def _rank(ordered: Sequence[float], percent: int, total: int) -> float | None:
    """The nearest-rank percentile of `total` values of which only the smallest are known."""
    place = max(math.ceil(percent / 100 * total), 1) - 1
    return ordered[place] if place < len(ordered) else None


def loop(samples: Sequence[Sample]) -> dict[str, Any]:
    """What the loop did: means are over time (each batch counts as long as it took), so idle time is left out."""
    seconds = math.fsum(s.seconds for s in samples)

    def mean(values: Iterable[float | None]) -> float | None:
        pairs = [(v, s.seconds) for v, s in zip(values, samples) if v is not None]
        weight = math.fsum(w for _, w in pairs)
        return math.fsum(v * w for v, w in pairs) / weight if weight else None

    drafted, free = sum(s.drafted for s in samples), [s.kv_free for s in samples if s.kv_free is not None]
    return {
        "batches": len(samples),
        "seconds": seconds,
        "sequences": mean(s.sequences for s in samples),
        "queued": mean(s.queued for s in samples),
        "most_queued": max((s.queued for s in samples), default=0),
        "gamma": mean(s.gamma for s in samples),
        "acceptance": sum(s.accepted for s in samples) / drafted if drafted else None,
        "emitted": sum(s.emitted for s in samples),
        "least_kv_free": min(free, default=None),
        "resident": mean(s.resident for s in samples),
        "elastic": [[s.time, s.elastic] for s in samples if s.elastic],
        "draft_share": math.fsum(s.draft_seconds for s in samples) / seconds if seconds else None,
        "target_share": math.fsum(s.target_seconds for s in samples) / seconds if seconds else None,
    }
