"""The working set: which drafts' weights are in memory, and how they come and go while the decoder runs.

Who does what. Decoding threads call `acquire`, `retarget` and `Lease.release`, which only change books. One background
thread (`loader`, its work in `jobs`) does everything that takes time: loading, unloading, reading ahead. A second,
light one (`watch`) looks four times a second whether memory is short and whether the storage has left the loader
hanging. What the loader does next follows from the books alone (`schedule`).

The lock. One lock guards all books (`books` says what that is). It is held for microseconds: no input or output, no
method of a draft, no callback, no tracer and no log call ever runs under it. A job is chosen and marked under the lock,
done without it, and booked under it.

A draft in use is never freed. A lease is a copy of the names that are resident at that moment. What has to go is first
marked LEAVING, so that no later lease has it, and unloaded when no lease has it any more. What was loaded is first seen
by the next lease.

Storage that hangs. A read that does not come back cannot be ended. Its thread is given up and another one takes over;
slot and draft stay with it until the read does come back, and what it brought is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.memory.books import Books
from edgespec.memory.budget import format_bytes
from edgespec.memory.jobs import Jobs, unload
from edgespec.memory.loader import Clock, Control, Loader, RateLimit
from edgespec.memory.pressure import PressureMonitor
from edgespec.memory.records import Failure, Lease, Record
from edgespec.memory.schedule import Schedule
from edgespec.memory.slots import SlotPool
from edgespec.memory.states import Counters, DraftState, State, WorkingSetEvent
from edgespec.memory.watch import StallGuard, Watch
from edgespec.telemetry.trace import LOADS, NULL_TRACER, NullTracer, Tracer

if TYPE_CHECKING:
    from drafts.base import Loadable

__all__ = ["Counters", "DraftState", "Lease", "State", "WorkingSet", "WorkingSetEvent"]

_log = logging.getLogger(__name__)

_REST_SECONDS = 0.002  # between two looks whether a slot has become empty
_LOOK_AGAIN = 0.1  # seconds: a lease that is forgotten wakes nobody


class WorkingSet:
    """K slots for the weights of `drafts`, filled in the background.

    slots: K. slot_bytes: what one may take, by default what the largest draft does; drafts that need more are FAILED.
    lent: begin as after `lend`.
    rate: bytes a second that loads may read, None = as fast as it goes. drop_cache: give file pages back after reading
    (where they compete with the weights: unified memory). pressure: when to shrink and grow; None = never.
    on_event: called with each WorkingSetEvent, from any thread, outside the lock. on_look: called at each look of the
    watching thread. clock: seconds (a trace wants those of `time.perf_counter`). retry_seconds: before the first retry
    of a failed load. stall_seconds: after which a read counts as hanging; hang_seconds: a load that does not read.
    watch_seconds: between two looks of the watching thread, None = there is none, and the owner calls `tick`.
    close_seconds: that `close` waits for each thing that runs.

    Raises OSError or MemoryError if the slots cannot be had, RuntimeError if the threads cannot, ValueError for two
    drafts of one name; nothing is left running then.
    """

    def __init__(
        self,
        drafts: Sequence[Loadable],
        *,
        slots: int,
        slot_bytes: int | None = None,
        lent: bool = False,
        rate: float | None = None,
        drop_cache: bool = False,
        pressure: PressureMonitor | None = None,
        tracer: Tracer | NullTracer = NULL_TRACER,
        on_event: Callable[[WorkingSetEvent], None] | None = None,
        on_look: Callable[[], None] | None = None,
        clock: Clock = time.perf_counter,
        retry_seconds: float = 30.0,
        stall_seconds: float = 5.0,
        hang_seconds: float = 300.0,
        watch_seconds: float | None = 0.25,
        close_seconds: float = 2.0,
    ) -> None:
        self._tracer, self._on_event, self._clock = tracer, on_event, clock
        self._on_look, self._close_seconds = on_look, close_seconds
        self._pressure, self._drop_cache = pressure, drop_cache
        self._limit = RateLimit(rate, clock)
        sizes = [(draft.slot_bytes, draft.buffer_bytes) for draft in drafts]
        room = max((size for size, _buffer in sizes), default=0) if slot_bytes is None else slot_bytes
        pool = SlotPool(slots, max((buffer for size, buffer in sizes if size <= room), default=0))
        after = State.COLD if drop_cache else State.WARM
        self._books = Books(Schedule(pool, room, self._control, after), clock)
        jobs = Jobs(self._books, self._tell, retry_seconds)
        self._loader = Loader(jobs.take)
        self._guard = StallGuard(
            self._books,
            self._tell,
            jobs,
            self._loader,
            stall_seconds=stall_seconds,
            hang_seconds=hang_seconds,
            retry_seconds=retry_seconds,
        )
        self._watch = None if watch_seconds is None else Watch(self.tick, watch_seconds)
        self._starting = threading.Lock()
        self._closing = threading.Lock()  # one `close` at a time
        self._started = self._closed = False
        self._lent, self._asked = lent, slots  # slots that may be used when they are not lent
        self._books.schedule.capacity = 0 if lent else slots
        for draft in drafts:
            self._enter(draft)
        try:  # last: whatever is wrong with the rest, no thread is left behind
            self._start()
        except BaseException:
            self.close()
            raise

    # What anybody may read

    @property
    def slots(self) -> int:
        """K: slots that were made."""
        return len(self._books.schedule.pool.slots)

    @property
    def slot_bytes(self) -> int:
        """What one slot may take."""
        return self._books.schedule.slot_bytes

    @property
    def capacity(self) -> int:
        """Slots that may be used now; pressure lowers it."""
        return self._books.schedule.capacity

    @property
    def counters(self) -> Counters:
        """A copy."""
        with self._books.lock:
            return replace(self._books.schedule.counters)

    def glance(self) -> tuple[int, float]:
        """(loads, load_seconds) without the lock: for what the collector may run in a thread that holds it."""
        counters = self._books.schedule.counters
        return counters.loads, counters.load_seconds

    def states(self) -> dict[str, DraftState]:
        """All drafts, in the order in which they were added."""
        with self._books.lock:
            return {name: record.described() for name, record in self._books.schedule.records.items()}

    # What decoding threads call

    def acquire(self) -> Lease:
        """The drafts that are resident now, safe from being unloaded until the lease is released. Never waits."""
        return self._books.acquire()

    def retarget(self, wanted: Sequence[str], *, reason: str, in_use: str | None = None) -> None:
        """Hold these drafts, best first, as far as there are slots; the next ones are read ahead. Never waits.

        Names that are no drafts of this working set (such as those without weights) are left out. A load that is not
        wanted any more is called off. in_use: the draft that runs now; if it has to go, it goes last.
        """
        books, schedule = self._books, self._books.schedule
        names = tuple(name for name in dict.fromkeys(wanted) if name in schedule.records)
        with books.lock:
            if books.closing or (names == schedule.wanted and in_use == schedule.in_use):
                return
            schedule.in_use, schedule.reason = in_use, reason
            schedule.wanted = names
            books.reconsider()

    def wait_for(self, name: str, timeout: float | None = None) -> bool:
        """Wait until `name` is resident: True. False: it failed, is not wanted, or the time is over.

        Not for rounds: the seconds count as exposed.
        """
        books, began = self._books, self._clock()
        deadline = None if timeout is None else time.monotonic() + timeout
        with books.lock:
            schedule = books.schedule
            schedule.counters.waits_in_round += books.holds_lease(threading.get_ident())
            try:
                while not books.closing and name in schedule.records:
                    record = schedule.records[name]
                    if record.state is State.RESIDENT:
                        return True
                    left = None if deadline is None else deadline - time.monotonic()
                    if record not in schedule.targets(self._clock()) or (left is not None and left <= 0):
                        return False
                    books.changed.wait(left)
                return False
            finally:
                schedule.counters.exposed_seconds += self._clock() - began

    def idle(self, timeout: float | None = None) -> bool:
        """Wait until there is nothing to load, to unload or to read ahead; False if the time is over before that."""
        with self._books.lock:
            return self._books.changed.wait_for(lambda: self._books.idle, timeout)

    # Changes

    def add(self, draft: Loadable) -> None:
        """One more draft. One that needs more than a slot has is FAILED at once, for good.

        Raises ValueError for a name that is taken.
        """
        self._enter(draft)
        self._start()

    def _enter(self, draft: Loadable) -> None:
        record = Record(draft, self._clock())
        problem = self._too_large(draft)
        if problem:
            record.failure = Failure.for_good(problem)
            record.become(State.FAILED, problem, record.since)
            _log.warning("%s; the text goes on without it", problem)
        with self._books.lock:
            if draft.name in self._books.schedule.records:
                raise ValueError(f"there is a draft {draft.name} already")
            self._books.schedule.records[draft.name] = record

    def set_capacity(self, capacity: int, reason: str) -> None:
        """Use that many slots from now on (0 to `slots`). Drafts that have to go are unloaded in the background.

        While the slots are lent there are none to use; it counts from `take_back` on.
        """
        self._use(reason, logging.WARNING, asked=capacity)

    @property
    def empty(self) -> bool:
        """Whether no slot holds anything and all have given their memory back.

        False once it is closed: the memory may be that of the working set that has replaced it.
        """
        with self._books.lock:
            return not self._books.closing and self._books.schedule.pool.resting == self.slots

    @property
    def lent(self) -> bool:
        """Whether the memory of the slots is not theirs now."""
        return self._lent

    def wait_for_rest(self, seconds: float) -> bool:
        """Whether, within that time, all slots beyond the capacity are empty and have given their memory back."""
        deadline, books = time.monotonic() + seconds, self._books
        while True:
            with books.lock:
                if books.schedule.pool.resting >= self.slots - books.schedule.capacity:
                    return True
            if time.monotonic() >= deadline or books.closing:
                return False
            time.sleep(_REST_SECONDS)

    def lend(self, reason: str) -> None:
        """Use no slots until `take_back`, whatever else is asked for. Their memory is free once this is `empty`."""
        self._use(reason, logging.INFO, lent=True)

    def take_back(self, reason: str) -> None:
        """The memory of the slots is there again: use as many as pressure allows. What is wanted is loaded."""
        self._use(reason, logging.INFO, lent=False)

    def _use(self, reason: str, level: int, *, asked: int | None = None, lent: bool | None = None) -> None:
        books, now = self._books, self._clock()
        with books.lock:
            if asked is not None:
                self._asked = max(0, min(asked, self.slots))
            if lent is not None:
                self._lent = lent
            before, capacity = books.schedule.capacity, 0 if self._lent else self._asked
            if capacity == before or books.closing:
                return
            books.schedule.capacity = capacity
            books.reconsider()
        kind = "shrink" if capacity < before else "grow"
        level = level if capacity < before else logging.INFO
        _log.log(level, "%d of %d draft slots are used from now on: %s", capacity, self.slots, reason)
        self._tell(kind, "", f"{before} to {capacity} slots: {reason}", now)

    def tick(self) -> None:
        """Look whether the loader hangs, and whether to shrink or grow. The watching thread does, if there is one."""
        if self._on_look is not None:
            self._on_look()
        self._guard.look()
        if self._pressure is not None:
            step = self._pressure.check(self._clock(), self._asked)
            if step is not None:
                self.set_capacity(step.capacity, step.reason)

    def close(self, patience: float | None = None) -> None:
        """Call off what runs, unload everything and end the threads. Idempotent; waits a bounded time.

        Drafts that a lease still has then are left as they are. patience: seconds to wait for leases to end, by default
        `close_seconds`. If something is raised meanwhile (Ctrl-C), another call does the rest.
        """
        with self._closing:
            if self._closed:
                return
            self._books.close()
            if self._watch is not None:
                self._watch.close(self._close_seconds)
            if not self._loader.join(self._close_seconds):
                _log.warning("the thread that loads drafts does not end; the storage seems to hang")
            if self._unload_all(self._close_seconds if patience is None else patience):
                self._books.schedule.pool.close()
            self._closed = True

    def __enter__(self) -> WorkingSet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Inside

    def _control(self) -> Control:
        return Control((), self._limit, drop_cache=self._drop_cache, clock=self._clock)

    def _too_large(self, draft: Loadable) -> str:
        """Why the draft never fits a slot, or ""."""
        pool = self._books.schedule.pool
        for what, need, room in (
            ("", draft.slot_bytes, self.slot_bytes),
            ("a buffer of ", draft.buffer_bytes, pool.buffer_bytes),
        ):
            if pool.slots and need > room:
                return f"draft {draft.name} needs {what}{format_bytes(need)}, but a slot has {format_bytes(room)}"
        return ""

    def _start(self) -> None:
        """Threads run from the first draft on, if there are slots at all."""
        with self._starting:
            if self._started or not self.slots or self._books.closing or not self._books.schedule.records:
                return
            self._started = self._books.running = True
            self._loader.start()
            if self._watch is not None:
                self._watch.start()

    def _unload_all(self, patience: float) -> bool:
        """At the end: unload what no lease has, after waiting for leases to end. Whether all are gone."""
        deadline, books = time.monotonic() + patience, self._books
        with books.lock:
            busy = None if books.job is None else books.job.record
            records = books.schedule.records.values()
            held = [each for each in records if each.slot is not None and not each.stuck and each is not busy]
            names = {record.name for record in held}
            while names & books.leased() and time.monotonic() < deadline:
                books.changed.wait(max(0.0, min(deadline - time.monotonic(), _LOOK_AGAIN)))
            leased = books.leased()
            for record in held:
                record.become(State.COLD, "closed", self._clock())
        for record in held:
            if record.name in leased:
                _log.warning("draft %s is still in use and stays in memory", record.name)
            else:
                unload(record, unsure=True)
        return not names & leased

    def _tell(self, kind: str, draft: str, reason: str, begin: float) -> None:
        """One event, outside the lock. begin: seconds of the clock."""
        event = WorkingSetEvent(kind, draft, reason, int(begin * 1e9), int(self._clock() * 1e9))
        name = f"{kind} {draft}".rstrip()
        self._tracer.event(name, event.begin_ns, event.end_ns, lane=LOADS, reason=reason)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                _log.exception("a listener to the working set failed")
