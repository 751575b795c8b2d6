"""Engine: builds the parts (target, tokenizer, drafts, planner), owns their life, and answers prompts."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgespec.config import RuntimeConfig
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import DraftStatus, Session
from edgespec.decoding.template import ChatTemplate
from edgespec.draft_costs import measure_drafts
from edgespec.draft_loading import check_names, load_draft, load_drafts
from edgespec.engine_drafts import EngineDrafts
from edgespec.errors import DraftError, EdgespecError, PromptError
from edgespec.loading import Target, load_target
from edgespec.memory.topology import process_memory
from edgespec.memory.working_set import WorkingSet
from edgespec.residency import CurrentSet, HeldDrafts, Loads
from edgespec.results import GenerationResult
from edgespec.serving.engine_part import Prompt, ServesMany
from edgespec.steering import describe
from edgespec.stream import Stream
from edgespec.telemetry.sampler import Sampler
from edgespec.telemetry.trace import NULL_TRACER, NullTracer, Tracer
from predictor.planner import FixedPlanner, OnlyPlanner, Planner

if TYPE_CHECKING:
    from drafts.zoo import TargetFacts
    from edgespec.conversation import Conversation
    from edgespec.download import Progress
    from edgespec.models.spec import ModelSpec
    from edgespec.models.tokenizer import Tokenizer
    from predictor.policies import Policy

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What is known of one draft. domain: "" for none. nbytes: of its weights in memory now. status: as in `drafts`."""

    name: str
    kind: str
    domain: str
    nbytes: int
    status: str


