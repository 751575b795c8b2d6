"""From an `Ask` to the engine and back: submit, hand on what comes, cancel when the client leaves."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.types import Receive

from edgespec.results import GenerationResult, TextDelta
from edgespec.server.errors import ApiError, from_exception, left, timed_out, too_long, unavailable, wrong
from edgespec.server.metrics import Metrics
from edgespec.server.openai import Shape
from edgespec.server.schemas import Ask, sampling_params
from edgespec.server.settings import ServerSettings
from edgespec.server.sse import COMMENT, DONE, event

_log = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_CHAT_TOKENS = 1024  # of an answer whose client set no limit: each reserves room for all it may write
FIRST_PIECE_SECONDS = 5.0  # so long an error can still become a status code
SILENCE_SECONDS = 15.0  # without a piece, after which a comment is sent
CLIENT_LEFT, SHUTDOWN, DEADLINE = "client left", "shutdown", "deadline"


class Answering:
    """All answers of one server.

    engine: as `edgespec.Engine` (encode, submit, context, tokenizer). model: its name. running: answers on their way.
    Template and tokenizer run in two threads of their own: an odd prompt may take them seconds.
    """

    def __init__(self, engine: Any, settings: ServerSettings, model: str, metrics: Metrics) -> None:
        self._engine = engine
        self._settings = settings
        self._model = model
        self._metrics = metrics
        self._longest_token = engine.tokenizer.longest_token  # now: of a large vocabulary it takes a while
        self._threads = ThreadPoolExecutor(2, "edgespec-encode")
        self.running: set[Answer] = set()

    async def begin(self, ask: Ask, receive: Receive) -> Answer:
        """Queue it. Raises ApiError for whatever the engine refuses, before any model work."""
        departure = Departure(receive)
        until = asyncio.get_running_loop().time() + self._settings.limits.request_seconds
        try:
            request = await self._submit(ask, departure, until)
        except BaseException as error:
            departure.close()
            if not isinstance(error, Exception):
                raise
            refused = _named(from_exception(error), ask)
            if refused.status >= 500 and not isinstance(error, ApiError):
                _log.error("a request could not be queued: %s: %s", type(error).__name__, error)
            self._metrics.refused(refused.status)
            raise refused from error
        departure.attach(request)
        shape = Shape(ask.chat, self._model, self._engine.tokenizer, ask.ignored, ask.include_usage)
        answer = Answer(request, departure, shape, self._finished)
        self.running.add(answer)
        return answer

    def cancel_all(self, reason: str) -> None:
        for answer in list(self.running):
            answer.cancel(reason)

    def close(self) -> None:
        self.cancel_all(SHUTDOWN)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _submit(self, ask: Ask, departure: Departure, until: float) -> Any:
        raw = not ask.chat
        if sampling_params({"max_new_tokens": DEFAULT_CHAT_TOKENS, **ask.params}).max_new_tokens < 1:
            raise wrong("max_tokens must be 1 or more", "max_tokens")
        self._refuse_hopeless(ask.prompt)
        clock = asyncio.get_running_loop().time
        try:
            encode = self._in_thread(functools.partial(self._engine.encode, ask.prompt, raw=raw))
            ids = await asyncio.wait_for(encode, until - clock())
        except asyncio.TimeoutError:
            raise timed_out("the time for this request was over before its prompt was read") from None
        params = self._fitted(ask, len(ids))
        if departure.gone:
            raise left()
        seconds = max(until - clock(), 0.001)
        submit = functools.partial(self._engine.submit, ids, params, raw=raw, deadline_s=seconds)
        return await self._in_thread(submit, late=lambda request: request.cancel(SHUTDOWN))

    def _refuse_hopeless(self, prompt: str | list[int] | list[dict[str, str]]) -> None:
        """Refuse, before it takes a thread and memory for seconds, what is too long even in the longest tokens."""
        if isinstance(prompt, list):
            texts = [part["content"] for part in prompt if isinstance(part, dict)]
        else:
            texts = [prompt]
        characters, context = sum(map(len, texts)), self._engine.context
        if characters > context * self._longest_token:
            raise too_long(f"the prompt has {characters} characters; prompt and answer may have {context} tokens")

    def _fitted(self, ask: Ask, prompt_tokens: int) -> Any:
        """The parameters with room for the answer; a prompt that leaves none is refused."""
        limit, context = self._settings.limits.prompt_tokens, self._engine.context
        if limit is not None and prompt_tokens > limit:
            raise too_long(f"the prompt has {prompt_tokens} tokens; this server takes {limit}")
        if prompt_tokens >= context:
            raise too_long(f"the prompt has {prompt_tokens} tokens; prompt and answer together may have {context}")
        room = context - prompt_tokens
        values = {**ask.params, "max_new_tokens": min(ask.params.get("max_new_tokens", DEFAULT_CHAT_TOKENS), room)}
        return sampling_params({**values, "min_new_tokens": min(values.get("min_new_tokens", 0), room)})

    async def _in_thread(self, call: Callable[[], T], late: Callable[[T], object] | None = None) -> T:
        """`call` in a thread. late: what is done with its value when nobody waits for it any more."""
        future = self._threads.submit(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if late is not None:
                future.add_done_callback(lambda done: done.cancelled() or done.exception() or late(done.result()))
            raise

    def _finished(self, answer: Answer, result: GenerationResult | None) -> None:
        self.running.discard(answer)
        self._metrics.finished(result)


class Departure:
    """Notices that a client has left, and cancels its request then."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._request: Any = None
        self._task = asyncio.get_running_loop().create_task(self._watch(receive))

    def attach(self, request: Any) -> None:
        self._request = request
        if self.gone:
            request.cancel(CLIENT_LEFT)

    def close(self) -> None:
        self._task.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._request is not None:
            self._request.cancel(CLIENT_LEFT)


