"""An event loop whose time passes only as it is told, and a system on it that serves like an engine would."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from edgespec.bench.load import runner
from edgespec.bench.load.records import Sample
from edgespec.bench.load.system import Arm
from edgespec.decoding.params import SamplingParams
from edgespec.errors import EdgespecError, PromptError, QueueFullError
from edgespec.results import GenerationResult, GenerationStats, TextDelta

END = 0  # the token that ends an answer


class _Selector(selectors.SelectSelector):
    """Waits by moving the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("nothing will ever happen: everything waits")
        self._loop.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its seconds are not ours: waiting takes no time, and gives the same order every time."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


@contextmanager
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Meanwhile `runner.run` uses such loops."""
    with monkeypatch.context() as patch:
        patch.setattr(runner.asyncio, "new_event_loop", VirtualLoop)
        yield


def answer(ids: Sequence[int], most: int) -> tuple[int, ...]:
    """What the fake's target writes to a prompt: it depends on the prompt alone, and may end early."""
    length = 3 + sum(ids) % 7
    written = [1 + (31 * sum(ids) + 17 * place) % 97 for place in range(length)] + [END]
    return tuple(written[:most])


class FakeRequest:
    """A request of `FakeSystem`."""

    def __init__(self, ids: Sequence[int], params: SamplingParams, tokens: tuple[int, ...]) -> None:
        self.ids, self.params, self.tokens = list(ids), params, tokens
        self.status, self.done, self.prefilled = "queued", 0, False
        self.reason: str | None = None
        self.error: Exception | None = None
        self.pieces: asyncio.Queue[TextDelta | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        while (delta := await self.pieces.get()) is not None:
            yield delta
        if self.error is not None:
            raise self.error

    def result(self, timeout: float | None = None) -> GenerationResult:
        if self.error is not None:
            raise self.error
        assert self.status in ("finished", "cancelled"), self.status
        stats = GenerationStats(prompt_tokens=len(self.ids), new_tokens=self.done, proposed_tokens=4, accepted_tokens=2)
        stats.tries_by_position, stats.acceptance_by_position = [2, 2], [1.0, 0.0]
        finish: Any = "cancelled" if self.status == "cancelled" else "stop" if END in self.tokens else "length"
        return GenerationResult("", self.tokens[: self.done], finish, len(self.ids), stats)

    def cancel(self, reason: str = "cancelled") -> None:
        self.reason = self.reason or reason

    def end(self, status: str, error: Exception | None = None) -> None:
        self.status, self.error = status, error
        self.pieces.put_nowait(None)


class FakeSystem:
    """`max_sessions` requests at once; a batch takes `step` seconds with every planner but those of `speeds`.

    faults: request number (in the order of submission) -> what it raises. wrong: numbers whose second token is another
    one. deaf: takes no notice of cancels.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 2,
        step: float = 0.1,
        queue: int = 1000,
        speeds: Mapping[str, int] | None = None,
        faults: Mapping[int, Exception] | None = None,
        wrong: Sequence[int] = (),
        deaf: bool = False,
        context: int = 512,
    ) -> None:
        self.max_sessions, self.step, self.queue, self.context = max_sessions, step, queue, context
        self.speeds, self.faults, self.wrong, self.deaf = dict(speeds or {}), dict(faults or {}), set(wrong), deaf
        self.arm = Arm("none")
        self.used: list[str] = []
        self.numbers = itertools.count()
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.listeners: list[Callable[[Sample], None]] = []
        self.loop: asyncio.Task[None] | None = None
        self.closed = False

    def use(self, arm: Arm) -> None:
        self.arm = arm
        self.used.append(arm.name)

    def alone(self, ids: Sequence[int], params: SamplingParams) -> GenerationResult:
        made = FakeRequest(ids, params, self._text(ids, params))
        made.done, made.status = len(made.tokens), "finished"
        return made.result()

    def _text(self, ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        return answer(ids, params.max_new_tokens)

    def submit(self, prompt: Any, params: SamplingParams, *, deadline_s: float | None = None) -> FakeRequest:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: give some text")
            prompt = [len(word) for word in prompt.split()]
        if not isinstance(prompt, list) or not all(isinstance(t, int) and 0 <= t < 1 << 20 for t in prompt):
            raise PromptError("the prompt is neither text nor token ids")
        if len(prompt) + params.max_new_tokens > self.context:
            raise PromptError(f"{len(prompt)} prompt tokens do not fit")
        if len(self.waiting) >= self.queue:
            raise QueueFullError("the queue is full", retry_after_s=1.0)
        number = next(self.numbers)
        tokens = self._text(prompt, params)
        if number in self.wrong:
            tokens = (tokens[0], 98, *tokens[2:])
        made = FakeRequest(prompt, params, tokens)
        made.error = self.faults.get(number)
        made.until = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s  # type: ignore[attr-defined]
        self.waiting.append(made)
        if self.loop is None or self.loop.done():
            self.loop = asyncio.get_running_loop().create_task(self._serve())
        return made

    async def _serve(self) -> None:
        """One batch after the other, as long as there is something to do."""
        while self.running or self.waiting:
            while self.waiting and len(self.running) < self.max_sessions:
                self.running.append(self.waiting.pop(0))
                self.running[-1].status = "running"
            await asyncio.sleep(self.step)
            for request in [*self.running, *self.waiting]:
                self._step(request)
            emitted = sum(self._emit(request) for request in self.running)
            self._tell(emitted)
            self.running = [request for request in self.running if request.status == "running"]
            self.waiting = [request for request in self.waiting if request.status == "queued"]

    def _step(self, request: FakeRequest) -> None:
        until = request.until  # type: ignore[attr-defined]
        if until is not None and asyncio.get_running_loop().time() > until:
            request.reason = request.reason or "deadline"
        if request.reason is not None and not self.deaf:
            request.end("cancelled")
        elif request.error is not None and request.status == "running":
            request.end("failed", request.error)

    def _emit(self, request: FakeRequest) -> int:
        if request.status != "running":
            return 0
        if not request.prefilled:
            request.prefilled = True
            return 0
        tokens = request.tokens[request.done : request.done + self.speeds.get(self.arm.planner, 1)]
        request.done += len(tokens)
        request.pieces.put_nowait(TextDelta("", tuple(tokens), None, 0))
        if request.done == len(request.tokens):
            request.end("finished")
        return len(tokens)

    def _tell(self, emitted: int) -> None:
        gamma = float(self.speeds.get(self.arm.planner, 1) - 1)
        sequences = len(self.running)
        sample = Sample(
            0.0, self.step, sequences, sequences, len(self.waiting), gamma, 2 * sequences, sequences, emitted,
            1 - sequences / 4, 2, "lend" if self.arm.elastic and self.waiting else "",
        )  # fmt: skip
        for listener in self.listeners:
            listener(sample)

    def watch(self, callback: Callable[[Sample], None]) -> Callable[[], None]:
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)

    def state(self) -> Mapping[str, Any]:
        return {"running": len(self.running), "queued": len(self.waiting), "pool_total": 8, "pool_free": 8}

    def close(self) -> None:
        self.closed = True


def failing(text: str = "the engine has no more memory") -> EdgespecError:
    return EdgespecError(text)
