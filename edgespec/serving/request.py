"""A request that was submitted: read its answer, wait for it, or cancel it, from any thread."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

from edgespec.decoding.params import SamplingParams
from edgespec.errors import EdgespecError
from edgespec.results import GenerationResult, GenerationStats, TextDelta

Status = Literal["queued", "prefill", "running", "finished", "cancelled", "failed"]

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)
_Error = TypeVar("_Error", bound=BaseException)


class Request:
    """The handle that `Engine.submit` returns. What nobody reads any more goes on to its end; `cancel` it instead.

    Iterating (in several threads or tasks at once, if need be) gives all pieces from the first one on, waiting for the
    next; with `async for` likewise. An answer that was cancelled ends the iteration as a finished one does, one that
    failed raises what failed it. `await request` is `result`, without holding the event loop up.

    id: unique in this process. prompt_tokens: ids in the prompt. cancel_reason: why it was cancelled ("deadline" if it
    took too long), None if it was not.
    """

    def __init__(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        began_ns: int,
        deadline_s: float | None = None,
        wake: Callable[[], None] = lambda: None,
        keep: object = None,
    ) -> None:
        """ids: a checked prompt. began_ns: `perf_counter_ns()` of the submission. wake: called when there is something
        to do for the loop. keep: is not let go of before the request is over."""
        self.id = f"request-{next(_numbers)}"
        self.ids, self.params, self.began_ns = ids, params, began_ns
        self.prompt_tokens = len(ids)
        self.deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self.status: Status = "queued"
        self.cancel_reason: str | None = None
        self._wake, self._keep = wake, keep
        # Only ever entered as `with lock`: entering a condition runs Python code, in which Ctrl-C could strike.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._deltas: list[TextDelta] = []
        self._listeners: list[Callable[[], None]] = []  # called at each change, outside the lock
        self._callbacks: list[Callable[[Request], None]] = []
        self._result: GenerationResult | None = None
        self._error: EdgespecError | None = None  # never raised itself: several threads may raise copies of it

    # What anybody may call

    @property
    def over(self) -> bool:
        return self.status in ("finished", "cancelled", "failed")

    def cancel(self, reason: str = "cancelled") -> None:
        """End the answer at the next batch. Nothing happens if it is over, or was cancelled before."""
        with self._lock:
            if self.over or self.cancel_reason is not None:
                return
            self.cancel_reason = reason
        self._wake()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the whole answer; a cancelled one as far as it came. Raises what failed it.

        timeout: seconds, after which TimeoutError is raised and the answer goes on.
        """
        with self._lock:
            if not self._changed.wait_for(lambda: self.over, timeout):
                raise TimeoutError(f"{self.id} is not over after {timeout:g} seconds")
        return self._outcome()

    def on_done(self, callback: Callable[[Request], None]) -> None:
        """Call this once when the request is over, from the thread that serves, which it must not hold up.

        If it is over already, the call is made now, in this thread.
        """
        with self._lock:
            if not self.over:
                self._callbacks.append(callback)
                return
        callback(self)

    def __iter__(self) -> Iterator[TextDelta]:
        for place in itertools.count():
            with self._lock:
                self._changed.wait_for(lambda place=place: place < len(self._deltas) or self.over)  # type: ignore[misc]
                delta = self._deltas[place] if place < len(self._deltas) else None
            if delta is None:
                break
            yield delta
        self._outcome()

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        place, over = 0, False
        with self._alarm() as changed:
            while not over:
                changed.clear()
                over = self.over  # first: no piece comes after it
                while place < len(self._deltas):
                    yield self._deltas[place]
                    place += 1
                if not over:
                    await changed.wait()
        self._outcome()

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self._wait().__await__()

    async def _wait(self) -> GenerationResult:
        with self._alarm() as changed:
            while not self.over:
                changed.clear()
                if not self.over:
                    await changed.wait()
        return self._outcome()

    @contextmanager
    def _alarm(self) -> Iterator[asyncio.Event]:
        """An event of the running event loop that each change sets."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the event loop was closed meanwhile: nobody waits there any more
                loop.call_soon_threadsafe(changed.set)

        with self._lock:
            self._listeners.append(tell)
        try:
            yield changed
        finally:
            with self._lock:
                self._listeners.remove(tell)

    def _outcome(self) -> GenerationResult:
        if self._error is not None:
            raise _copied(self._error) from self._error.__cause__
        assert self._result is not None
        return self._result

    # What the serving thread calls

    def become(self, status: Status) -> None:
        """Nothing happens if it is over (the engine was closed meanwhile)."""
        with self._lock:
            if not self.over:
                self.status = status

    def push(self, delta: TextDelta) -> None:
        """The next piece of the answer."""
        with self._lock:
            self._deltas.append(delta)
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def end(self, result: GenerationResult) -> None:
        """The answer is over; its last piece was pushed."""
        self._end("cancelled" if result.finish_reason == "cancelled" else "finished", result, None)

    def withdraw(self) -> None:
        """It was cancelled before anything was done for it."""
        self.push(TextDelta("", (), None, 0, "cancelled"))
        stats = GenerationStats(prompt_tokens=self.prompt_tokens)
        logprobs = None if self.params.logprobs is None else ()
        self.end(GenerationResult("", (), "cancelled", self.prompt_tokens, stats, logprobs=logprobs))

    def fail(self, error: BaseException) -> None:
        """Something failed it. What is not meant for the user is wrapped with its cause."""
        self._end("failed", None, _lasting(error))

    def _end(self, status: Status, result: GenerationResult | None, error: EdgespecError | None) -> None:
        with self._lock:
            if self.over:
                return
            if status == "finished":
                self.cancel_reason = None  # it was asked for too late
            self._result, self._error, self.status = result, error, status
            self._keep = None
            self._changed.notify_all()
            listeners, callbacks = list(self._listeners), self._callbacks
            self._callbacks = []
        for listener in listeners:
            listener()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _log.exception("what was to be called at the end of %s failed", self.id)


class Where(Exception):
    """The traceback of an error, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _lasting(error: BaseException) -> EdgespecError:
    """The error for the user, without the frames it went through: they hold a whole batch and its sessions."""
    if isinstance(error, EdgespecError):
        lasting = _copied(error)
        lasting.__cause__ = None if error.__cause__ is None else _told(error.__cause__)
        return lasting
    lasting = EdgespecError(f"the request failed: {type(error).__name__}: {error}")
    lasting.__cause__ = _told(error)
    return lasting


def _told(error: BaseException) -> BaseException:
    """An error that is a cause, with its traceback as text."""
    told = _copied(error)
    told.__cause__ = Where("".join(traceback.format_exception(error)))
    return told


def _copied(error: _Error) -> _Error:
    """The same error, never raised yet; where it cannot be copied, one that says the same."""
    with suppress(Exception):
        made = copy.copy(error)
        if type(made) is type(error) and str(made) == str(error):
            return made
    if isinstance(error, EdgespecError):
        return EdgespecError(str(error))  # type: ignore[return-value]
    return RuntimeError(f"{type(error).__name__}: {error}")  # type: ignore[return-value]
