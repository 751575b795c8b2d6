"""A chat: history, and the KV of earlier turns, which the next turn reuses as far as its tokens agree."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from edgespec.decoding.params import SamplingParams
from edgespec.errors import PromptError
from edgespec.results import GenerationResult, GenerationStats

if TYPE_CHECKING:
    from edgespec.engine import Engine, Messages
    from edgespec.stream import Stream


class Conversation:
    """Made by `Engine.conversation`.

    One answer runs at a time: asking again, or changing the history, ends the one before as if it had been closed.

    messages: [{"role", "content"}] of all finished turns, without the system prompt; may be edited between turns. An
    answer that was cancelled stays in the history as far as it came; after an error the history is as before the turn.
    system: the system prompt, or None for the model's own default. stats: of the last answer.
    """

    def __init__(self, engine: Engine, system: str | None = None, messages: Messages = ()) -> None:
        self._engine = engine
        self._session = engine.session()
        self._lock = threading.RLock()
        self.system = system
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.stats: GenerationStats | None = None
        self._running: weakref.ref[Stream] | None = None  # weak: one that nobody holds any more has ended

    def send(self, text: str, params: SamplingParams | None = None) -> GenerationResult:
        """The whole answer to the user's `text`."""
        stream = self.stream(text, params)
        for _ in stream:
            pass
        return stream.result

    def stream(self, text: str, params: SamplingParams | None = None) -> Stream:
        """The answer to the user's `text`, piece by piece.

        Raises PromptError and ParameterError before any model work.
        """
        with self._lock:
            self._settle()
            return self._answer([*self.messages, {"role": "user", "content": text}], params)

    def regenerate(self, params: SamplingParams | None = None) -> Stream:
        """Another answer to the last question. The old one stays until the new one is over."""
        with self._lock:
            self._settle()
            last = self._last_question()
            if last is None:
                raise PromptError("there is no question to answer again")
            return self._answer(self.messages[: last + 1], params)

    def undo(self) -> None:
        """Take back the last question and its answer; nothing happens if there is none."""
        self._settle()
        last = self._last_question()
        if last is not None:
            del self.messages[last:]

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self._settle()
        self.messages = []

    def close(self) -> None:
        """Release the KV. The conversation can go on; its next turn reads everything anew."""
        self._settle()
        self._session.close()

    def _settle(self) -> None:
        """End the answer that still runs (another thread's: after its round); its turn is kept as far as it came."""
        stream = self._running() if self._running is not None else None
        if stream is not None:
            stream.close()
        self._running = None

    def _last_question(self) -> int | None:
        users = (i for i, message in enumerate(self.messages) if message.get("role") == "user")
        return max(users, default=None)

    def _answer(self, history: list[dict[str, Any]], params: SamplingParams | None) -> Stream:
        began = perf_counter_ns()
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        ids = self._engine.encode([*system, *history])
        stream = self._engine.start(self._session, ids, params, keep=self._keeper(history), began_ns=began)
        self._running = weakref.ref(stream)
        return stream

    def _keeper(self, history: list[dict[str, Any]]) -> Callable[[GenerationResult], None]:
        def keep(result: GenerationResult) -> None:
            self.stats = result.stats
            if result.finish_reason == "cancelled" and not result.text:
                return  # nothing was shown, so there is no turn
            self.messages = [*history, {"role": "assistant", "content": result.text}]

        return keep
