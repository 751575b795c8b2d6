"""What the loader's thread does: a job is done without the lock, and booked under it.

Whatever is raised where nobody expects it (a draft's own code, memory that runs out in the middle of the books) costs
one log entry and at most one load: `mend` puts the books in order, and the thread goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from drafts.base import LoadCancelled
from edgespec.errors import DraftError
from edgespec.memory.books import Books
from edgespec.memory.loader import read_ahead
from edgespec.memory.records import Job, Record, Stamps, cause_of, stamps_of
from edgespec.memory.slots import MemorySlot

_log = logging.getLogger(__name__)

Tell = Callable[[str, str, str, float], None]  # kind, draft, reason, begin

_PAUSE = 0.25  # seconds after an unexpected error: if it comes back every time, it must not take a whole core


class Jobs:
    """retry_seconds: before the first retry of a load that failed."""

    def __init__(self, books: Books, tell: Tell, retry_seconds: float) -> None:
        self._books = books
        self._tell = tell
        self._retry_seconds = retry_seconds
        self._told = False

    def take(self) -> Callable[[], None] | None:
        """Wait for a job; None when there will be no more."""
        try:
            job = self._books.next_job()
        except BaseException as error:
            self.mend(None, error)
            return lambda: None
        return None if job is None else lambda: self._do(job)

    def mend(self, job: Job | None, error: BaseException) -> None:
        """`error` ended `job`, or the choice of one: what is not booked yet has failed, and the loader can go on."""
        books = self._books
        with books.lock:
            booked = job is not None and books.job is not job and not (job.abandoned and job.draft.stuck)
        if job is not None and not booked:
            if job.kind in ("load", "evict"):
                unload(job.draft, unsure=True)
            job.control.cancel()
        if not self._told:
            self._told = True
            _log.error("the thread that loads drafts met an error and goes on: %s", cause_of(error), exc_info=error)
        with books.lock:
            if booked:
                return
            others = None if books.job is job else books.job
            books.schedule.mend(job, error, others, books.clock(), self._retry_seconds)
            if job is not None:
                books.done(job)
            if not books.closing:
                books.work.wait(_PAUSE)

    def _do(self, job: Job) -> None:
        try:
            self._work(job)
        except BaseException as error:
            self.mend(job, error)

    def _work(self, job: Job) -> None:
        if job.kind == "load":
            self._load(job)
        elif job.kind == "evict":
            self._evict(job)
        elif job.kind == "rest":
            self._rest(job)
        elif job.kind == "check":
            self._check(job)
        else:
            self._read_ahead(job)

    def _load(self, job: Job) -> None:
        record, books = job.draft, self._books
        stamps: Stamps = ()
        error: BaseException | None = None
        try:
            stamps = _stamps(job)  # before anything is read, so that a later change is noticed
            job.control.checkpoint()
            slot = _slot(job)
            if not getattr(record.draft, "refills", False):
                slot.let_go()
            record.draft.load(slot, job.control)
            if not record.draft.loaded:
                raise DraftError(f"draft {record.name} is not there after it was loaded")
        except BaseException as caught:
            error = caught
            unload(record, unsure=True)
        fresh, now = False, books.clock()
        with books.lock:
            late = job.abandoned or (books.closing and error is None)
            if not late:
                kind, fresh = self._booked(job, error, stamps, now)
                books.done(job)
                fresh = fresh and not books.closing  # what it needs may be closed already
        if late:
            self._come_back(job)
            return
        cause = cause_of(error) if error is not None and kind == "fail" else job.reason
        error = None  # its traceback holds this frame, and what was loaded in part
        if fresh:
            _log.warning("draft %s cannot be loaded: %s; the text goes on without it", record.name, cause)
        self._tell(kind, record.name, cause, job.begin)

    def _booked(self, job: Job, error: BaseException | None, stamps: Stamps, now: float) -> tuple[str, bool]:
        """(kind of event, whether to warn), after writing down how a load ended. Under the lock."""
        schedule = self._books.schedule
        if error is None:
            return ("load" if schedule.loaded(job, now) else "drop"), False
        if isinstance(error, LoadCancelled) and job.control.cancelled:
            schedule.called_off(job, now)
            return "cancel", False
        return "fail", schedule.failed(job, error, stamps, now, self._retry_seconds)

    def _come_back(self, job: Job) -> None:
        """Nobody waits any more for what was loaded: its thread was given up, or the working set closes."""
        record = job.draft
        unload(record, unsure=True)
        now = self._books.clock()
        with self._books.lock:
            if job.abandoned:
                self._books.schedule.came_back(job)
                self._books.reconsider()
            else:
                self._books.schedule.called_off(job, now)
                self._books.done(job)
        self._tell("late", record.name, "it was not waited for any more", job.begin)

    def _evict(self, job: Job) -> None:
        unload(job.draft)
        now = self._books.clock()
        with self._books.lock:
            offered = self._books.schedule.unloaded(job, now)
            self._books.done(job)
        if offered:
            self._tell("evict", job.draft.name, job.reason, job.begin)

    def _rest(self, job: Job) -> None:
        slot = _slot(job)
        with suppress(OSError):  # its pages stay then; it is out of service all the same
            slot.give_up_pages()
        with self._books.lock:
            self._books.schedule.pool.rest(slot)
            self._books.done(job)

    def _check(self, job: Job) -> None:
        stamps = _stamps(job)
        with self._books.lock:
            self._books.schedule.checked(job, stamps, self._books.clock())
            self._books.done(job)

    def _read_ahead(self, job: Job) -> None:
        error: Exception | None = None
        try:
            _stamps(job)
            read_ahead(job.control.files, job.control)
        except (OSError, LoadCancelled) as caught:  # if something is wrong with the files, a load will say it
            error = caught
        with self._books.lock:
            self._books.schedule.warmed(job, self._books.clock(), error)
            self._books.done(job)
        if error is None:
            self._tell("warm", job.draft.name, job.reason, job.begin)


def unload(record: Record, *, unsure: bool = False) -> None:
    """Let go of a draft's weights, whatever its code raises. unsure: it may have none."""
    try:
        if not unsure or record.draft.loaded:
            record.draft.unload()
    except Exception:
        _log.exception("draft %s cannot be unloaded", record.name)


def _stamps(job: Job) -> Stamps:
    """Of the files that a load of the draft reads, which `job.control` knows from then on."""
    job.control.reading = True  # looking at a file waits for the storage too
    try:
        job.control.files = tuple(job.draft.draft.files)
        return stamps_of(job.control.files)
    except Exception as error:  # the load will say what is wrong
        _log.debug("files of draft %s: %s", job.draft.name, error)
        return ()
    finally:
        job.control.reading = False


def _slot(job: Job) -> MemorySlot:
    assert job.slot is not None, "a job without a slot"
    return job.slot
