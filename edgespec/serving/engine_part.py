"""The part of the engine that takes many requests at once: what `Engine` inherits."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Any, overload

from edgespec.decoding.params import SamplingParams, wrong
from edgespec.decoding.round import Generation
from edgespec.errors import EdgespecError, ParameterError, QueueFullError
from edgespec.results import GenerationResult, TextDelta
from edgespec.serving.loop import Watcher
from edgespec.serving.records import ServingStats
from edgespec.serving.request import Request
from predictor.planner import FixedPlanner

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig
    from edgespec.decoding.session import Session
    from edgespec.serving.host import ServingHost
    from edgespec.stream import Stream
    from predictor.planner import Planner

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_RETRY_SECONDS = 5.0  # at most, between two looks whether the queue takes the next of many prompts


class ServesMany:
    """`submit` and what goes with it. Serving begins with the first request, or with `start_serving`."""

    config: RuntimeConfig
    _closed: bool

    # What the engine has

    if TYPE_CHECKING:

        def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]: ...
        def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False) -> Stream: ...
        def _session(self, planner: Planner) -> Session: ...

    def _init_serving(self) -> None:
        self._host: ServingHost | None = None
        self._starting = threading.Lock()
        self._watchers: tuple[Watcher, ...] = ()
        self._load_policy = self.config.load_policy
        self._process = os.getpid()

    @property
    def load_policy(self) -> str:
        """What decides how many tokens each of several requests drafts. May be changed at any time."""
        return self._load_policy

    @load_policy.setter
    def load_policy(self, value: str) -> None:
        value = self.config.replace(load_policy=value).load_policy
        with self._starting:
            if self._host is not None:
                self._host.use(value)
            self._load_policy = value

    @property
    def serving(self) -> ServingStats | None:
        """Counters of the serving loop; None before the first request. Never waits."""
        host = self._host
        return None if host is None else host.stats()

    def watch(self, callback: Watcher) -> Callable[[], None]:
        """Call this after every batch, in the serving thread, which it must not hold up. Returns what ends it."""
        with self._starting:
            self._watchers = (*self._watchers, callback)
            if self._host is not None:
                self._host.loop.watchers = self._watchers

        def end() -> None:
            with self._starting:
                self._watchers = tuple(watcher for watcher in self._watchers if watcher is not callback)
                if self._host is not None:
                    self._host.loop.watchers = self._watchers

        return end

    def start_serving(self) -> None:
        """Make what several requests at once need, unless it is there; else the first `submit` does.

        Raises MemoryBudgetError if it does not fit, with the numbers; ConfigError for a load policy that cannot work.
        """
        self._serving_now()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        deadline_s: float | None = None,
    ) -> Request:
        """Queue a request; it is answered together with others, by a thread of the engine. prompt: as in `stream`.

        deadline_s: seconds from now after which it is cancelled with what it has. Raises PromptError and ParameterError
        before anything is queued, RequestTooLong if it could never fit, QueueFullError if too many wait.
        """
        began, deadline = perf_counter_ns(), _deadline(deadline_s)
        host = self._serving_now()
        ids, params = self._checked(self.encode(prompt, raw=raw), params)
        host.check(ids, params)
        queue = host.queue
        request = Request(
            ids, params, began_ns=began, deadline=deadline, wake=queue.wake, served_here=queue.served_here, keep=self
        )
        queue.put(request)
        return request

    @overload  # a text is a sequence of texts as well
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        on_delta: Callable[[TextDelta], None] | None = None,
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        on_delta: Callable[[TextDelta], None] | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """The whole answer. `on_delta` is called with each piece; what it raises ends the answer and is passed on.

        prompt: as in `stream`, or a list of such prompts, which are answered together, in order: texts, lists of ids,
        or lists of messages. params is then one for all, or a list with one for each. All are checked before anything
        runs; if one fails, the others are cancelled and its error is raised. Not to be called in
        callbacks and watchers, which run in the thread that answers.
        """
        if _is_many(prompt):
            if on_delta is not None:
                raise ParameterError("on_delta is for a single prompt: with several use submit.")
            return self._generate_many(prompt, params, raw)
        if params is not None and not isinstance(params, SamplingParams):
            raise ParameterError("a single prompt takes a single SamplingParams.")
        stream = self.stream(prompt, params, raw=raw)
        try:
            for delta in stream:
                if on_delta is not None:
                    on_delta(delta)
            return stream.result
        finally:
            stream.close()

    def _generate_many(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None, raw: bool
    ) -> list[GenerationResult]:
        host = self._serving_now()
        if host.queue.served_here():
            raise EdgespecError(
                "generate with several prompts waits for the thread that answers them, and was called in "
                "that very thread, where callbacks and watchers run: use submit there, or another thread"
            )
        each = [params] * len(prompts) if isinstance(params, SamplingParams | None) else params
        if not isinstance(each, Sequence):
            raise ParameterError(f"params is {params!r}; allowed: a SamplingParams, or one for each prompt.")
        if len(each) != len(prompts):
            raise ParameterError(f"{len(prompts)} prompts came with {len(each)} SamplingParams; give as many, or one.")
        asked = [self._checked(self.encode(p, raw=raw), one) for p, one in zip(prompts, each)]
        for ids, one in asked:
            host.check(ids, one)
        requests: list[Request] = []
        try:
            for ids, one in asked:
                requests.append(self._submit_when_possible(ids, one, requests))
            return [request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel("another of the prompts failed")

    def _submit_when_possible(self, ids: list[int], params: SamplingParams, before: Sequence[Request]) -> Request:
        """Submit, after waiting for a place in the queue where our own requests (or those of others) fill it."""
        while True:
            try:
                return self.submit(ids, params)
            except QueueFullError as error:
                pending = next((request for request in before if not request.over), None)
                if pending is None:
                    threading.Event().wait(min(error.retry_after_s, _RETRY_SECONDS))
                    continue
                try:
                    pending.result(_RETRY_SECONDS)
                except TimeoutError:
                    continue

    def _checked(self, ids: Any, params: SamplingParams | None) -> tuple[list[int], SamplingParams]:
        """As a generation would check them, which is not kept: it has tables as long as the vocabulary."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"params is {params!r}; allowed: a SamplingParams, or None.")
        generation = Generation(self._session(FixedPlanner(None, 0)), ids, params)
        return generation.prompt, params

    def _check_process(self) -> None:
        """Raises EdgespecError in a fork of the process that made the engine, whose threads are not here."""
        if self._process != os.getpid():
            raise EdgespecError(
                f"this process is a fork of process {self._process}, which has the engine and its threads: make an "
                "engine in each process, or start processes by spawn"
            )

    def _serving_now(self) -> ServingHost:
        from edgespec.serving.host import ServingHost

        self._check_process()
        host = self._host
        if host is not None and not self._closed:
            return host  # without the lock, which a signal handler cannot take while its thread has it
        with self._starting:
            if self._closed:
                raise EdgespecError("the engine is closed: make a new one with Engine.from_pretrained")
            if self._host is None:
                self._host = ServingHost(
                    weakref.ref(self),  # type: ignore[arg-type]
                    self.config,
                    self._load_policy,
                    self._watchers,
                )
            return self._host

    def _close_serving(self) -> None:
        with self._starting:
            host = self._host
        if host is not None:
            host.close()


def _deadline(seconds: float | None) -> float | None:
    """So many seconds from now, as `time.monotonic()`. Raises ParameterError."""
    if seconds is None:
        return None
    if isinstance(seconds, Real) and not isinstance(seconds, bool) and seconds > 0:
        with suppress(OverflowError):  # of a whole number beyond any float
            return monotonic() + float(seconds)
    raise wrong("deadline_s", seconds, "None, or seconds above 0")


def _is_many(prompt: Any) -> bool:
    """Whether this is a list of prompts: texts, lists of ids, lists of messages. (An empty list is an empty prompt.)"""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes, bytearray))
        and len(prompt) > 0
        and isinstance(prompt[0], Sequence)
    )
