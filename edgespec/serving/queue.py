"""Requests that wait for their turn, first come first served."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from edgespec.errors import EdgespecError, QueueFullError
from edgespec.serving.request import Request

_MEMORY = 0.8  # of the mean time from one admission to the next
_LEAST_RETRY, _FIRST_RETRY, _MOST_RETRY = 0.5, 1.0, 60.0  # seconds


class RequestQueue:
    """Any thread puts requests in; the serving thread takes them out, and sleeps here while there is nothing to do.

    `wake` takes no lock, so that signal handlers and destructors may call it (see `request`).

    most: of requests that may wait. clock: seconds. thread: the serving one, which the loop enters. free: how many more
    could run now, so that they need not wait; the loop keeps it up to date.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._lock = threading.RLock()  # a signal handler may submit while its thread does
        self._bell: SimpleQueue[None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self.free = 0
        self._waiting: deque[Request] = deque()
        self._closed = False
        self._last: float | None = None  # when a place became free
        self._interval = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: Request) -> None:
        """Raises QueueFullError, EdgespecError if the queue was closed."""
        with self._lock:
            if self._closed:
                raise EdgespecError("the engine is closed: make a new one with Engine.from_pretrained")
            if len(self._waiting) >= self._most + self.free:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait already, which is all that may (max_queue): "
                    f"try again in {self._retry_after:.1f} s",
                    self._retry_after,
                )
            self._waiting.append(request)
        self.wake()

    @property
    def _retry_after(self) -> float:
        return min(max(self._interval or _FIRST_RETRY, _LEAST_RETRY), _MOST_RETRY)

    def first(self) -> Request | None:
        """The one whose turn it is; it stays."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def take(self, request: Request) -> bool:
        """Take the first one out; False if it is not `request` any more (the queue was closed meanwhile)."""
        with self._lock:
            if not self._waiting or self._waiting[0] is not request:
                return False
            now = self._clock()
            if self._last is not None:
                passed = now - self._last
                self._interval = _MEMORY * (self._interval or passed) + (1 - _MEMORY) * passed
            self._waiting.popleft()
            self._last = now if self._waiting else None  # a queue that was empty says nothing about waiting
            return True

    def withdraw(self, now: float) -> list[Request]:
        """Take out those that were cancelled, or whose deadline is past."""
        with self._lock:
            waiting = list(self._waiting)
        gone = [request for request in waiting if is_due(request, now)]  # outside the lock: a cancel wakes us
        with self._lock:
            gone = [request for request in gone if request in self._waiting]  # else it was closed meanwhile
            for request in gone:
                self._waiting.remove(request)
        return gone

    def wake(self) -> None:
        """End `wait`, or the next one."""
        if self._bell.empty():
            self._bell.put(None)

    def wait(self, timeout: float) -> None:
        """Until something was put in or `wake` was called since the last time, or `timeout` seconds."""
        with suppress(Empty):
            self._bell.get(timeout=timeout)

    def served_here(self) -> bool:
        """Whether this thread is the serving one, which must not wait for what is in here."""
        return threading.current_thread() is self.thread

    def close(self) -> list[Request]:
        """Take nothing more; what waited still."""
        with self._lock:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
        self.wake()
        return left


def is_due(request: Request, now: float) -> bool:
    """Whether it was cancelled; one whose deadline is past (`time.monotonic()`) is cancelled here."""
    if request.deadline is not None and now >= request.deadline:
        request.cancel("deadline")
    return request.cancel_reason is not None
