"""An engine that follows a script, for tests of the command line: same surface as edgespec.engine.Engine, no model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from edgespec.config import RuntimeConfig
from edgespec.engine import DraftInfo
from edgespec.errors import DraftError
from edgespec.results import GenerationResult, GenerationStats, TextDelta, TokenLogprob

FAKE = "tests.cli.fake_main"  # the module that runs the command line on this engine in a process of its own


@dataclasses.dataclass
class Script:
    """What the engine answers. pieces: texts of the deltas, an exception to raise there, or a function to call.

    echo: answer with the question instead. delay: seconds before each piece.
    """

    pieces: list[Any] = dataclasses.field(default_factory=lambda: ["Hello", " there", "."])
    echo: bool = False
    delay: float = 0.0
    finish: str = "stop"
    drafts: dict[str, str] = dataclasses.field(default_factory=lambda: {"ngram": "active"})
    load_error: BaseException | None = None


class FakeEngine:
    """Keeps what it was built with in `loads` and what it was asked in `requests` (both on the class)."""

    script = Script()
    loads: ClassVar[list[dict[str, Any]]] = []
    requests: ClassVar[list[dict[str, Any]]] = []
    closed: ClassVar[int] = 0

    @classmethod
    def reset(cls, script: Script | None = None) -> None:
        cls.script, cls.loads, cls.requests, cls.closed = script or Script(), [], [], 0

    @classmethod
    def from_pretrained(cls, *, config: RuntimeConfig, **others: Any) -> FakeEngine:
        cls.loads.append({row.key: row.value for row in config.describe()})
        if cls.script.load_error is not None:
            raise cls.script.load_error
        return cls(config)

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self._gamma: Any = config.gamma
        self.context = 2048
        self.drafts = dict(self.script.drafts)
        self.used = "auto"

    @property
    def gamma(self) -> Any:
        return self._gamma

    @gamma.setter
    def gamma(self, value: Any) -> None:
        self._gamma = self.config.replace(gamma=value).gamma

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        type(self).closed += 1

    def memory_bytes(self) -> int:
        return 412_000_000

    def held(self) -> str:
        return ""

    def use_draft(self, name: str) -> None:
        if name not in (*self.drafts, "auto", "off"):
            raise DraftError(f"There is no draft '{name}'; loaded are {', '.join(self.drafts)}.")
        self.used = name

    def draft_infos(self) -> list[DraftInfo]:
        return [DraftInfo(name, "ngram", "", 0, status) for name, status in self.drafts.items()]

    def stream(self, prompt: Any, params: Any = None, *, raw: bool = False) -> FakeStream:
        self.requests.append({"prompt": prompt, "params": params, "raw": raw, "gamma": self.gamma, "draft": self.used})
        return FakeStream(self, prompt, params)

    def generate(self, prompt: Any, params: Any = None, *, raw: bool = False, on_delta: Any = None) -> GenerationResult:
        with_stream = self.stream(prompt, params, raw=raw)
        for _ in with_stream:
            pass
        return with_stream.result

    def conversation(self, system: str | None = None, messages: Any = ()) -> FakeConversation:
        return FakeConversation(self, system, list(messages))


class FakeStream:
    def __init__(
        self, engine: FakeEngine, prompt: Any, params: Any, done: Callable[[GenerationResult], None] | None = None
    ) -> None:
        self.engine, self.prompt, self.params, self.done = engine, prompt, params, done
        self.cancelled = False
        self.closed = False
        self._result: GenerationResult | None = None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[TextDelta]:
        return self._pieces

    def cancel(self) -> None:
        self.cancelled = True

    def close(self) -> None:
        self.closed = True
        self._pieces.close()

    @property
    def result(self) -> GenerationResult:
        assert self._result is not None, "the stream has not ended"
        return self._result

    def _run(self) -> Iterator[TextDelta]:
        """As in the real engine, an answer that is left early counts as cancelled, and only a failure keeps nothing."""
        text, ids, failed, ended = "", [], False, False
        try:
            for number, piece in enumerate(self._script_pieces()):
                text += piece
                ids.append(number)
                yield TextDelta(piece, (number,), self._draft(), 1 if self._draft() else 0)
            ended = not self.cancelled
        except Exception:
            failed = True
            raise
        finally:
            finish = self.engine.script.finish if ended else "cancelled"
            self._result = result(text, ids, finish, self._draft(), self.params)
            if self.done is not None and not failed:
                self.done(self._result)

    def _script_pieces(self) -> Iterator[str]:
        script = self.engine.script
        question = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]
        for piece in [question] if script.echo else script.pieces:
            deadline = time.monotonic() + script.delay
            while not self.cancelled and time.monotonic() < deadline:
                time.sleep(0.005)
            if self.cancelled:
                return
            if isinstance(piece, BaseException):
                raise piece
            yield piece() if callable(piece) else piece

    def _draft(self) -> str | None:
        return None if self.engine.used == "off" else next(iter(self.engine.drafts), None)


class FakeConversation:
    def __init__(self, engine: FakeEngine, system: str | None, messages: list[dict[str, str]]) -> None:
        self.engine, self.system, self.messages = engine, system, messages

    def stream(self, text: str, params: Any = None) -> FakeStream:
        return self._answer([*self.messages, {"role": "user", "content": text}], params)

    def regenerate(self, params: Any = None) -> FakeStream:
        return self._answer(self.messages[:-1], params)

    def _answer(self, history: list[dict[str, str]], params: Any) -> FakeStream:
        prompt = ([{"role": "system", "content": self.system}] if self.system is not None else []) + history
        self.engine.requests.append(
            {"prompt": prompt, "params": params, "gamma": self.engine.gamma, "draft": self.engine.used}
        )

        def keep(answer: GenerationResult) -> None:
            self.messages = [*history, {"role": "assistant", "content": answer.text}]

        return FakeStream(self.engine, prompt, params, keep)

    def close(self) -> None:
        pass

    def undo(self) -> None:
        self.messages = self.messages[:-2]

    def clear(self) -> None:
        self.messages = []


def result(text: str, ids: list[int], finish: Any, draft: str | None, params: Any = None) -> GenerationResult:
    """A plausible result: with a draft, four proposed tokens a round of which three were accepted."""
    count = len(ids)
    stats = GenerationStats(
        prompt_tokens=7,
        new_tokens=count,
        prefill_seconds=0.01,
        decode_seconds=0.1 * max(0, count - 1),
        time_to_first_token_s=0.02,
        tokens_per_second=10.0 if count > 1 else 0.0,
        prefill_tokens_per_second=700.0,
        rounds=2,
        proposed_tokens=8 if draft else 0,
        accepted_tokens=6 if draft else 0,
        mean_tokens_per_round=4.0 if draft else 1.0,
        acceptance_rate=0.75 if draft else 0.0,
        acceptance_by_position=[1.0, 0.5] if draft else [],
        draft_share={draft or "plain": 2},
        gamma_histogram={4 if draft else 0: 2},
        peak_memory_bytes=500_000_000,
    )
    logprobs = None
    if params is not None and params.logprobs is not None:
        logprobs = tuple(TokenLogprob(token, -0.5, ((token, -0.5), (99, float("-inf"))), 0.25) for token in ids)
    return GenerationResult(text, tuple(ids), finish, 7, stats, tuple(draft for _ in ids), logprobs)
