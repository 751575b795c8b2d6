"""Engine: builds the parts (target, tokenizer, drafts, planner), owns their life, and answers prompts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgespec.config import RuntimeConfig
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import DraftStatus, Session
from edgespec.decoding.template import ChatTemplate
from edgespec.draft_costs import cost_name, measure_drafts
from edgespec.draft_loading import LoadedDraft, load_draft, load_drafts
from edgespec.errors import DraftError, EdgespecError, PromptError
from edgespec.loading import Target, load_target
from edgespec.memory.topology import peak_memory_bytes, process_memory
from edgespec.results import GenerationResult, TextDelta
from edgespec.telemetry.trace import NULL_TRACER, NullTracer, Tracer
from predictor.planner import AutoPlanner, FixedPlanner, OnlyPlanner, Planner

if TYPE_CHECKING:
    from drafts.zoo import TargetFacts
    from edgespec.conversation import Conversation
    from edgespec.download import Progress
    from edgespec.models.spec import ModelSpec
    from edgespec.models.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What is known of one draft. domain: "" for none. nbytes: of its weights in memory. status: as in `drafts`."""

    name: str
    kind: str
    domain: str
    nbytes: int
    status: str


class Stream:
    """An answer on its way: iterate over its `TextDelta`s. Leaving the loop, `close` and `cancel` end it safely.

    `cancel` may be called from another thread; the answer ends with the round that is running. `result` is the answer
    so far, final when the iteration is over.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        keep: Callable[[GenerationResult], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """keep: called with the result unless an error ended the answer. release: called at the end in any case."""
        self._generation = generation
        self._keep = keep
        self._release = release
        self._lock = threading.RLock()
        self._ended = False

    def __iter__(self) -> Iterator[TextDelta]:
        return self

    def __next__(self) -> TextDelta:
        with self._lock:
            try:
                while not self._ended:
                    more = self._generation.step()
                    delta = self._generation.take()
                    if not more:
                        self._end()
                    if delta is not None:
                        return delta
            except Exception:
                self._end(failed=True)
                raise
            except BaseException:  # Ctrl-C: what came so far stands
                self._end()
                raise
            raise StopIteration

    def cancel(self) -> None:
        self._generation.cancel()

    def close(self) -> None:
        """End the answer now; from another thread, after the round that is running."""
        self._generation.cancel()
        with self._lock:
            self._end()

    def __del__(self) -> None:
        if not self._ended:
            self.close()

    @property
    def result(self) -> GenerationResult:
        result = self._generation.result
        return replace(result, stats=replace(result.stats, peak_memory_bytes=peak_memory_bytes()))

    def _end(self, *, failed: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._generation.close()
        try:
            if self._keep is not None and not failed:
                self._keep(self.result)
        finally:
            if self._release is not None:
                self._release()


class Engine:
    """One target with its drafts, ready to answer. Use `Engine.from_pretrained`; close it, or use it in a `with` block.

    Requests from several threads are safe; their rounds take turns on the model.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        target: Target,
        *,
        tracer: Tracer | NullTracer = NULL_TRACER,
    ) -> None:
        self.config = config
        self.tracer = tracer
        self._target = target
        self._statuses: dict[str, DraftStatus] = {}
        self._domains: dict[str, str] = {}
        self._auto = AutoPlanner(target.costs)
        self._gamma = config.gamma
        self._chosen = "auto"
        self._closed = False
        source = target.tokenizer.chat_template
        self.template = ChatTemplate(source, target.tokenizer) if source else None

    @classmethod
    def from_pretrained(
        cls,
        model: str | None = None,
        *,
        drafts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = "auto",
        gamma: int | str | None = None,
        memory_budget: str | int | None = None,
        device: str | None = None,
        weight_format: str | None = None,
        threads: int | None = None,
        context: int | None = None,
        config: RuntimeConfig | None = None,
        progress: Progress | None = None,
        tracer: Tracer | NullTracer | None = None,
    ) -> Engine:
        """Load a model and its drafts.

        model: a catalogue name ("smollm2-135m", the default), a folder, a .gguf file, or a hub id. drafts: "auto"
        (lookup and the set made for this target), the name of a draft or set, a path, several of them, or None for
        plain decoding. Everything not given comes from `config`, else from
        the configuration file and environment (see `RuntimeConfig`). A draft that cannot be used is reported in
        `drafts` and by one warning; only the target's failure is an error (ModelError, CatalogError, ConfigError,
        MemoryBudgetError).
        """
        arguments: dict[str, Any] = {
            "model": model,
            "drafts": None if drafts == "auto" else () if drafts is None else drafts,
            "gamma": gamma,
            "memory_budget": memory_budget,
            "device": device,
            "weight_format": weight_format,
            "threads": threads,
            "context": context,
        }
        config = config.replace(**arguments) if config is not None else RuntimeConfig.load(**arguments)
        engine = cls(config, load_target(config, progress), tracer=tracer or NULL_TRACER)
        try:
            for loaded in load_drafts(config, engine._target, progress):
                engine._add(loaded)
            engine._planner()  # measures costs now rather than in the first request
        except BaseException:
            engine.close()
            raise
        return engine

    # Settings that may change between requests

    @property
    def gamma(self) -> int | str:
        """Proposed tokens a round: "auto" or 0 and up."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: int | str) -> None:
        self._gamma = self.config.replace(gamma=value).gamma

    def use_draft(self, name: str) -> None:
        """Use only the draft of that name from the next request on; "auto" = all, "off" = plain decoding."""
        if name not in ("auto", "off"):
            if name not in self._statuses:
                raise DraftError(f"there is no draft {name!r}: loaded are {', '.join(self._statuses) or 'none'}")
            if not self._statuses[name].active:
                raise DraftError(f"draft {name} cannot be used: it {self._statuses[name]}")
        self._chosen = name

    @property
    def drafts(self) -> dict[str, str]:
        """Name -> "active", or "failed: reason"."""
        return {name: str(status) for name, status in self._statuses.items()}

    def add_draft(self, name: str) -> DraftInfo:
        """Load one more draft, for conversations that begin from now on. What is wrong with it is in its status."""
        loaded = load_draft(name, self.config, self._target, None, taken=self._statuses)
        self._add(loaded)
        return self.draft_infos()[-1]

    def draft_infos(self) -> list[DraftInfo]:
        """The drafts in the order in which they were loaded, failed ones among them."""
        return [
            DraftInfo(name, status.draft.kind, self._domains.get(name, ""), status.draft.nbytes, str(status))
            for name, status in self._statuses.items()
        ]

    @property
    def target_facts(self) -> TargetFacts:
        """What drafts must fit: the target's fingerprint, tokenizer and sizes."""
        return self._target.facts

    @property
    def tokenizer(self) -> Tokenizer:
        return self._target.tokenizer

    @property
    def spec(self) -> ModelSpec:
        return self._target.decoder.spec

    @property
    def context(self) -> int:
        """Tokens of the longest conversation, prompt and answer together."""
        return self._target.context

    def memory_bytes(self) -> int:
        """Resident memory of this process."""
        return process_memory()

    # Answers

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        on_delta: Callable[[TextDelta], None] | None = None,
    ) -> GenerationResult:
        """The whole answer. `on_delta` is called with each piece; what it raises ends the answer and is passed on."""
        stream = self.stream(prompt, params, raw=raw)
        try:
            for delta in stream:
                if on_delta is not None:
                    on_delta(delta)
            return stream.result
        finally:
            stream.close()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False) -> Stream:
        """The answer piece by piece.

        prompt: text (put as a user's message where the model has a chat template, unless `raw`), token ids as they are,
        or messages [{"role": ..., "content": ...}]. Raises PromptError and ParameterError before any model work.
        """
        began = perf_counter_ns()
        session = self.session()
        return self.start(session, self.encode(prompt, raw=raw), params, release=session.close, began_ns=began)

    def conversation(self, system: str | None = None, messages: Messages = ()) -> Conversation:
        """A chat that keeps its history and the KV of earlier turns."""
        from edgespec.conversation import Conversation

        return Conversation(self, system, messages)

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids that `stream` would answer to."""
        if isinstance(prompt, (bytes, bytearray)):
            raise PromptError("the prompt is bytes: decode it to text first, or give a list of token ids")
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: give some text")
            if self.template is not None and not raw:
                return self.template.encode([{"role": "user", "content": prompt}])
            return self._encode_raw(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            if raw:
                raise PromptError("messages need the chat template: give a text or token ids with raw=True")
            if self.template is None:
                raise PromptError("this model has no chat template: give the prompt as one text")
            return self.template.encode(prompt)  # type: ignore[arg-type]
        return prompt  # type: ignore[return-value]  # ids, or something that the session's check refuses by name

    def session(self) -> Session:
        """A conversation's state on this engine's target, with all its drafts."""
        if self._closed:
            raise EdgespecError("the engine is closed: make a new one with Engine.from_pretrained")
        return self._session(self._planner())

    def _session(self, planner: Planner) -> Session:
        return Session(
            self._target.decoder,
            self.tokenizer,
            self._statuses.values(),
            planner=planner,
            eos_ids=self._stop_ids(),
            context=self.context,
            tracer=self.tracer,
        )

    def start(
        self,
        session: Session,
        ids: list[int],
        params: SamplingParams | None,
        *,
        keep: Callable[[GenerationResult], None] | None = None,
        release: Callable[[], None] | None = None,
        began_ns: int | None = None,
    ) -> Stream:
        """A stream of the answer to `ids` in `session`, under the settings that are in force now."""
        if self._closed:
            raise EdgespecError("the engine is closed: make a new one with Engine.from_pretrained")
        session.planner = self._planner()
        self._auto.begin()
        generation = Generation(session, ids, params or SamplingParams(), began_ns=began_ns)
        return Stream(generation, keep=keep, release=release)

    def close(self) -> None:
        """Release all weights. Running streams fail at their next round."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            for status in self._statuses.values():
                stack.callback(status.draft.close)
            stack.callback(self._target.close)  # first, so that a stream that still runs does not blame a draft

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, loaded: LoadedDraft) -> None:
        status, manifest = loaded.status, loaded.manifest
        self._statuses[status.name] = status
        self._target.costs.file_under(status.name, cost_name(status.draft))
        if manifest is not None:
            self._domains[status.name] = manifest.domain
            if manifest.expected is not None and not status.free:  # free ones say by their level what to expect
                self._auto.expect(status.name, manifest.expected)

    def _planner(self) -> Planner:
        if self._chosen == "off" or not self._statuses:
            return FixedPlanner(None, 0)
        if isinstance(self._gamma, int):
            return FixedPlanner(None if self._chosen == "auto" else self._chosen, self._gamma)
        self._target.measure_costs()
        with_weights = [name for name, status in self._statuses.items() if status.active and not status.free]
        if not all(map(self._target.costs.knows, with_weights)):
            measure_drafts(self._session(FixedPlanner(None, 0)), with_weights, self._target.costs)
        return self._auto if self._chosen == "auto" else OnlyPlanner(self._auto, self._chosen)

    def _stop_ids(self) -> frozenset[int]:
        """Every id that ends an answer: the model's, the tokenizer's, and what the template puts after an answer."""
        ids = {*self.tokenizer.eos_ids, *self.spec.eos_token_ids}
        turn_end = self.template.turn_end_id if self.template is not None else None
        return frozenset(ids if turn_end is None else ids | {turn_end})

    def _encode_raw(self, text: str) -> list[int]:
        """With the BOS token where the tokenizer asks for one, and only once if the text starts with it already."""
        bos, ids = self.tokenizer.bos_id, self.tokenizer.encode(text, add_special=True)
        return ids[1:] if ids[:2] == [bos, bos] else ids
