"""Elastic memory: while drafts do not help, their memory holds keys and values.

Where many texts run, drafting stops paying and keys and values run short at the same time. Then the drafts' slots are
given up, and once they are empty the pool grows by their bytes. When the queue is empty and enough blocks would stay
free without them, the pool is compacted, gives the bytes back, and the drafts are loaded again in the background.

Memory is always given back before it is taken, so both together never hold more than was planned. No request is
dropped or computed again because of it: blocks are moved, never lost, and a pool that could not keep its promises
without the drafts' memory keeps it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from edgespec.memory.budget import format_bytes
from edgespec.models.kv.blocks import PoolStats
from edgespec.telemetry.trace import LOADS, NULL_TRACER, NullTracer, Tracer

_log = logging.getLogger(__name__)

_KEPT_EVENTS = 64
_PAUSE = 50  # steps after a compaction that failed


class ElasticEvent(NamedTuple):
    """Something that was done. time: seconds of the clock, at its end.

    kind: "leave" (the drafts are asked to go), "lend" (they are gone, the pool has grown), "stay" (called off before
    that), "return" (the pool has shrunk, the drafts come back) or "fail" (it could not shrink, for now). blocks: by how
    many the pool has changed. seconds: that no batch could run because of it.
    """

    time: float
    kind: str
    blocks: int
    seconds: float
    reason: str


class Pool(Protocol):
    """What is needed of a `KVPool`."""

    block_bytes: int

    @property
    def stats(self) -> PoolStats: ...

    def grow(self, nbytes: int) -> int: ...

    def can_shrink(self, nbytes: int) -> bool: ...

    def shrink(self, nbytes: int) -> int: ...


class Drafts(Protocol):
    """What is needed of a `WorkingSet`."""

    @property
    def slots(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def empty(self) -> bool: ...

    def lend(self, reason: str) -> None: ...

    def take_back(self, reason: str) -> None: ...


class ElasticMemory:
    """Moves memory between `pool` and `drafts`. One thread calls `step`, between forwards; the rest anybody may read.

    tau_low: of all blocks, the share below which the free ones are too few. tau_high: the share that must stay free
    when the drafts come back. steps: for so many in a row either must hold. Raises ValueError unless
    0 <= tau_low < tau_high < 1 (else memory would go back and forth).
    """

    def __init__(
        self,
        pool: Pool,
        drafts: Drafts,
        *,
        tau_low: float = 0.10,
        tau_high: float = 0.25,
        steps: int = 3,
        tracer: Tracer | NullTracer = NULL_TRACER,
        on_event: Callable[[ElasticEvent], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 <= tau_low < tau_high < 1 or steps < 1:
            raise ValueError(f"thresholds must be 0 <= {tau_low} < {tau_high} < 1, and steps at least 1, not {steps}")
        self.tau_low, self.tau_high, self.steps = tau_low, tau_high, steps
        self.events: deque[ElasticEvent] = deque(maxlen=_KEPT_EVENTS)
        self._pool, self._drafts = pool, drafts
        self._tracer, self._on_event, self._clock = tracer, on_event, clock
        self._bytes = drafts.slots * drafts.slot_bytes
        self._leaving = False  # the drafts are asked to go
        self._lent = 0  # bytes by which the pool has grown
        self._short = self._ample = self._pause = 0  # steps

    @property
    def lent(self) -> int:
        """Bytes of the drafts that hold keys and values now."""
        return self._lent

    @property
    def leaving(self) -> bool:
        """Whether the drafts are asked to go and are not gone yet."""
        return self._leaving

    def of(self, drafts: Drafts) -> None:
        """The drafts have another working set from now on (one was added). What those before have lent, these lend."""
        self._drafts, self._bytes = drafts, drafts.slots * drafts.slot_bytes
        if self._lent or self._leaving:
            drafts.lend("their memory holds keys and values")
        else:  # it may have begun as one whose memory is lent, and that was given back meanwhile
            drafts.take_back("no memory is lent")

    def step(self, gamma_zero: bool | None, queued: int, *, blocked: bool = False) -> ElasticEvent | None:
        """Look at the pool after a batch, and do at most one thing.

        gamma_zero: the drafts could have guessed and were not asked to (False: they were; None: nothing is known, as
        while they load). queued: requests that wait. blocked: the first of them waits for blocks, however many are
        free.
        """
        stats = self._pool.stats
        if self._lent:
            return self._maybe_return(stats, queued)
        short = stats.free_share < self.tau_low or (blocked and queued > 0)
        if gamma_zero is False or not short:
            self._short = 0
        elif gamma_zero:
            self._short += 1
        if self._leaving:
            return self._go_on(stats, gamma_zero)
        if self._short < self.steps or self._bytes < self._pool.block_bytes:
            return None
        if self._drafts.capacity < self._drafts.slots:
            return None  # the device itself is short of memory
        self._leaving, self._short = True, 0
        reason = f"{_share(stats)} of the KV blocks are free and nothing is drafted"
        self._drafts.lend(reason)
        return self._tell("leave", 0, self._clock(), reason)

    def _go_on(self, stats: PoolStats, gamma_zero: bool | None) -> ElasticEvent | None:
        """Take the memory of the drafts if they are gone; let them stay if they can help again."""
        pays = gamma_zero is False
        if pays or stats.free_share > self.tau_high:
            self._leaving = False
            reason = "drafting pays again" if pays else f"{_share(stats)} of the KV blocks are free"
            self._drafts.take_back(reason)
            return self._tell("stay", 0, self._clock(), reason)
        if not self._drafts.empty:
            return None
        begin = self._clock()
        self._lent = self._pool.grow(self._bytes)
        self._leaving = False
        if not self._lent:  # as large as it may ever be
            self._bytes = 0
            self._drafts.take_back("the KV pool cannot grow")
            return self._tell("stay", 0, begin, "the KV pool cannot grow")
        reason = f"{format_bytes(self._lent)} of drafts hold keys and values"
        return self._tell("lend", self._lent // self._pool.block_bytes, begin, reason)

    def _maybe_return(self, stats: PoolStats, queued: int) -> ElasticEvent | None:
        """Give the memory back when nobody waits and enough stays free without it."""
        self._pause = max(0, self._pause - 1)
        blocks = self._lent // self._pool.block_bytes
        rest = stats.total - blocks
        ample = queued == 0 and stats.available - blocks > self.tau_high * rest
        self._ample = self._ample + 1 if ample else 0
        if self._ample < self.steps or self._pause or not self._pool.can_shrink(self._lent):
            return None
        self._ample, begin = 0, self._clock()
        if not self._pool.shrink(self._lent):
            self._pause = _PAUSE
            return self._tell("fail", 0, begin, "the KV blocks could not be compacted")
        self._lent = 0
        reason = f"{(stats.available - blocks) / rest:.0%} of the KV blocks stay free and nobody waits"
        self._drafts.take_back(reason)
        return self._tell("return", -blocks, begin, reason)

    def give_up(self) -> None:
        """Move nothing any more. Drafts that have lent nothing yet stay; what is lent stays so until `close`."""
        if self._leaving:
            self._leaving = False
            self._drafts.take_back("memory cannot be moved")

    def close(self) -> None:
        """The end: nothing is lent any more. The pool must not be used after it."""
        if self._lent or self._leaving:
            self._lent, self._leaving = 0, False
            self._drafts.take_back("no request runs any more")

    def _tell(self, kind: str, blocks: int, begin: float, reason: str) -> ElasticEvent:
        now = self._clock()
        event = ElasticEvent(now, kind, blocks, now - begin, reason)
        self.events.append(event)
        _log.info("elastic memory, %s: %s", kind, reason)
        self._tracer.event(f"KV {kind}", int(begin * 1e9), int(now * 1e9), lane=LOADS, blocks=blocks, reason=reason)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                _log.exception("a listener to the elastic memory failed")
        return event


def _share(stats: PoolStats) -> str:
    return f"{max(stats.free_share, 0.0):.0%}"
