"""What the loader does next, decided from what is wanted, held and leased; and the books of what it did.

No threads, no I/O: everything here is called under the working set's lock, and no job is done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from edgespec.memory.loader import Control
from edgespec.memory.records import Failure, Job, Record, Stamps, cause_of
from edgespec.memory.slots import SlotPool
from edgespec.memory.states import Counters, State

_READ_AHEAD = 2  # drafts that come next in the ranking and are read into the page cache
_HELD = (State.RESIDENT, State.LEAVING)


class Schedule:
    """The drafts, and the next job.

    capacity: slots that may be used now. wanted: names, best first. in_use: the draft that runs now; of the victims it
    goes last. reason: why `wanted` is what it is. read_ahead: whether drafts beyond the capacity are hinted WARM.
    after: the state of a draft that was unloaded: WARM where its files may still be in the page cache.
    """

    def __init__(
        self, pool: SlotPool, slot_bytes: int, control: Callable[[], Control], after: State = State.WARM
    ) -> None:
        self.pool = pool
        self.slot_bytes = slot_bytes
        self.after = after
        self.counters = Counters()
        self.records: dict[str, Record] = {}
        self.capacity = len(pool.slots)
        self.wanted: tuple[str, ...] = ()
        self.in_use: str | None = None
        self.reason = ""
        self.read_ahead = True
        self._control = control

    # What is wanted

    def targets(self, now: float) -> list[Record]:
        """The drafts that should be resident, best first: as many as there are slots, those left out that failed."""
        room = self.capacity - sum(record.stuck for record in self.records.values())
        return [record for record in self._listed() if _eligible(record, now)][: max(0, room)]

    def _listed(self) -> Iterator[Record]:
        return (self.records[name] for name in self.wanted if name in self.records)

    def due(self) -> float:
        """When the first failed draft that is wanted may be tried again; infinity if there is none."""
        failures = (record.failure for record in self._listed() if record.state is State.FAILED and not record.stuck)
        return min((failure.due for failure in failures if failure is not None), default=math.inf)

    def keep_wanted(self, now: float) -> bool:
        """Whether a draft that was to leave stays, because it is wanted again in time."""
        stays = False
        for record in self.targets(now):
            if record.state is State.LEAVING and not record.unloading and not record.dropping:
                record.become(State.RESIDENT, f"wanted again ({self.reason})", now)
                stays = True
        return stays

    def needed(self, now: float) -> bool:
        """Whether a slot that is held could be used better: there are too many, or a wanted draft waits for one."""
        held = self._held()
        waits = any(record.slot is None for record in self.targets(now))
        return held > self.capacity or (waits and held >= self.capacity)

    def _held(self) -> int:
        return sum(record.slot is not None for record in self.records.values())

    # What is done next

    def choose(self, now: float, leased: Collection[str]) -> Job | None:
        """The next job, marked in its record; None if there is nothing to do but to wait."""
        self.keep_wanted(now)
        missing = next((record for record in self.targets(now) if record.state not in _HELD), None)
        self._make_room(missing, now)
        return (
            self._eviction(now, leased)
            or self._rest(now)
            or self._load(missing, now)
            or self._check(now)
            or self._warm(now)
        )

    def _make_room(self, missing: Record | None, now: float) -> None:
        """Mark a victim where there are more drafts than slots to use, or none is free for the next load.

        One at a time: a second one stays useful until its slot is really needed.
        """
        records = self.records.values()
        leaving = sum(record.state is State.LEAVING for record in records)
        staying = self._held() - leaving
        surplus = staying - self.capacity
        if surplus <= 0 and (missing is None or staying < self.capacity):
            return
        keep = self.targets(now)
        victims = [record for record in records if record.state is State.RESIDENT and record not in keep]
        victims.sort(key=self._worth)
        for victim in victims[: max(surplus, 1)]:
            if surplus > 0 or missing is None:
                reason = f"only {self.capacity} slots can be used now"
            else:
                reason = f"makes room for {missing.name} ({self.reason})"
            victim.become(State.LEAVING, reason, now)

    def _worth(self, record: Record) -> tuple[bool, int]:
        """Sorts victims: the draft in use last, those not listed first, then from the end of the list."""
        rank = self.wanted.index(record.name) if record.name in self.wanted else len(self.wanted)
        return record.name == self.in_use, -rank

    def _eviction(self, now: float, leased: Collection[str]) -> Job | None:
        for record in self.records.values():
            if record.state is State.LEAVING and record.name not in leased:
                record.unloading = True
                return Job("evict", record, self._control(), record.reason, now, record.slot)
        return None

    def _rest(self, now: float) -> Job | None:
        """Take a slot beyond the capacity out of service, or bring one back."""
        usable = self._held() + self.pool.free
        if usable > self.capacity:
            slot = self.pool.take()
            if slot is not None:
                return Job("rest", None, self._control(), "it is not to be used now", now, slot)
        while usable < self.capacity and self.pool.wake():
            usable += 1
        return None

    def _load(self, record: Record | None, now: float) -> Job | None:
        if record is None or self._held() >= self.capacity:
            return None
        slot = self.pool.take()
        if slot is None:
            return None
        record.slot = slot
        record.become(State.LOADING, self.reason, now)
        return Job("load", record, self._control(), self.reason, now, slot)

    def _check(self, now: float) -> Job | None:
        """Look whether the files of a draft that was found damaged have changed."""
        for record in self._listed():
            failure = record.failure
            if record.state is State.FAILED and failure is not None and not record.stuck:
                if failure.stamps is not None and failure.due <= now:
                    return Job("check", record, self._control(), failure.cause, now)
        return None

    def _warm(self, now: float) -> Job | None:
        if not self.read_ahead or self.capacity < len(self.pool.slots):
            return None
        following = [record for record in self._listed() if record.slot is None and record not in self.targets(now)]
        for record in following[:_READ_AHEAD]:
            if record.state is State.COLD and not record.unreadable:
                return Job("warm", record, self._control(), f"next in the ranking ({self.reason})", now)
        return None

    # What was done

    def loaded(self, job: Job, now: float) -> bool:
        """Book a load that was completed; whether the draft may be used. If not, it leaves before anybody sees it."""
        record = job.draft
        self.counters.bytes_read += job.control.bytes_read
        record.failure = None
        # One that was called off too late is kept, if nobody else needs its slot.
        if job.control.cancelled and record not in self.targets(now) and self.needed(now):
            self.counters.cancelled += 1
            record.dropping = True
            record.become(State.LEAVING, "not wanted any more when it was loaded", now)
            return False
        self.counters.loads += 1
        self.counters.load_seconds += now - job.begin
        record.load_seconds = now - job.begin
        record.become(State.RESIDENT, job.reason, now)
        return True

    def called_off(self, job: Job, now: float) -> None:
        self.counters.cancelled += 1
        self._unheld(job, State.COLD, "called off", now)

    def failed(self, job: Job, error: BaseException, stamps: Stamps, now: float, first_wait: float) -> bool:
        """Book a load that failed; whether its cause is another one than the last time."""
        record = job.draft
        last = record.failure
        record.failure = Failure.after(last, error, now, first_wait, stamps)
        self.counters.failures += 1
        self._unheld(job, State.FAILED, record.failure.cause, now)
        return last is None or last.cause != record.failure.cause

    def unloaded(self, job: Job, now: float) -> bool:
        """Book an unload; whether the draft had ever been offered."""
        record = job.draft
        offered = not record.dropping
        self.counters.evictions += offered
        record.unloading = record.dropping = False
        self._unheld(job, self.after, job.reason, now)
        return offered

    def given_up(self, job: Job, cause: BaseException, now: float, first_wait: float) -> None:
        """The thread that does `job` hangs. Draft and slot stay with it."""
        job.abandoned = True
        job.control.cancel()
        record = job.draft
        if job.kind == "load":
            record.failure = Failure.after(record.failure, cause, now, first_wait, ())
            self.counters.failures += 1
            record.stuck = True
            record.become(State.FAILED, record.failure.cause, now)
        elif job.kind == "check" and record.failure is not None:
            record.failure = replace(record.failure, due=math.inf)  # until this look comes back
        else:
            self.read_ahead = False  # it would only lose another thread

    def mend(self, job: Job | None, error: BaseException, other: Job | None, now: float, first_wait: float) -> None:
        """`error` came in the middle of `job` (None: while one was chosen), whose draft was unloaded if it was loaded.

        Afterwards every draft and slot is again where things can go on from. other: the job of another thread.
        """
        if job is not None and job.record is not None and job.kind in ("load", "evict"):
            record = job.record
            record.stuck = record.dropping = False
            if job.kind == "load":
                record.failure = Failure.after(record.failure, error, now, first_wait, ())
                self.counters.failures += 1
            self._leave(record, State.FAILED if job.kind == "load" else self.after, cause_of(error), now)
        for record in self.records.values():
            if record.stuck or (other is not None and other.record is record):
                continue
            record.unloading = False
            if record.state is State.LOADING:
                self._leave(record, State.COLD, cause_of(error), now)
        taken = {record.slot for record in self.records.values()} | {None if other is None else other.slot}
        self.pool.reclaim([slot for slot in taken if slot is not None])

    def _leave(self, record: Record, state: State, reason: str, now: float) -> None:
        record.slot = None
        record.become(state, reason, now)

    def came_back(self, job: Job) -> None:
        """The thread that was given up has ended its load, and what it brought is unloaded."""
        record = job.draft
        record.stuck = False
        self.counters.bytes_read += job.control.bytes_read
        self._give_back(job, record)

    def checked(self, job: Job, stamps: Stamps, now: float) -> None:
        """The files of a damaged draft were looked at."""
        record = job.draft
        failure = record.failure
        if failure is not None and record.state is State.FAILED:
            record.failure = failure.postponed(now) if stamps == failure.stamps else failure.passed()

    def warmed(self, job: Job, now: float, error: Exception | None) -> None:
        """The files were read ahead, if there is no error."""
        record = job.draft
        if error is None and record.state is State.COLD:
            record.become(State.WARM, job.reason, now)
        record.unreadable = error is not None and not job.control.cancelled

    def _unheld(self, job: Job, state: State, reason: str, now: float) -> None:
        record = job.draft
        if job.kind == "load":
            self.counters.bytes_read += job.control.bytes_read
        self._give_back(job, record)
        record.become(state, reason, now)

    def _give_back(self, job: Job, record: Record) -> None:
        record.slot = None
        if job.slot is not None:
            self.pool.give_back(job.slot)


def _eligible(record: Record, now: float) -> bool:
    """Whether the draft could be resident: it is not failed, or may be tried again."""
    if record.stuck:
        return False
    if record.state is not State.FAILED:
        return True
    return record.failure is not None and record.failure.stamps is None and record.failure.due <= now