class Answer:
    """One answer on its way."""

    def __init__(
        self,
        request: Any,
        departure: Departure,
        shape: Shape,
        finished: Callable[[Answer, GenerationResult | None], object],
    ) -> None:
        self._request = request
        self._departure = departure
        self._shape = shape
        self._finished: Callable[[Answer, GenerationResult | None], object] | None = finished
        self._result: GenerationResult | None = None
        self._ahead: asyncio.Task[TextDelta | None] | None = None
        self._exhausted = False

    def cancel(self, reason: str) -> None:
        self._request.cancel(reason)

    def close(self) -> None:
        """It is over, one way or another: what still runs is cancelled, and counted."""
        finished, self._finished = self._finished, None
        if finished is None:
            return
        self._departure.close()
        if self._ahead is not None:
            self._ahead.cancel()
        if self._result is None:
            self._request.cancel(CLIENT_LEFT)
        finished(self, self._result)

    async def whole(self) -> dict[str, Any]:
        """The answer in one object. Raises ApiError."""
        try:
            result = await self._outcome()
            return self._shape.whole(result, self._cancelled(result))
        finally:
            self.close()

    async def first(self) -> TextDelta | None:
        """The first piece, if it comes soon; None if it is not there yet, or the answer is empty. Raises ApiError.

        So what fails before a word is said (a deadline in the queue, an engine in trouble) has a status of its own.
        """
        pieces = self._pieces(FIRST_PIECE_SECONDS)
        try:
            async for piece in pieces:
                # A request that ends in the queue has one empty piece that says so; the outcome says why.
                if piece is None or piece.token_ids or piece.finish_reason is None:
                    return piece
            await self._outcome()
            return None
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise from_exception(error) from error
            raise
        finally:
            await pieces.aclose()

    async def frames(self, first: TextDelta | None) -> AsyncGenerator[bytes, None]:
        """Server-sent events, to the last. first: the piece that is there already."""
        shape, offset = self._shape, 0
        if shape.chat:
            yield event(shape.first())
        if first is not None and (first.text or first.logprobs):
            yield event(shape.piece(first))
            offset = shape.length(first)
        try:
            async for piece in self._pieces(SILENCE_SECONDS):
                if piece is None:
                    yield COMMENT
                elif piece.text or piece.logprobs:  # a token without text, such as that of the end, has one too
                    yield event(shape.piece(piece, offset))
                    offset += shape.length(piece)
            result = await self._outcome()
        except Exception as error:
            yield event(from_exception(error).body())
        else:
            yield event(shape.last(result, self._cancelled(result)))
            if shape.include_usage:
                yield event(shape.usage_chunk(result))
        yield DONE

    async def _pieces(self, seconds: float) -> AsyncGenerator[TextDelta | None, None]:
        """What comes; None after each `seconds` without anything. May be left and taken up again."""
        deltas = self._iterator
        while not self._exhausted:
            if self._ahead is None:
                self._ahead = asyncio.ensure_future(_next(deltas))
            done, _pending = await asyncio.wait({self._ahead}, timeout=seconds)
            if not done:
                yield None
                continue
            task, self._ahead = self._ahead, None
            piece = task.result()
            if piece is None:
                self._exhausted = True
                return
            yield piece

    @functools.cached_property
    def _iterator(self) -> AsyncIterator[TextDelta]:
        iterator: AsyncIterator[TextDelta] = self._request.__aiter__()
        return iterator

    async def _outcome(self) -> GenerationResult:
        """The result. Raises ApiError if there is nothing to show: it failed, or ended before the first token."""
        if self._result is not None:
            return self._result
        try:
            result: GenerationResult = await self._request
        except Exception as error:
            refused = from_exception(error)
            if refused.status >= 500:
                _log.error("a request failed: %s", error, exc_info=error.__cause__)
            raise refused from error
        self._result = result
        if result.finish_reason == "cancelled" and not result.token_ids:
            reason = self._cancelled(result)
            if reason == DEADLINE:
                raise timed_out("the time for this request was over before its first token")
            if reason == SHUTDOWN:
                raise unavailable("the server is ending", 5)
            raise ApiError(499, f"the request was cancelled: {reason}", kind="server_error", code="cancelled")
        return result

    def _cancelled(self, result: GenerationResult) -> str | None:
        if result.finish_reason != "cancelled":
            return None
        return getattr(self._request, "cancel_reason", None) or "cancelled"


async def _next(deltas: AsyncIterator[TextDelta]) -> TextDelta | None:
    """The next piece, None at the end."""
    try:
        return await deltas.__anext__()
    except StopAsyncIteration:
        return None


def _named(error: ApiError, ask: Ask) -> ApiError:
    if error.param == "messages":
        error.param = ask.prompt_field
    return error
