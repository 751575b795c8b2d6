"""A request that was submitted: read its answer, wait for it, or cancel it, from any thread.

Nothing here takes a lock. A signal handler, and a destructor that the collector runs, come between any two steps of a
thread that reads, and must be able to cancel. So what threads share is a flag, or a list of which a single operation
(append, pop, remove) is the whole step.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Real
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar

from edgespec.decoding.params import SamplingParams, wrong
from edgespec.errors import EdgespecError
from edgespec.results import GenerationResult, GenerationStats, TextDelta

Status = Literal["queued", "prefill", "running", "finished", "cancelled", "failed"]

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)
_Error = TypeVar("_Error", bound=BaseException)

_LOOK_SECONDS = 1.0  # between two looks of who waits: whoever was to wake him may have been interrupted (Ctrl-C)


class _Ending(NamedTuple):
    """error: never raised itself, several threads may raise copies of it."""

    status: Status
    result: GenerationResult | None = None
    error: EdgespecError | None = None


class Request:
    """The handle that `Engine.submit` returns. What nobody reads any more goes on to its end; `cancel` it instead.

    Iterating (in several threads or tasks at once, if need be) gives all pieces from the first one on, waiting for the
    next; with `async for` likewise. An answer that was cancelled ends the iteration as a finished one does, one that
    failed raises what failed it. `await request` is `result`, without holding the event loop up. Waiting where it could
    never end, in the thread that answers (callbacks run there) and in a fork, raises EdgespecError.

    id: unique in this process. prompt_tokens: ids in the prompt.
    """

    def __init__(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        began_ns: int,
        deadline: float | None = None,
        wake: Callable[[], None] = lambda: None,
        served_here: Callable[[], bool] = lambda: False,
        keep: object = None,
    ) -> None:
        """ids: a checked prompt. began_ns: `perf_counter_ns()` of the submission. deadline: as `time.monotonic()`.
        wake: called when there is something to do for the loop; takes no lock. served_here: whether this thread is the
        loop's. keep: is not let go of before the request is over."""
        self.id = f"request-{next(_numbers)}"
        self.ids, self.params, self.began_ns, self.deadline = ids, params, began_ns, deadline
        self.prompt_tokens = len(ids)
        self._stage: Status = "queued"  # until it is over
        self._reason: str | None = None
        self._wake, self._served_here, self._keep = wake, served_here, keep
        self._process = os.getpid()
        self._deltas: list[TextDelta] = []
        self._endings: list[_Ending] = []  # the first one counts
        self._listeners: list[Callable[[], None]] = []  # called at each change
        self._callbacks: list[Callable[[Request], None]] = []

    # What anybody may call

    @property
    def status(self) -> Status:
        return self._endings[0].status if self._endings else self._stage

    @property
    def over(self) -> bool:
        return bool(self._endings)

    @property
    def cancel_reason(self) -> str | None:
        """Why it was cancelled ("deadline" if it took too long); None if it was not, or too late."""
        return None if self.status == "finished" else self._reason

    def cancel(self, reason: str = "cancelled") -> None:
        """End the answer at the next batch. Nothing happens if it is over, or was cancelled before.

        May be called from anywhere, a signal handler and a destructor too.
        """
        if not self.over and self._reason is None:
            self._reason = reason
            self._wake()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the whole answer; a cancelled one as far as it came. Raises what failed it.

        timeout: seconds, after which TimeoutError is raised and the answer goes on.
        """
        seconds = _seconds(timeout)
        if not self._wait_for(lambda: self.over, seconds):
            raise TimeoutError(f"{self.id} is not over after {seconds:g} seconds")
        return self._outcome()

    def on_done(self, callback: Callable[[Request], None]) -> None:
        """Call this once when the request is over, from the thread that serves, which it must not hold up.

        What it raises there is logged. If it is over already, the call is made now, in this thread.
        """
        if self.over:
            callback(self)
            return
        self._callbacks.append(callback)
        if self.over:  # meanwhile, and who ended it may have called the others before this one was there
            self._call_back()

    def __iter__(self) -> Iterator[TextDelta]:
        for place in itertools.count():
            self._wait_for(lambda place=place: place < len(self._deltas) or self.over)  # type: ignore[misc]
            if place >= len(self._deltas):
                break
            yield self._deltas[place]
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
        self._may_wait()
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the event loop was closed meanwhile: nobody waits there any more
                loop.call_soon_threadsafe(changed.set)

        with self._listening(tell):
            yield changed

    def _wait_for(self, ready: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait until that is so; False if it is not in that time."""
        if ready():
            return True
        self._may_wait()
        until = time.monotonic() + seconds
        bell: SimpleQueue[None] = SimpleQueue()
        with self._listening(partial(bell.put, None)):
            while not ready():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                with suppress(Empty):
                    bell.get(timeout=min(left, _LOOK_SECONDS))
        return True

    @contextmanager
    def _listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` at each change within this block."""
        try:
            self._listeners.append(listener)
            yield
        finally:
            with suppress(ValueError):
                self._listeners.remove(listener)

    def _may_wait(self) -> None:
        """Raises EdgespecError where whoever waits would wait for ever."""
        if self.over:
            return
        if self._served_here():
            raise EdgespecError(
                f"{self.id} is waited for in the very thread that answers it, where callbacks and watchers run, so it "
                "would never be over: wait in another thread"
            )
        if self._process != os.getpid():
            raise EdgespecError(f"{self.id} is answered by process {self._process}, of which this one is a fork")

    def _outcome(self) -> GenerationResult:
        ending = self._endings[0]
        if ending.error is not None:
            raise _copied(ending.error) from ending.error.__cause__
        assert ending.result is not None
        return ending.result

    # What the serving thread calls

    def become(self, status: Status) -> None:
        """Nothing happens if it is over (the engine was closed meanwhile)."""
        self._stage = status

    def push(self, delta: TextDelta) -> None:
        """The next piece of the answer."""
        self._deltas.append(delta)
        self._tell()

    def end(self, result: GenerationResult) -> None:
        """The answer is over; its last piece was pushed."""
        self._end(_Ending("cancelled" if result.finish_reason == "cancelled" else "finished", result))

    def withdraw(self) -> None:
        """It was cancelled before anything was done for it."""
        self.push(TextDelta("", (), None, 0, "cancelled"))
        stats = GenerationStats(prompt_tokens=self.prompt_tokens)
        logprobs = None if self.params.logprobs is None else ()
        self.end(GenerationResult("", (), "cancelled", self.prompt_tokens, stats, logprobs=logprobs))

    def fail(self, error: BaseException) -> None:
        """Something failed it. What is not meant for the user is wrapped with its cause."""
        self._end(_Ending("failed", error=_lasting(error)))

    def _end(self, ending: _Ending) -> None:
        self._endings.append(ending)
        self._keep = None
        self._tell()
        self._call_back()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()

    def _call_back(self) -> None:
        """Call those that are there, each once, whoever comes first; what they raise is not the fault of others."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread has the last one
                return
            try:
                callback(self)
            except BaseException as error:
                # Not even a sys.exit ends the thread that serves. In others it is meant for them, as Ctrl-C is.
                if not isinstance(error, Exception) and not self._served_here():
                    raise
                _log.exception("what was to be called at the end of %s failed", self.id)


def _seconds(timeout: float | None) -> float:
    """A timeout as a float; None, and what is beyond any float, is for ever."""
    if timeout is None:
        return math.inf
    seconds = math.nan
    if isinstance(timeout, Real):
        try:
            seconds = float(timeout)
        except OverflowError:
            seconds = math.inf if timeout > 0 else 0.0
    if math.isnan(seconds):
        raise wrong("timeout", timeout, "None, or seconds")
    return seconds


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
