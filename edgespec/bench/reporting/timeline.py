"""A stretch of a run out of its Chrome trace: answers, rounds and their drafts, loads, and what was resident when."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.bench.reporting.pairs import Part
from edgespec.bench.specbench import fields
from edgespec.bench.specbench.folder import TRACES, file_name
from edgespec.bench.specbench.worker import ANSWERS_LANE
from edgespec.telemetry.trace import LOADS, ROUNDS

_log = logging.getLogger(__name__)

MOST_ROUNDS = 150  # about as many as a phone's width can tell apart
MOST_ANSWERS = 6
PAUSE_S = 0.1  # what is left of the time between two answers, in which other arms ran
_HOLDING = ("load", "evict")


class Span(NamedTuple):
    """A time, in seconds."""

    begin: float
    end: float


class Round(NamedTuple):
    """One target step. draft: None = nobody proposed."""

    span: Span
    draft: str | None
    gamma: int
    accepted: int


class Load(NamedTuple):
    """Something that the working set did: "load", "evict", ... of a draft, and why."""

    span: Span
    kind: str
    draft: str
    reason: str


@dataclass
class Timeline:
    """What a trace holds, in order of time. labels: the domains of the answers. resident: by draft."""

    answers: list[Span] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    resident: dict[str, list[Span]] = field(default_factory=dict)


def timelines(part: Part) -> dict[str, dict[str, Any]]:
    """By arm, the stretch in which most happens; only arms whose drafts came and went or took turns.

    A trace that cannot be read is left out with a log line: no figure depends on it.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in part.arms:
        for run in part.runs:
            file = trace_file(run.path, name)
            if name in found or not file.is_file():
                continue
            try:
                timeline = read(fields.parsed(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
                _log.warning("the time line of %s is left out, %s cannot be read: %s", name, file, error)
                continue
            drafts = {round.draft for round in timeline.rounds} - {None}
            if timeline.answers and (timeline.loads or len(drafts) > 1):
                found[name] = stretch(timeline)
    return found


def trace_file(folder: Path, arm: str) -> Path:
    """Where the trace of an arm lies."""
    return folder / TRACES / f"{file_name(arm)}.json"


def read(trace: dict[str, Any]) -> Timeline:
    """From a Chrome trace of a policy's arm. Times are the arm's own: what passed between its answers is cut out.

    Raises KeyError, TypeError or ValueError for anything else.
    """
    events = sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: float(e["ts"]))
    answers = [e for e in events if e["cat"] == ANSWERS_LANE]
    first = min((_span(e).begin for e in events if e["cat"] == ROUNDS), default=0.0)
    # Of an answer that had begun when the oldest events were dropped, only a part is there.
    dropped = trace.get("otherData", {}).get("dropped_events", 0)
    answers = [e for e in answers if not dropped or _span(e).begin >= first]
    squeeze = _Squeeze([_span(e) for e in answers])
    timeline = Timeline(
        answers=[squeeze(_span(e)) for e in answers],
        labels=[str(e["args"].get("domain", "")) for e in answers],
    )
    for event in events:
        span, args = squeeze(_span(event)), event.get("args", {})
        if event["cat"] == LOADS:
            kind, _, draft = str(event["name"]).partition(" ")
            timeline.loads.append(Load(span, kind, draft, str(args.get("reason", ""))))
        elif event["cat"] == ROUNDS and event["name"] == "round":
            draft = args.get("draft")
            name = None if draft is None else str(draft)
            timeline.rounds.append(Round(span, name, int(args["gamma"]), int(args["accepted"])))
    timeline.resident = _resident(timeline)
    return timeline


def _span(event: dict[str, Any]) -> Span:
    begin, seconds = float(event["ts"]) * 1e-6, float(event["dur"]) * 1e-6
    if not math.isfinite(begin + seconds):
        raise ValueError(f"an event at {begin} s that takes {seconds} s")
    return Span(begin, begin + seconds)


class _Squeeze:
    """Takes out what is longer than a pause between answers, and all that was before the first."""

    def __init__(self, answers: Sequence[Span]) -> None:
        self._answers = answers
        self._begins = [answer.begin for answer in answers]
        self._starts = [0.0] * len(answers)
        for i in range(1, len(answers)):
            before, here = answers[i - 1], answers[i]
            pause = min(here.begin - before.end, PAUSE_S)
            self._starts[i] = self._starts[i - 1] + before.end - before.begin + pause

    def _time(self, at: float) -> float:
        place = bisect.bisect_right(self._begins, at) - 1
        if place < 0:
            return 0.0
        begin, end = self._answers[place]
        return self._starts[place] + min(at, end) - begin + min(max(at - end, 0.0), PAUSE_S)

    def __call__(self, span: Span) -> Span:
        return Span(self._time(span.begin), self._time(span.end))


def _resident(timeline: Timeline) -> dict[str, list[Span]]:
    """From loads and evictions. A draft that ran, or went, before it was ever loaded was there from the beginning."""
    last = max([round.span.end for round in timeline.rounds] + [load.span.end for load in timeline.loads], default=0.0)
    loads = [load for load in timeline.loads if load.kind in _HOLDING]
    since: dict[str, float] = {}
    found: dict[str, list[Span]] = {}
    for draft in dict.fromkeys(round.draft for round in timeline.rounds if round.draft):
        first = next((load.span.begin for load in loads if load.draft == draft), last)
        if any(round.draft == draft and round.span.end <= first for round in timeline.rounds):
            since[draft] = 0.0
    for load in loads:
        if load.kind == "load":
            since.setdefault(load.draft, load.span.end)
        else:  # one that went without having come was there from the beginning
            begin = since.pop(load.draft, None if load.draft in found else 0.0)
            if begin is not None:
                found.setdefault(load.draft, []).append(Span(begin, load.span.begin))
    for draft, begin in since.items():
        found.setdefault(draft, []).append(Span(begin, last))
    return found


def stretch(timeline: Timeline) -> dict[str, Any]:
    """The consecutive answers, MOST_ROUNDS at most, in which most loads and switches happen; times from its begin."""
    first, last = max(_windows(timeline), key=lambda window: _events(timeline, *window))
    begin, end = timeline.answers[first].begin, timeline.answers[last].end
    shown = [r.span for r in timeline.rounds if begin <= r.span.begin < end]
    if len(shown) > MOST_ROUNDS:
        end = shown[MOST_ROUNDS - 1].end

    def cut(span: Span) -> list[float]:
        return [round(max(span.begin, begin) - begin, 6), round(min(span.end, end) - begin, 6)]

    def inside(span: Span) -> bool:
        return min(span.end, end) > max(span.begin, begin)

    return {
        "seconds": round(end - begin, 6),
        "answers": [[*cut(timeline.answers[i]), timeline.labels[i]] for i in range(first, last + 1)],
        "rounds": [[*cut(r.span), r.draft, r.gamma, r.accepted] for r in timeline.rounds if inside(r.span)],
        "loads": [[*cut(x.span), x.kind, x.draft, x.reason] for x in timeline.loads if inside(x.span)],
        "resident": {d: [cut(span) for span in spans if inside(span)] for d, spans in timeline.resident.items()},
    }


def _windows(timeline: Timeline) -> list[tuple[int, int]]:
    """(first, last) answer of every stretch that is short enough; one answer always is."""
    found = []
    starts = [r.span.begin for r in timeline.rounds]
    for first, answer in enumerate(timeline.answers):
        last, before = first, bisect.bisect_left(starts, answer.begin)
        for i in range(first + 1, min(first + MOST_ANSWERS, len(timeline.answers))):
            if bisect.bisect_left(starts, timeline.answers[i].end) - before <= MOST_ROUNDS:
                last = i
        found.append((first, last))
    return found


def _events(timeline: Timeline, first: int, last: int) -> tuple[int, int]:
    begin, end = timeline.answers[first].begin, timeline.answers[last].end
    drafts = [r.draft for r in timeline.rounds if begin <= r.span.begin <= end]
    switches = sum(a != b for a, b in itertools.pairwise(drafts))
    loads = sum(load.kind == "load" and begin <= load.span.begin <= end for load in timeline.loads)
    return 4 * loads + switches, last - first
