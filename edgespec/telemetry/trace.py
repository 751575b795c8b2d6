"""An event ring of fixed size, written as a Chrome trace (chrome://tracing, Perfetto).

Lanes are the lines of the picture: "rounds" for the decode loop, "loads" for background loads, any other name for
others. Times are `time.perf_counter_ns()` values. Recording is one append, safe from any thread; when the ring is full
the oldest events go, and the trace says how many.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from edgespec.errors import ConfigError
from edgespec.files import write_text

ROUNDS = "rounds"
LOADS = "loads"


class Event(NamedTuple):
    """One finished piece of work on one lane."""

    name: str
    lane: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any]


class Span:
    """A running piece of work: `with tracer.span("verify", width=4) as span: ...; span.note(accepted=2)`."""

    __slots__ = ("_args", "_begin", "_lane", "_name", "_tracer")

    def __init__(self, tracer: Tracer, name: str, lane: str, args: dict[str, Any]) -> None:
        self._tracer = tracer
        self._name = name
        self._lane = lane
        self._args = args
        self._begin = 0

    def note(self, **args: Any) -> None:
        """Add what only became known during the work."""
        self._args.update(args)

    def __enter__(self) -> Span:
        self._begin = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        end = time.perf_counter_ns()
        if kind is not None:
            self._args["error"] = kind.__name__
        self._tracer._record(Event(self._name, self._lane, self._begin, end, self._args))


class Tracer:
    """Keeps the last `capacity` events. `enabled` is True; NULL_TRACER's is False."""

    enabled = True

    def __init__(self, capacity: int = 200_000) -> None:
        if capacity < 1:
            raise ConfigError(f"a trace needs room for at least 1 event, not {capacity}")
        self._ring: deque[tuple[int, Event]] = deque(maxlen=capacity)
        self._ticket = itertools.count(1)  # next() is atomic, `+= 1` on an int is not
        self._start = time.perf_counter_ns()

    def span(self, name: str, *, lane: str = ROUNDS, **args: Any) -> Span:
        """A context manager that records `name` with its begin and end; `args` appear in the viewer."""
        return Span(self, name, lane, args)

    def event(self, name: str, begin_ns: int, end_ns: int, *, lane: str = ROUNDS, **args: Any) -> None:
        """Record work that was timed elsewhere (`time.perf_counter_ns()` values)."""
        self._record(Event(name, lane, begin_ns, end_ns, args))

    def _record(self, event: Event) -> None:
        self._ring.append((next(self._ticket), event))

    @property
    def dropped(self) -> int:
        """How many of the oldest events the ring has lost."""
        ring = self._ring.copy()
        return max((ticket for ticket, _event in ring), default=0) - len(ring)

    def events(self) -> list[Event]:
        """The recorded events, oldest first by completion."""
        # copy() is atomic under the interpreter lock, iteration is not.
        return [event for _ticket, event in self._ring.copy()]

    def clear(self) -> None:
        """Forget everything, for example after warm-up."""
        self._ring.clear()
        self._ticket = itertools.count(1)
        self._start = time.perf_counter_ns()

    def chrome(self) -> dict[str, Any]:
        """The trace as Chrome's JSON object: microseconds since the tracer was made, one thread id per lane."""
        events = self.events()
        lanes = {lane: number for number, lane in enumerate(_lane_order(events), start=1)}
        named: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "edgespec"}}]
        for lane, number in lanes.items():
            named.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}})
            named.append(
                {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": number, "args": {"sort_index": number}}
            )
        timed = [
            {
                "ph": "X",
                "name": event.name,
                "cat": event.lane,
                "pid": 1,
                "tid": lanes[event.lane],
                "ts": (event.begin_ns - self._start) / 1000,
                "dur": max(0, event.end_ns - event.begin_ns) / 1000,
                "args": event.args,
            }
            # Viewers nest by order of appearance when two begin at once: the longer one must come first.
            for event in sorted(events, key=lambda event: (event.begin_ns, -event.end_ns))
        ]
        other = {"dropped_events": self.dropped}
        return {"traceEvents": named + timed, "displayTimeUnit": "ms", "otherData": other}

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the Chrome trace; the file appears whole or not at all. Raises ConfigError if it cannot be written."""
        target = Path(path)
        try:
            write_text(target, json.dumps(self.chrome(), default=_plain))
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot write the trace to {target}: {reason}; give --trace a writable path") from error
        return target


class _NullSpan:
    __slots__ = ()

    def note(self, **_args: Any) -> None:
        pass

    def __enter__(self) -> _NullSpan:
        return self

    def __exit__(self, *_details: object) -> None:
        pass


_NULL_SPAN = _NullSpan()


class NullTracer:
    """Has the methods of Tracer and keeps nothing."""

    enabled = False
    dropped = 0

    def span(self, _name: str, *, lane: str = ROUNDS, **_args: Any) -> _NullSpan:
        return _NULL_SPAN

    def event(self, _name: str, _begin_ns: int, _end_ns: int, *, lane: str = ROUNDS, **_args: Any) -> None:
        pass

    def events(self) -> list[Event]:
        return []

    def clear(self) -> None:
        pass


NULL_TRACER = NullTracer()


def _lane_order(events: list[Event]) -> list[str]:
    """Rounds first, loads second, others in the order in which they appeared."""
    seen = list(dict.fromkeys(event.lane for event in events))
    return [lane for lane in (ROUNDS, LOADS) if lane in seen] + [lane for lane in seen if lane not in (ROUNDS, LOADS)]


def _plain(value: object) -> object:
    """What json cannot write itself: numpy scalars as numbers, anything else as its text."""
    item = getattr(value, "item", None)
    if callable(item):
        with suppress(ValueError):  # an array of several values
            return item()
    return str(value)
