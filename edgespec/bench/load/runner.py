"""Puts requests on a system and notes what comes back: an open loop, whose arrivals do not wait for answers, and a
closed one. Both run on one asyncio loop, whose clock is the only clock: tests give it another one."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psutil

from edgespec.bench.load.records import Ask, Sample, Served, Stretch
from edgespec.bench.load.system import Handle, System
from edgespec.decoding.params import SamplingParams
from edgespec.errors import EdgespecError, QueueFullError

GRACE_S = 30.0  # for requests to end after they were cancelled; one that takes longer is stuck
_LOOK_S = 1.0  # between two looks at the memory

Params = Callable[[Ask], SamplingParams]


class Stuck(EdgespecError):
    """Requests did not end although they were cancelled."""


def greedy(ask: Ask) -> SamplingParams:
    """As the model ends it, at most as many tokens as the request says."""
    return SamplingParams(max_new_tokens=ask.new)


def to_the_limit(ask: Ask) -> SamplingParams:
    """Exactly as many tokens as the request says."""
    return SamplingParams(max_new_tokens=ask.new, ignore_eos=True)


def run(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> bool:
    """Run `work` with an event that Ctrl-C sets; True if it was set. A second Ctrl-C is KeyboardInterrupt."""
    loop = asyncio.new_event_loop()
    try:
        stop = asyncio.Event()
        with _interruptible(loop, stop):
            loop.run_until_complete(work(stop))
        return stop.is_set()
    finally:
        loop.close()


def measure(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]], stretch: Stretch) -> None:
    """Run `work`, which fills `stretch`. Where it gets stuck, the stretch says so, and keeps what there is."""
    try:
        run(work)
    except Stuck as error:
        stretch.interrupted, stretch.stuck = True, str(error)


@contextmanager
def _interruptible(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt() -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def open_loop(
    system: System, asks: Sequence[Ask], stretch: Stretch, stop: asyncio.Event, *, limit_s: float, params: Params
) -> None:
    """Make each request at its time, whatever the others do, until all have ended, time is up, or `stop` is set.

    What has not ended then is cancelled and stays "unfinished". Everything goes into `stretch`. Raises Stuck.
    """
    client = Client(system, stretch, params)
    async with client.watched():
        tasks = [asyncio.create_task(client.serve(ask)) for ask in asks]
        ended = await _all_or(tasks, stop, limit_s)
        stretch.interrupted = stop.is_set() and not ended
        await client.end(tasks)


async def closed_loop(
    system: System,
    asks: Iterator[Ask],
    stretch: Stretch,
    stop: asyncio.Event,
    *,
    sessions: int,
    limit_s: float,
    params: Params,
) -> None:
    """`sessions` clients, each of which makes its next request when its last one has ended, for `stretch.seconds`.

    What runs then may end until `limit_s` have passed since the beginning. Raises Stuck.
    """
    client = Client(system, stretch, params)

    async def session(number: int) -> None:
        while client.now() < stretch.seconds:
            ask = next(asks)._replace(at=client.now())
            await client.serve(ask, session=number)
            if client.served[ask.number].outcome != "finished":
                await asyncio.sleep(0.1)  # a refused one is not asked again at once

    async with client.watched():
        tasks = [asyncio.create_task(session(number)) for number in range(sessions)]
        ended = await _all_or(tasks, stop, limit_s)
        stretch.interrupted = stop.is_set() and not ended
        await client.end(tasks)


async def _all_or(tasks: Sequence[asyncio.Task[None]], stop: asyncio.Event, limit_s: float) -> bool:
    """Wait for all tasks, `stop` or the limit; whether all have ended. An unexpected error of a task comes out here."""
    stopped = asyncio.create_task(stop.wait())
    every: asyncio.Future[Any] = asyncio.gather(*tasks)
    try:
        await asyncio.wait({every, stopped}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if every.done():
            every.result()
        return every.done()
    finally:
        stopped.cancel()
        if not every.done():
            every.add_done_callback(_retrieved)


def _retrieved(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # the tasks are looked at one by one


class Client:
    """The requests of one stretch: hands them over, and notes when what came."""

    def __init__(self, system: System, stretch: Stretch, params: Params = greedy) -> None:
        self._system, self._stretch, self._params = system, stretch, params
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time()
        self._running: dict[int, Handle] = {}
        self._over = False
        self.served: dict[int, Served] = {}

    def now(self) -> float:
        """Seconds since the beginning of the stretch."""
        return self._loop.time() - self._begin

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Meanwhile, batches and memory are noted in the stretch."""
        samples, begin, clock = self._stretch.samples, self._begin, self._loop.time

        def note(sample: Sample) -> None:  # in the serving thread
            samples.append(sample._replace(time=clock() - begin))

        unwatch = self._system.watch(note)
        look = asyncio.create_task(self._memory())
        try:
            yield
        finally:
            unwatch()
            look.cancel()
            self._stretch.ended = self.now()
            self._stretch.served = list(self.served.values())

    async def _memory(self) -> None:
        process = psutil.Process()
        while True:
            self._stretch.rss.append((round(self.now(), 3), process.memory_info().rss))
            await asyncio.sleep(_LOOK_S)

    async def serve(self, ask: Ask, session: int | None = None) -> None:
        """Wait for its time, make the request, and read its answer to the end."""
        served = Served(ask.number, ask.name, ask.at, len(ask.ids), session=session)
        self.served[ask.number] = served
        await asyncio.sleep(ask.at - self.now())
        if self._over:
            return
        served.submitted = self.now()
        try:
            handle = self._running[ask.number] = self._system.submit(list(ask.ids), self._params(ask))
            await self._read(handle, served)
        except Exception as error:  # whatever a request raises is its own failure, and no time
            served.outcome = "refused" if isinstance(error, QueueFullError) else "failed"
            served.error = f"{type(error).__name__}: {error}"
            served.finished = self.now()
        finally:
            self._running.pop(ask.number, None)

    async def _read(self, handle: Handle, served: Served) -> None:
        ids: list[int] = []
        async for delta in handle:
            if delta.token_ids:
                served.pieces.append((self.now(), len(delta.token_ids)))
                ids += delta.token_ids
                served.ids = tuple(ids)
        result = handle.result(GRACE_S)
        served.finished, served.finish_reason = self.now(), result.finish_reason
        if tuple(result.token_ids) != served.ids:
            raise EdgespecError("the pieces that came are not the tokens of the result")
        served.outcome = "unfinished" if result.finish_reason == "cancelled" else "finished"
        stats = result.stats
        served.reused_tokens = stats.reused_tokens
        served.proposed, served.accepted = stats.proposed_tokens, stats.accepted_tokens
        served.reached = tuple(stats.tries_by_position)
        served.stood = tuple(
            round(share * tries) for share, tries in zip(stats.acceptance_by_position, stats.tries_by_position)
        )
        served.drafts = dict(stats.draft_share)

    async def end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel what still runs, and wait until it has ended. Raises Stuck, naming what has not."""
        self._over = True
        for handle in list(self._running.values()):
            handle.cancel("the bench ended")
        until = self.now() + GRACE_S
        while self._running and self.now() < until:
            await asyncio.sleep(0.02)
        stuck = [f"{number} ({handle.status})" for number, handle in self._running.items()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if stuck:
            raise Stuck(f"requests {', '.join(stuck)} did not end within {GRACE_S:g} s after they were cancelled")
