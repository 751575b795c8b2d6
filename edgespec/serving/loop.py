"""The serving loop: one thread that owns the rounds of all requests that were submitted."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol
from weakref import WeakSet

from edgespec.errors import EdgespecError
from edgespec.memory.kv_blocks import NoRoom
from edgespec.serving.active import Active
from edgespec.serving.batch import BatchRunner, Situation
from edgespec.serving.queue import RequestQueue, is_due
from edgespec.serving.records import BatchRecord, Totals
from edgespec.serving.request import Request

_log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.5  # between two looks whether the engine is still there, and at deadlines of those that wait


Watcher = Callable[[BatchRecord], None]


class Host(Protocol):
    """What the loop needs of the engine. Called by the serving thread only."""

    def gone(self) -> bool:
        """Whether nobody wants the engine any more."""

    def admit(self, request: Request) -> Active:
        """Make room for a request and open its answer. Raises NoRoom if it has to wait; anything else fails it."""

    def situation(self, queued: int) -> Situation:
        """What the next batch has to know."""

    def after(self, record: BatchRecord, *, blocked: bool) -> BatchRecord:
        """A batch is over: look after memory; the record with what the engine has to add.

        blocked: the first of those that wait lacks room for its keys and values.
        """

    def idle(self) -> None:
        """Nothing runs: look after memory."""

    def ended(self) -> None:
        """The loop has ended, and nothing runs any more."""


class ServingLoop:
    """Runs what is in `queue`, at most `most` requests at once, in the order in which they came.

    One iteration is one batch: requests that were cancelled leave, others are admitted while there is room, each that
    runs gets one round, those whose prompt is not read yet share what is left (see `BatchRunner`).
    """

    def __init__(
        self, host: Host, runner: BatchRunner, queue: RequestQueue, most: int, *, watchers: Sequence[Watcher] = ()
    ) -> None:
        self._host, self._runner, self._queue, self._most = host, runner, queue, most
        self.actives: list[Active] = []
        self.totals = Totals()
        self.watchers = tuple(watchers)
        self._closing = False
        self._blocked = False
        self._thread = threading.Thread(target=self._run, name="edgespec-serving", daemon=True)
        _open.add(self)
        self._thread.start()

    def close(self) -> None:
        """Fail what waits and what runs, after the batch that is being made, and end the thread. Idempotent."""
        self._closing = True
        for request in self._queue.close():
            self._fail(request)
        if threading.current_thread() is not self._thread:  # it is, where a callback of a request closes the engine
            self._thread.join()
        _open.discard(self)

    def _fail(self, request: Request) -> None:
        self.totals.failed += 1
        request.fail(EdgespecError("the engine was closed before the answer was complete"))

    def _run(self) -> None:
        try:
            while not self._closing:
                if self.actives or len(self._queue):
                    self._guarded()
                else:
                    self._queue.wait(_IDLE_SECONDS)
                    if self._host.gone():
                        break
                    if not len(self._queue):
                        self._host.idle()
        except BaseException:
            _log.exception("the serving loop failed")
        finally:
            self._closing = True
            for request in self._queue.close():
                self._fail(request)
            for active in self.actives:
                active.fail(EdgespecError("the engine was closed before the answer was complete"))
            self._leave()
            self._runner.close()
            self._host.ended()

    def _guarded(self) -> None:
        """One iteration; what goes wrong between the requests' own parts fails those that run, and the next work."""
        try:
            self._iterate()
        except Exception as error:
            _log.exception("a batch failed")
            for active in self.actives:
                active.fail(error)
            self._leave()

    def _iterate(self) -> None:
        now = time.monotonic()
        for request in self._queue.withdraw(now):
            self.totals.cancelled += 1
            request.withdraw()
        for active in self.actives:
            if is_due(active.request, now):
                active.generation.cancel()
                active.deliver()
        self._leave()
        self._admit()
        if not self.actives:
            return
        record = self._runner.run(self.actives, self._host.situation(len(self._queue)))
        for active in self.actives:
            active.deliver()
        first_tokens = 0
        for active in self.actives:
            first_tokens, active.first_tokens = first_tokens + active.first_tokens, 0
        self._leave()
        record = self._host.after(replace(record, queued=len(self._queue)), blocked=self._blocked)
        self.totals.batch(record, first_tokens)
        for watcher in self.watchers:
            try:
                watcher(record)
            except Exception:
                _log.exception("who watches the batches failed")

    def _admit(self) -> None:
        """Take in those whose turn it is, as long as there is room."""
        self._blocked = False
        while len(self.actives) < self._most:
            request = self._queue.first()
            if request is None:
                return
            try:
                active = self._host.admit(request)
            except Exception as error:
                if isinstance(error, NoRoom) and self.actives:
                    self._blocked = True  # until those that run make room; nobody overtakes
                    return
                self._queue.take()
                self.totals.failed += 1
                request.fail(error)
                continue
            self._queue.take()
            self.actives.append(active)
            active.deliver()  # one of no tokens is over before it begins
            self._leave()

    def _leave(self) -> None:
        """Those that are over make room."""
        for active in self.actives:
            if active.over:
                status = active.request.status
                self.totals.finished += status == "finished"
                self.totals.failed += status == "failed"
                self.totals.cancelled += status == "cancelled"
        self.actives = [active for active in self.actives if not active.over]


_open: WeakSet[ServingLoop] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that the interpreter ends inside ONNX Runtime takes the process down with an abort."""
    with ExitStack() as stack:
        for loop in list(_open):
            stack.callback(loop.close)
