"""The books of the working set, and the one lock that guards them.

`lock` guards everything here: the schedule with its drafts, slots and counters, the leases, and the job that runs. It
is held for microseconds: *no input or output, no method of a draft, no callback, no tracer and no log call ever runs
under it*, and no other lock is taken while it is held. Methods say whether they take it or want it held. Threads wait
on two conditions of it: the loader on `work`, everybody else on `changed`.
"""

from __future__ import annotations

import itertools
import math
import threading

from edgespec.memory.loader import Clock
from edgespec.memory.records import Job, Lease
from edgespec.memory.schedule import Schedule
from edgespec.memory.states import State

_POLL = 0.25  # the longest that the loader sleeps while something may become due by itself


class Books:
    """idle: there is nothing to load, to unload or to read ahead. job: what the loader does now."""

    def __init__(self, schedule: Schedule, clock: Clock) -> None:
        self.schedule = schedule
        self.clock = clock
        # Only ever entered as `with lock`: entering a condition runs Python code, in which Ctrl-C could strike.
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        self.changed = threading.Condition(self.lock)
        self.job: Job | None = None
        self.idle = True
        self.running = False  # whether there is a loader
        self.closing = False
        self._draining = False  # the loader waits for leases to end
        self._offered: frozenset[str] | None = None  # the resident drafts; None: to be looked up again
        self._leases: dict[int, tuple[frozenset[str], int]] = {}  # ticket -> names, thread
        self._tickets = itertools.count()

    # Leases

    def acquire(self) -> Lease:
        """Takes the lock."""
        lease = Lease(next(self._tickets), self._release, self._forget)
        thread = threading.get_ident()
        with self.lock:
            names = self._offered
            if names is None:
                records = () if self.closing else self.schedule.records.values()
                self._offered = names = frozenset(r.name for r in records if r.state is State.RESIDENT)
            lease.names = names
            self._leases[lease.ticket] = (names, thread)
        return lease

    def _release(self, ticket: int) -> None:
        with self.lock:
            self._leases.pop(ticket, None)
            if self._draining:
                self.work.notify_all()
            if self.closing:
                self.changed.notify_all()

    def _forget(self, ticket: int) -> None:
        self._leases.pop(ticket, None)  # atomic, without the lock; whoever waits for it looks again soon

    def leased(self) -> set[str]:
        """All names that some lease has. Under the lock."""
        return {name for names, _thread in list(self._leases.values()) for name in names}

    def holds_lease(self, thread: int) -> bool:
        """Under the lock."""
        return any(holder == thread for _names, holder in list(self._leases.values()))

    # The loader

    def next_job(self) -> Job | None:
        """Wait for a job of the loader; None when the working set closes. Takes the lock."""
        with self.lock:
            while not self.closing:
                self.job = self.schedule.choose(self.clock(), self.leased())
                self._offered = None  # what is leaving is not offered again
                if self.job is not None:
                    self.idle = False
                    return self.job
                self._draining = any(each.state is State.LEAVING for each in self.schedule.records.values())
                self.idle = not self._draining
                self.changed.notify_all()
                self.work.wait(_POLL if self._draining or self.schedule.due() < math.inf else None)
            self.job, self.idle = None, True
            self.changed.notify_all()
            return None

    def done(self, job: Job) -> None:
        """The loader is through with `job`, and what it did is booked. Under the lock."""
        if self.job is job:
            self.job = None
        self._offered = None
        self.changed.notify_all()

    def reconsider(self) -> None:
        """What is wanted, or how much may be held, has changed. Under the lock."""
        now = self.clock()
        if self.schedule.keep_wanted(now):
            self._offered = None
        job = self.job
        if job is not None and not self._still_wanted(job, now):
            job.control.cancel()
        self.idle = not self.running
        self.work.notify_all()
        self.changed.notify_all()

    def _still_wanted(self, job: Job, now: float) -> bool:
        if job.kind == "load":
            return job.record in self.schedule.targets(now)
        return job.kind != "warm"  # reading ahead makes way for whatever comes

    def close(self) -> None:
        """From now on nothing is offered, and the loader gets no more jobs. Takes the lock."""
        with self.lock:
            self.closing, self._offered = True, None
            if self.job is not None:
                self.job.control.cancel()
            self.work.notify_all()
            self.changed.notify_all()
