"""The background thread that loads drafts, and what it hands to a load: chunked, rate-limited, cancellable reads."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from drafts.base import LoadCancelled
from edgespec.errors import DraftError

_log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 10  # 2.5 ms at the 100 MB/s of a slow card: cancelled, and cut up for others, soon enough
_NICE = 10  # a tenth of a core beside a decoder that wants all: rounds hardly feel a load (docs/results.md)

Clock = Callable[[], float]
Job = Callable[[], None]


class RateLimit:
    """At most `rate` bytes a second (None: no limit), over all loads that share it. Used by one thread at a time."""

    def __init__(self, rate: float | None, clock: Clock = time.perf_counter) -> None:
        if rate is not None and not rate > 0:
            raise ValueError(f"a rate of {rate} bytes per second")
        self.rate = rate
        self._clock = clock
        self._due = 0.0

    def pay(self, nbytes: int, began: float) -> float:
        """Seconds to rest after reading `nbytes`, a read that began at `began`. What was not read is not saved up."""
        if self.rate is None:
            return 0.0
        self._due = max(self._due, began) + nbytes / self.rate
        return max(0.0, self._due - self._clock())


class Control:
    """The loader's side of one load (`drafts.base.LoadControl`).

    files: those that the load may read, to name one that is too short; may be set later. drop_cache: give the pages of
    what was read back to the system at once, where they would compete with the weights. beat: when it last moved. Any
    thread may `cancel`.
    """

    def __init__(
        self,
        files: Sequence[Path] = (),
        limit: RateLimit | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        drop_cache: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.files = tuple(files)
        self._limit = limit or RateLimit(None)
        self._chunk = chunk_bytes
        self._drop_cache = drop_cache and hasattr(os, "posix_fadvise")
        self._clock = clock
        self._cancelled = threading.Event()
        self.bytes_read = 0
        self.reading = False
        self.beat = clock()

    def cancel(self) -> None:
        """The load ends at its next checkpoint, at once if it rests."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def checkpoint(self) -> None:
        """Raise LoadCancelled if the load was called off."""
        self.beat = self._clock()
        if self._cancelled.is_set():
            raise LoadCancelled

    def read(self, fd: int, into: memoryview, offset: int) -> None:
        """Fill `into` from position `offset` of the open file `fd`.

        Raises DraftError if the file ends before that, OSError if it cannot be read, LoadCancelled.
        """
        view = into.cast("B") if into.format != "B" or into.ndim != 1 else into
        done = 0
        while done < len(view):
            self.checkpoint()
            began = self.beat
            self.reading = True
            try:
                count = _read_at(fd, view[done : done + self._chunk], offset + done)
            finally:
                self.reading = False
                self.beat = self._clock()
            if count == 0:
                raise self._short(fd, offset + len(view))
            if self._drop_cache:
                os.posix_fadvise(fd, offset + done, count, os.POSIX_FADV_DONTNEED)
            done += count
            self.bytes_read += count
            self._rest(self._limit.pay(count, began))
        self.checkpoint()

    def _rest(self, seconds: float) -> None:
        """Wait that long, or until the load is called off."""
        if seconds > 0:
            self._cancelled.wait(seconds)

    def _short(self, fd: int, expected: int) -> DraftError:
        found = os.fstat(fd).st_size
        return DraftError(
            f"{self._name(fd)}: is incomplete, {expected} bytes are expected but it has {found}; fetch it again."
        )

    def _name(self, fd: int) -> str:
        status = os.fstat(fd)
        for file in self.files:
            with suppress(OSError):
                if os.path.samestat(status, file.stat()):
                    return str(file)
        with suppress(OSError):
            return os.readlink(f"/proc/self/fd/{fd}")
        return " or ".join(map(str, self.files)) or "a file of the draft"


def read_ahead(files: Sequence[Path], control: Control, *, step: int = 2 << 20) -> None:
    """Ask the system to read the files into its page cache, in steps between which `control` may call it off.

    Raises OSError for a file that is not there, LoadCancelled.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        control.checkpoint()
        control.reading = True  # opening waits for the storage too
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                for offset in range(0, os.fstat(fd).st_size, step):
                    control.checkpoint()
                    os.posix_fadvise(fd, offset, step, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)
        finally:
            control.reading = False


class Loader:
    """One thread at low priority that runs the jobs that `take` gives it, until `take` gives None.

    take: waits for work; called by the loader's threads only. A thread that is stuck in a job can be replaced: it ends
    when its job does, which it must then finish as one that nobody waits for.
    """

    def __init__(self, take: Callable[[], Job | None], *, name: str = "edgespec-loader") -> None:
        self._take = take
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, or another one in its place if there is one."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread = thread
        thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; whether it has (a thread that joins itself has not)."""
        thread = self._thread
        if thread is None or not thread.is_alive():  # one that could not be started cannot be joined
            return True
        if thread is not threading.current_thread():
            thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        lower_priority()
        me = threading.current_thread()
        while self._thread is me:
            job = self._take()
            if job is None:
                return
            job()


_told: set[str] = set()


def lower_priority(nice: int = _NICE) -> None:
    """Let every other thread go before this one. Where that cannot be had, one warning a process."""
    problem = "only Linux gives threads a priority of their own"
    if sys.platform.startswith("linux"):
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            return
        except OSError as error:
            problem = error.strerror or str(error)
    if problem not in _told:
        _told.add(problem)
        _log.warning("drafts load at the priority of decoding: %s", problem)


def _read_at(fd: int, into: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    data = os.pread(fd, len(into), offset)
    into[: len(data)] = data
    return len(data)
