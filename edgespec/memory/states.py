"""The words of the working set: states of a draft, what is told about it, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a draft's weights are.

    COLD -> WARM (its files were read ahead) -> LOADING -> RESIDENT -> LEAVING (not offered any more, unloaded when the
    last lease on it ends) -> COLD or WARM. A load that is called off ends COLD; one that fails ends FAILED, and goes
    to LOADING again when it is wanted and its wait is over. LEAVING goes back to RESIDENT if
    the draft is wanted again in time.
    """

    COLD = "cold"
    WARM = "warm"
    LOADING = "loading"
    RESIDENT = "resident"
    LEAVING = "leaving"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DraftState:
    """One draft at one moment.

    reason: why it is there, in words. since: when it came there (seconds of the working set's clock). load_seconds: of
    its last completed load, 0 before the first. slot: the number of the slot that it is in, or None.
    """

    state: State
    reason: str
    since: float
    load_seconds: float
    slot: int | None


@dataclass(frozen=True, slots=True)
class WorkingSetEvent:
    """Something that was done. Times in nanoseconds of the working set's clock (`time.perf_counter_ns`).

    kind: "load", "evict", "cancel", "fail", "drop" (a load that nobody wanted any more when it was done), "warm",
    "shrink", "grow", "stuck" or "late". draft: "" for shrink and grow.
    """

    kind: str
    draft: str
    reason: str
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class Counters:
    """Since the working set was made.

    loads: completed, and offered from then on; load_seconds: of these. Every load that was begun ends as one of loads,
    cancelled or failures. evictions: of drafts that had been loaded, so that loads - evictions are resident or leaving.
    exposed_seconds: spent in `wait_for`. waits_in_round: calls of `wait_for` by a thread that held a lease; stays 0.
    """

    loads: int = 0
    load_seconds: float = 0.0
    exposed_seconds: float = 0.0
    cancelled: int = 0
    failures: int = 0
    evictions: int = 0
    bytes_read: int = 0
    waits_in_round: int = 0
