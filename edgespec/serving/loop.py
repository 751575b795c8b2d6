"""The serving loop: one thread that owns the rounds of all requests that were submitted."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakSet

from edgespec.errors import EdgespecError
from edgespec.models.kv.blocks import NoRoom
from edgespec.serving.active import Active
from edgespec.serving.batch import BatchRunner, Situation
from edgespec.serving.queue import RequestQueue, is_due
from edgespec.serving.records import BatchRecord, Totals
from edgespec.serving.request import Request

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_MOST_TOLD = 8
_IDLE_SECONDS = 0.5  # between two looks whether the engine is still there, and at deadlines of those that wait


Watcher = Callable[[BatchRecord], None]


class Host(Protocol):
    """What the loop needs of the engine. Called by the serving thread only."""

    def gone(self) -> bool:
        """Whether nobody wants the engine any more."""

    def admit(self, request: Request) -> Active:
        """Make room for a request and open its answer.

        Raises NoRoom if it has to wait (while nothing runs, that fails it too); anything else fails it.
        """

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

    The thread is ours, so Ctrl-C never comes here, and a `sys.exit` in somebody's callback must not end it: wherever
    something is caught so that the others go on, it is BaseException.
    """

    def __init__(
        self, host: Host, runner: BatchRunner, queue: RequestQueue, most: int, *, watchers: Sequence[Watcher] = ()
    ) -> None:
        self._host, self._runner, self._queue, self._most = host, runner, queue, most
        self.actives: list[Active] = []
        queue.free = most
        self.totals = Totals()
        self.watchers = tuple(watchers)
        self._closing = False
        self._blocked = False
        self._told: set[str] = set()  # what failed beside the batches, and is in the log
        self._thread = queue.thread = threading.Thread(target=self._run, name="edgespec-serving", daemon=True)
        self._thread.start()
        _open.add(self)

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
        request.fail(_closed())

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
                        self._aside(self._host.idle, None)
        except BaseException:
            _log.exception("the serving loop failed")
        finally:
            self._closing = True
            for last in (self._end_all, self._runner.close, self._host.ended):
                self._aside(last, None)

    def _end_all(self) -> None:
        for request in self._queue.close():
            self._fail(request)
        for active in self.actives:
            active.fail(_closed())
        self._leave()

    def _aside(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Something that no answer needs: whatever it raises, the answers go on. Each such call is logged once."""
        try:
            return call()
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            if what not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(what)
                _log.exception("something beside the batches failed; they go on")
            return otherwise

    def _guarded(self) -> None:
        """One iteration; what goes wrong between the requests' own parts fails those that run, and the next work."""
        try:
            self._iterate()
        except BaseException as error:
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
        record = replace(record, queued=len(self._queue))
        record = self._aside(partial(self._host.after, record, blocked=self._blocked), record)
        self.totals.batch(record, first_tokens)
        for watcher in self.watchers:
            self._aside(partial(watcher, record), None)

    def _admit(self) -> None:
        """Take in those whose turn it is, as long as there is room."""
        self._blocked = False
        while len(self.actives) < self._most:
            request = self._queue.first()
            if request is None:
                return
            try:
                active = self._host.admit(request)
            except BaseException as error:
                if isinstance(error, NoRoom) and self.actives:
                    self._blocked = True  # until those that run make room; nobody overtakes
                    self._queue.free = 0
                    return
                if self._queue.take(request):
                    self.totals.failed += 1
                    request.fail(error)
                continue
            if not self._queue.take(request):  # `close` has taken and failed it meanwhile
                active.fail(_closed())
                continue
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
        self._queue.free = self._most - len(self.actives)


def _closed() -> EdgespecError:
    return EdgespecError("the engine was closed before the answer was complete")


_open: WeakSet[ServingLoop] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that the interpreter ends inside ONNX Runtime takes the process down with an abort."""
    with ExitStack() as stack:
        for loop in list(_open):
            stack.callback(loop.close)