class Engine(ServesMany):
    """One target with its drafts, ready to answer. Use `Engine.from_pretrained`; close it, or use it in a `with` block.

    One that is dropped without that, with its conversations and streams, ends its threads within a second or so.
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
        self._drafts = EngineDrafts(config, target, tracer, weakref.ref(self))
        self._gamma = config.gamma
        self._chosen = "auto"
        self._closed = False  # takes no more requests
        self._released = False  # all of it is closed
        self._changing = threading.Lock()  # of the drafts there are, and of which are used
        source = target.tokenizer.chat_template
        self.template = ChatTemplate(source, target.tokenizer) if source else None
        self._sampler = Sampler.of_this_device(tracer)
        self._init_serving()

    @classmethod
    def from_pretrained(
        cls,
        model: str | None = None,
        *,
        drafts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = "auto",
        gamma: int | str | None = None,
        memory_budget: str | int | None = None,
        resident: int | None = None,
        policy: str | None = None,
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
        plain decoding. resident: drafts with weights that are in memory at once (default: what fits). policy: see
        docs/policies.md. Everything not given comes from `config`, else from
        the configuration file and environment (see `RuntimeConfig`). A draft that cannot be used is reported in
        `drafts` and by one warning; only the target's failure is an error (ModelError, CatalogError, ConfigError,
        MemoryBudgetError), and a word that no draft is called by (ConfigError).
        """
        arguments: dict[str, Any] = {
            "model": model,
            "drafts": None if drafts == "auto" else () if drafts is None else drafts,
            "gamma": gamma,
            "memory_budget": memory_budget,
            "resident": resident,
            "policy": policy,
            "device": device,
            "weight_format": weight_format,
            "threads": threads,
            "context": context,
        }
        config = config.replace(**arguments) if config is not None else RuntimeConfig.load(**arguments)
        check_names(config)
        engine = cls(config, load_target(config, progress), tracer=tracer or NULL_TRACER)
        try:
            for loaded in load_drafts(config, engine._target, progress):
                engine._drafts.add(loaded)
            engine._drafts.hold()
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
        """Use only the draft of that name from the next request on; "auto" = all, "off" = plain decoding.

        Waits until it is there. If it cannot be used (DraftError), all is as before.
        """
        with self._changing:
            status = self._statuses.get(name)
            if status is None and name not in ("auto", "off"):
                raise DraftError(f"there is no draft {name!r}: there are {', '.join(self._statuses) or 'none'}")
            held, weighty = self._held, self._drafts.weighty(name)
            if status is not None and not (status.active and (not weighty or held is None or held.only(name))):
                raise DraftError(f"draft {name} cannot be used: it is {self._drafts.why_not(name)}")
            self._chosen = name
            if held is not None and not weighty:
                held.any()

    @property
    def drafts(self) -> dict[str, str]:
        """Name -> "active" (it can run now), "loading", "warm", "cold" (on storage), or "failed: reason"."""
        return self._drafts.in_words()

    @property
    def working_set(self) -> WorkingSet | None:
        """What is resident; None while the engine is being made."""
        return None if self._held is None else self._held.working_set

    def held(self) -> str:
        """The working set in words: what is resident, what is loading; "" where every draft has a slot of its own."""
        working_set = self.working_set
        if working_set is None or working_set.capacity >= len(states := working_set.states()):
            return ""
        return describe(states)

    def add_draft(self, name: str) -> DraftInfo:
        """Add one more draft, for conversations that begin from now on. What is wrong with it is in its status.

        All drafts are loaded again; an answer that runs takes them up as they come.
        """
        with self._changing:
            if self._closed:
                raise EdgespecError("the engine is closed: make a new one with Engine.from_pretrained")
            loaded = load_draft(name, self.config, self._target, None, taken=self._statuses)
            try:
                self._drafts.hold_one_more(loaded)
            finally:
                self._keep_choice()
        return self.draft_infos()[-1]

    def draft_infos(self) -> list[DraftInfo]:
        """The drafts in the order in which they were added, failed ones among them."""
        states = self.drafts
        return [
            DraftInfo(name, status.draft.kind, self._domain(name), status.draft.nbytes, states[name])
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
        self._check_process()
        if self._closed:
            raise EdgespecError("the engine is closed: make a new one with Engine.from_pretrained")
        return self._session(self._planner())

    def _session(self, planner: Planner) -> Session:
        return Session(
            self._target.decoder,
            self.tokenizer,
            self._statuses.values(),
            planner=planner,
            residency=None if self._held is None else CurrentSet(lambda: self._held),
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
        self._check_process()
        if self._closed:
            raise EdgespecError("the engine is closed: make a new one with Engine.from_pretrained")
        if self._held is not None:
            self._held.make_way()
        session.planner = planner = self._planner()
        params = params or SamplingParams()
        held = self._held
        if held is not None and isinstance(planner, OnlyPlanner):
            held.policy.begin()  # else it would judge this text by what was ranked for the last one
        steering = held.scheduler.text(params.max_new_tokens) if held is not None and planner is held.policy else None
        generation = Generation(session, ids, params, began_ns=began_ns, steering=steering)
        counters = Loads if held is None else held.counters
        return Stream(generation, keep=keep, release=release, counters=counters, sampler=self._sampler)

    def remember(self) -> None:
        """Write down what the policy has learned so far, as `close` does; call it when no answer runs."""
        if self._held is not None and not self._closed:
            self._held.remember()

    def close(self) -> None:
        """Release all weights. Running streams fail at their next round. Interrupted, another call does the rest."""
        self._closed = True
        if self._released:
            return
        with ExitStack() as stack:
            # The last one first: once nothing is offered, a stream that still runs does not blame a draft.
            for status in self._statuses.values():
                stack.callback(status.draft.close)
            stack.callback(self._target.close)
            stack.callback(self._sampler.close)
            if self._held is not None:
                stack.callback(self._held.close)
            stack.callback(self._close_serving)
        self._released = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _statuses(self) -> dict[str, DraftStatus]:
        return self._drafts.statuses

    @property
    def _held(self) -> HeldDrafts | None:
        return self._drafts.held

    def _domain(self, name: str) -> str:
        manifest = self._drafts.manifests.get(name)
        return "" if manifest is None else manifest.domain

    def _keep_choice(self) -> None:
        """A working set that was made anew knows nothing of what was asked of the one before."""
        if self._held is None:
            return
        if self._closed:  # meanwhile
            self._held.close()
        elif self._drafts.weighty(self._chosen):
            self._held.scheduler.pin(self._chosen)

    def _planner(self) -> Planner:
        held = self._held
        planner, policy, only = self._choice(held)
        if policy is None:
            return planner
        assert held is not None
        self._target.measure_costs()
        with held.working_set.acquire() as lease:
            present = [n for n, status in self._statuses.items() if status.active and n in lease.names]
            if not all(map(self._target.costs.knows, present)):
                measure_drafts(self._session(FixedPlanner(None, 0)), present, self._target.costs)
        return policy if only is None else OnlyPlanner(policy, only)

    def _choice(self, held: HeldDrafts | None) -> tuple[Planner, Policy | None, str | None]:
        """By the settings of now: the planner, the policy if that is it, and the only draft it may use, None = all."""
        chosen, gamma = self._chosen, self._gamma
        if chosen == "off" or not self._statuses:
            return FixedPlanner(None, 0), None, None
        only = None if chosen == "auto" else chosen
        if isinstance(gamma, int):
            return FixedPlanner(only, gamma), None, None
        assert held is not None
        return held.policy, held.policy, only

    def _stop_ids(self) -> frozenset[int]:
        """Every id that ends an answer: the model's, the tokenizer's, and what the template puts after an answer."""
        ids = {*self.tokenizer.eos_ids, *self.spec.eos_token_ids}
        turn_end = self.template.turn_end_id if self.template is not None else None
        return frozenset(ids if turn_end is None else ids | {turn_end})

    def _encode_raw(self, text: str) -> list[int]:
        """With the BOS token where the tokenizer asks for one, and only once if the text starts with it already."""
        bos, ids = self.tokenizer.bos_id, self.tokenizer.encode(text, add_special=True)
        return ids[1:] if ids[:2] == [bos, bos] else ids
