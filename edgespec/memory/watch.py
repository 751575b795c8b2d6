"""A light thread that looks whether the loader hangs and whether memory gets short."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from edgespec.memory.books import Books
from edgespec.memory.jobs import Jobs, Tell
from edgespec.memory.loader import Loader, lower_priority

_log = logging.getLogger(__name__)

_CANCEL_SECONDS = 1.0  # a read that goes on for so long after it was called off hangs


class Watch:
    """Calls `look` every `seconds`, at low priority."""

    def __init__(self, look: Callable[[], None], seconds: float) -> None:
        self._look = look
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgespec-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        lower_priority()
        told = False
        while not self._stop.wait(self._seconds):
            try:
                self._look()
            except Exception:
                if not told:
                    _log.exception("memory and loads cannot be watched")
                told = True


class StallGuard:
    """Gives a job up whose thread hangs, or has ended, so that another thread can take over.

    stall_seconds: that a read may take; hang_seconds: that a load may go on without reading or a checkpoint (building
    a session). retry_seconds: before the first retry of a load that was given up.
    """

    def __init__(
        self,
        books: Books,
        tell: Tell,
        jobs: Jobs,
        loader: Loader,
        *,
        stall_seconds: float,
        hang_seconds: float,
        retry_seconds: float,
    ) -> None:
        self._books = books
        self._tell = tell
        self._jobs = jobs
        self._loader = loader
        self._stall_seconds = stall_seconds
        self._hang_seconds = hang_seconds
        self._retry_seconds = retry_seconds

    def look(self) -> None:
        """Takes the lock."""
        books, alive = self._books, self._loader.running
        with books.lock:
            ended = books.running and not books.closing and not alive
            job = books.job
        if ended:
            self._jobs.mend(job, RuntimeError("the thread that loads drafts has ended"))
            self._loader.start()
        else:
            self._look_for_silence()

    def _look_for_silence(self) -> None:
        books = self._books
        now = books.clock()
        with books.lock:
            job = books.job
            if job is None or job.kind not in ("load", "check", "warm") or books.closing:
                return
            control = job.control
            limit = self._stall_seconds if control.reading else self._hang_seconds
            if control.cancelled and control.reading:
                limit = min(limit, _CANCEL_SECONDS)
            silent = now - control.beat
            if silent <= limit:
                return
            cause = TimeoutError(f"no answer for {silent:.1f} s")
            books.schedule.given_up(job, cause, now, self._retry_seconds)
            books.done(job)
        name = job.draft.name
        _log.warning("draft %s: its load hangs (%s); the text goes on without it", name, cause)
        self._tell("stuck", name, str(cause), job.begin)
        self._loader.start()
