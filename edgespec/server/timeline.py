"""The last minutes of an engine for the page: batches, loads, and what is in memory now.

Fed by `Engine.watch` from the serving thread (one append a batch); read by the endpoint from the event loop.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edgespec.memory.states import DraftState, State
from edgespec.serving.records import BatchRecord

CAPACITY = 6000  # batches: a minute or more of the fastest
SHOWN_SECONDS = 90.0  # loads, stays and changes of memory that ended before are not told any more; the page shows 60
MOST_ROWS = 2000  # in one answer: a page that was asleep catches up in several


class Row(NamedTuple):
    """One batch. at: seconds of `time.perf_counter`. gamma: mean over its sequences. free: share of the KV pool."""

    ticket: int
    at: float
    sequences: int
    queued: int
    gamma: float
    rows: int
    drafted: int
    accepted: int
    emitted: int
    free: float


class Load(NamedTuple):
    """A draft's weights came into memory between these two moments (seconds of `time.perf_counter`)."""

    draft: str
    begin: float
    end: float


class Stay(NamedTuple):
    """A draft was in memory between these two moments; end None: it is."""

    draft: str
    begin: float
    end: float | None


class Timeline:
    """engine: as `edgespec.Engine`. on_batch: called with (mean gamma, drafted, accepted) of each batch."""

    def __init__(self, engine: Any, on_batch: Callable[[float, int, int], None]) -> None:
        self._engine = engine
        self._on_batch = on_batch
        self._rows: deque[Row] = deque(maxlen=CAPACITY)
        self._loads: deque[Load] = deque(maxlen=200)
        self._stays: deque[Stay] = deque(maxlen=200)
        self._held: dict[str, float] = {}  # drafts in memory, and since when
        self._elastic: deque[tuple[float, str]] = deque(maxlen=50)
        self._resident: tuple[str, ...] = ()  # in the last batch
        self._noting = threading.Lock()
        self._tickets = itertools.count(1)
        self._last = 0

    def batch(self, record: BatchRecord) -> None:
        """Called in the serving thread: quick."""
        gamma = sum(record.gammas) / len(record.gammas) if record.gammas else 0.0
        drafted, accepted, emitted = sum(record.drafted), sum(record.accepted), sum(record.emitted)
        at, ticket = time.perf_counter(), next(self._tickets)
        self._rows.append(
            Row(
                ticket,
                round(at, 4),
                record.sequences,
                record.queued,
                round(gamma, 2),
                record.rows,
                drafted,
                accepted,
                emitted,
                round(record.pool_free, 3),
            )
        )
        self._last = ticket
        if record.elastic is not None:
            self._elastic.append((at, record.elastic))
        if record.resident != self._resident:  # whether a page looks or not
            self._resident = record.resident
            self._note_states()
        self._on_batch(gamma, drafted, accepted)

    def since(self, ticket: int) -> dict[str, Any]:
        """What a page draws. ticket: the last row that it has; 0 or one that is unknown: all there is."""
        if ticket > self._last:
            ticket = 0  # of a server that was there before
        self._note_states()
        rows = [row for row in self._rows.copy() if row.ticket > ticket][:MOST_ROWS]
        now = time.perf_counter()
        with self._noting:
            loads = [load for load in self._loads if load.end > now - SHOWN_SECONDS]
            stays = [stay for stay in self._stays if stay.end is None or stay.end > now - SHOWN_SECONDS]
            held = [Stay(name, begin, None) for name, begin in self._held.items()]
        return {
            "now": now,
            "ticket": rows[-1].ticket if rows else ticket,
            "fields": Row._fields,
            "rows": rows,
            "loads": loads,
            "resident": stays + held,
            "elastic": [event for event in self._elastic.copy() if event[0] > now - SHOWN_SECONDS],
            "drafts": self._drafts(),
            "serving": self._serving(),
        }

    def _drafts(self) -> list[dict[str, Any]]:
        return [
            {"name": info.name, "kind": info.kind, "domain": info.domain, "bytes": info.nbytes, "state": info.status}
            for info in self._engine.draft_infos()
        ]

    def _serving(self) -> dict[str, Any]:
        serving = self._engine.serving
        figures: dict[str, Any] = {"memory_bytes": self._engine.memory_bytes(), "running": 0, "queued": 0, "pool": None}
        if serving is None:
            return figures
        figures.update(running=serving.running, queued=serving.queued, lent=serving.lent)
        if (pool := serving.pool) is not None:
            figures["pool"] = {name: getattr(pool, name) for name in ("total", "free", "cached", "promised")}
        return figures

    def _note_states(self) -> None:
        """Loads and stays since the last look: each state says since when it is so, and how long the load took."""
        working_set = self._engine.working_set
        if working_set is not None:
            with self._noting:
                self._note(working_set.states())

    def _note(self, states: Mapping[str, DraftState]) -> None:
        known = {(load.draft, load.end) for load in self._loads}
        for name, state in states.items():
            here = state.state is State.RESIDENT
            begin = self._held.get(name)
            if begin is not None and (not here or state.since > begin):
                self._stays.append(Stay(name, begin, state.since))
                del self._held[name]
            if here:
                self._held[name] = state.since
                if state.load_seconds > 0 and (name, state.since) not in known:
                    self._loads.append(Load(name, state.since - state.load_seconds, state.since))
        for name in self._held.keys() - states.keys():  # of a working set that was replaced
            del self._held[name]
