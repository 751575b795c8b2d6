"""An engine that follows a script, with the surface that the server uses, and the real handles (`serving.Request`).

Nothing happens by time: each answer says its pieces at once, unless the script has a gate that a test opens.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from edgespec.decoding.params import SamplingParams
from edgespec.engine import DraftInfo
from edgespec.errors import ParameterError, PromptError, QueueFullError
from edgespec.memory.states import DraftState, State
from edgespec.results import GenerationResult, GenerationStats, TextDelta, TokenLogprob
from edgespec.serving.records import BatchRecord, ServingStats
from edgespec.serving.request import Request

CONTEXT = 512


@dataclass
class Script:
    """What the engine answers. pieces: texts, or an exception to fail with there. gate: waited for before each piece
    (`threading.Semaphore`), None = none. finish: how it ends. encode_error, submit_error: raised there.
    hidden: the piece whose tokens have no text.
    """

    pieces: list[Any] = field(default_factory=lambda: ["Hello", " there", "."])
    gate: threading.Semaphore | None = None
    finish: Any = "stop"
    encode_error: BaseException | None = None
    submit_error: BaseException | None = None
    hidden: str | None = None


class FakeTokenizer:
    """A token is a character."""

    longest_token = 1

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    def token_bytes(self, token_id: int) -> bytes | None:
        return b"\xe2\x82" if token_id == 0x20AC else chr(token_id).encode()


class FakeEngine:
    """submitted: (ids, params, raw, deadline) of each request, in order; requests: their handles."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.config = SimpleNamespace(model="tiny")
        self.context = CONTEXT
        self.tokenizer: Any = FakeTokenizer()
        self.submitted: list[SimpleNamespace] = []
        self.requests: list[Request] = []
        self.arrived = threading.Semaphore(0)  # released at each submit
        self.working_set = SimpleNamespace(states=self._states)
        self.states = {
            "code": DraftState(State.RESIDENT, "wanted", 10.0, 0.5, 0),
            "maths": DraftState(State.COLD, "", 0.0, 0.0, None),
        }
        pool: Any = SimpleNamespace(total=100, free=60, cached=10, promised=5)
        self.serving: ServingStats | None = ServingStats(running=1, queued=2, pool=pool)
        self._watchers: list[Any] = []
        self._threads: list[threading.Thread] = []

    def reset(self, script: Script | None = None) -> None:
        """As new, with the same watchers."""
        self.wait()
        self.script = script or Script()
        self.submitted.clear()
        self.requests.clear()
        self._threads.clear()
        self.arrived = threading.Semaphore(0)

    # The engine's surface

    @property
    def drafts(self) -> dict[str, str]:
        return {"ngram": "active", "code": "active", "maths": "cold"}

    def draft_infos(self) -> list[DraftInfo]:
        return [
            DraftInfo(name, "ngram" if name == "ngram" else "head", "", 0, state) for name, state in self.drafts.items()
        ]

    def _states(self) -> dict[str, DraftState]:
        return dict(self.states)

    def memory_bytes(self) -> int:
        return 123_456

    def start_serving(self) -> None:
        pass

    def watch(self, callback: Any) -> Any:
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def encode(self, prompt: Any, *, raw: bool = False) -> list[int]:
        if self.script.encode_error is not None:
            raise self.script.encode_error
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], dict):
            return self.tokenizer.encode("".join(message["content"] for message in prompt)) or [0]
        if any(token > 100_000 for token in prompt):
            raise PromptError("the prompt has an id that is no token")
        return list(prompt)

    def submit(
        self, prompt: Any, params: SamplingParams, *, raw: bool = False, deadline_s: float | None = None
    ) -> Request:
        script = self.script  # a test may have another one as soon as it arrived
        if script.submit_error is not None:
            raise script.submit_error
        if any(token >= 100_000 for token in params.logit_bias):
            raise ParameterError("logit_bias has a token that there is not")
        request = Request(prompt, params, began_ns=time.perf_counter_ns(), wake=self._wake)
        self.submitted.append(SimpleNamespace(ids=list(prompt), params=params, raw=raw, deadline=deadline_s))
        self.requests.append(request)
        self.arrived.release()
        thread = threading.Thread(target=self._answer, args=(request, script), daemon=True)
        self._threads.append(thread)
        thread.start()
        return request

    # How a test moves it

    def batch(self, **changes: Any) -> None:
        """One batch, told to the watchers."""
        record = BatchRecord(
            1.0, 2, 7, gammas=(3, 2), drafted=(3, 2), accepted=(2, 0), emitted=(3, 1), queued=1, pool_free=0.5,
            resident=("code",),
        )  # fmt: skip
        for callback in self._watchers:
            callback(replace(record, **changes))

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _wake(self) -> None:
        """A cancelled request must not wait at a gate."""
        if self.script.gate is not None:
            self.script.gate.release()

    def _answer(self, request: Request, script: Script) -> None:
        said: list[str] = []
        request.become("running")
        for piece in script.pieces:
            if script.gate is not None:
                script.gate.acquire()
            if request.cancel_reason is not None:
                break
            if isinstance(piece, BaseException):
                request.fail(piece)
                return
            said.append(piece)
            ids = tuple(map(ord, piece[:100]))
            text = "" if piece == script.hidden else piece
            request.push(TextDelta(text, ids, "code", max(0, len(ids) - 1), logprobs=logprobs_of(request, ids)))
        cancelled = request.cancel_reason is not None
        finish = "cancelled" if cancelled else script.finish
        request.push(TextDelta("", (), None, 0, finish))
        request.end(answer(request, "".join(said), finish))


def answer(request: Request, text: str, finish: Any) -> GenerationResult:
    ids = tuple(map(ord, text))
    stats = GenerationStats(
        prompt_tokens=request.prompt_tokens,
        reused_tokens=2,
        new_tokens=len(ids),
        decode_seconds=0.5,
        time_to_first_token_s=0.01,
        tokens_per_second=20.0,
        proposed_tokens=8,
        accepted_tokens=6,
        acceptance_rate=0.75,
        mean_tokens_per_round=3.0,
        draft_share={"code": 3, "plain": 1},
        gamma_histogram={0: 1, 4: 3},
    )
    logprobs = logprobs_of(request, ids)
    return GenerationResult(text, ids, finish, request.prompt_tokens, stats, ("code",) * len(ids), logprobs)


def logprobs_of(request: Request, ids: tuple[int, ...]) -> tuple[TokenLogprob, ...] | None:
    if request.params.logprobs is None:
        return None
    top = tuple((ord(letter), value) for letter, value in (("a", -0.5), ("b", float("-inf"))))
    return tuple(TokenLogprob(token, -0.25, top[: request.params.logprobs], 0.1) for token in ids)


FULL = QueueFullError("3 requests wait already", 2.5)
