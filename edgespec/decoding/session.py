"""One conversation: its tokens, the target's KV, and every draft's own memory of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import index
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from drafts.base import Draft, DraftSession, Lagging, Loadable
from drafts.states import DEFAULT_WINDOW, HiddenStates
from edgespec.errors import EdgespecError, ModelError, PromptError, in_words
from edgespec.models.base import Decoder, DeviceGuesses, FloatArray, ForwardOutput, KVCache, Part
from edgespec.models.batching import wait_for
from edgespec.models.cuda.memory import out_of_memory
from edgespec.telemetry.trace import NULL_TRACER, NullTracer, Tracer
from predictor.planner import AutoPlanner, Candidate, Planner

if TYPE_CHECKING:
    from edgespec.models.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

CHUNK = 256  # prompt tokens of one forward: a cancelled prefill ends after at most one chunk
_FAILURES = 3  # in a row, until a draft is given up
_HOPELESS = (EdgespecError, MemoryError, OSError)  # damaged, missing or too big: the next round would fail again
_short: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # how often each target had no memory


class Lease(Protocol):
    """What is resident from `acquire` to the end of the block; none of it is unloaded meanwhile."""

    @property
    def names(self) -> frozenset[str]: ...


class Residency(Protocol):
    """The working set as a session sees it."""

    def acquire(self) -> AbstractContextManager[Lease]:
        """A snapshot of the drafts that are resident now. Never waits."""


class DraftStatus:
    """A draft and its health, shared by all sessions of an engine. One with a `reason` is given up: not asked again."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.name = draft.name
        self.free = bool(getattr(draft, "free", False))
        self.loadable = isinstance(draft, Loadable)  # its weights come and go
        self.reads_hidden: bool = getattr(draft, "reads_hidden", False)
        self.window: int = getattr(draft, "window", DEFAULT_WINDOW)  # of hidden states that it looks at
        self.reason: str | None = None
        self._failures: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # in a row, by who saw them
        self._told = False
        self._lock = threading.Lock()  # several texts may see it fail at once

    @property
    def active(self) -> bool:
        return self.reason is None

    def worked(self, by: object = None) -> None:
        """It guessed; by: as in `failed`."""
        if self._failures:
            with self._lock:
                self._failures.pop(by or self, None)

    def failed(self, error: Exception, by: object = None) -> None:
        """Count a failure and warn once; three in a row give the draft up, or one if trying again is useless.

        by: the session that saw it. Eight texts that see one failure each, in the same batch, are not eight in a row.
        """
        cause = in_words(error)
        with self._lock:
            failures = self._failures[by or self] = self._failures.get(by or self, 0) + 1
            told, self._told = self._told, True
        if not told:
            _log.warning("draft %s failed, generation goes on without it: %s", self.name, cause)
        if failures >= _FAILURES or isinstance(error, _HOPELESS) or out_of_memory(error):
            self.reason = cause

    def __str__(self) -> str:
        return "active" if self.reason is None else f"failed: {self.reason}"


class Session:
    """One conversation on one target. Used by one `Generation` at a time; starting another ends the one before.

    tokens: ids of the whole conversation. valid: how many leading ones have their right KV in the target's cache.
    `valid` is the single truth about the cache: it is raised last, after the work that makes it true, and every use of
    the cache starts by cropping to it. So an exception or Ctrl-C at any point costs a few recomputed tokens, no more.
    The same holds for the target's hidden states, which are kept while some draft reads them.

    planner: None = an AutoPlanner of this session's own. residency: says which of the drafts with weights are loaded;
    None = those that are given stay so. eos_ids: None = what tokenizer and model say.
    context: positions to use at most, None = all the target has. chunk: prompt tokens of one forward.
    """

    def __init__(
        self,
        target: Decoder,
        tokenizer: Tokenizer,
        drafts: Iterable[Draft | DraftStatus] = (),
        *,
        planner: Planner | None = None,
        residency: Residency | None = None,
        eos_ids: Iterable[int] | None = None,
        context: int | None = None,
        chunk: int = CHUNK,
        tracer: Tracer | NullTracer = NULL_TRACER,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.planner: Planner = planner or AutoPlanner()
        self.tracer = tracer
        self.context = min(context or target.spec.max_positions, target.spec.max_positions)
        self.token_count = min(tokenizer.size, target.spec.vocab_size)
        known = (*tokenizer.eos_ids, *target.spec.eos_token_ids) if eos_ids is None else eos_ids
        self.eos_ids = frozenset(known)
        statuses = [d if isinstance(d, DraftStatus) else DraftStatus(d) for d in drafts]
        self.statuses = {status.name: status for status in statuses}
        self._residency = residency
        self._resident: frozenset[str] | None = None  # names of the lease that is held
        self.tokens: list[int] = []
        self.valid = 0
        self.turn = 0
        self._chunk = chunk
        self._cache: KVCache | None = None
        self._states: HiddenStates | None = None
        self._open: dict[str, DraftSession] = {}
        self._lagging: dict[str, Lagging] = {}  # those of them that may have to read up
        self._read: dict[str, int] = {}  # how much of the conversation a draft had been given when it last proposed

    def check(self, prompt: Sequence[int]) -> list[int]:
        """The prompt as plain ints. Raises PromptError if it is empty, holds what is no token, or leaves no room."""
        try:
            tokens = [index(token) for token in prompt]
        except TypeError as error:
            raise PromptError(f"A prompt must be a list of token ids: {error}.") from error
        if not tokens:
            raise PromptError("The prompt has no tokens; give some text, or at least the BOS token.")
        if not (min(tokens) >= 0 and max(tokens) < self.token_count):
            bad = next(token for token in tokens if not 0 <= token < self.token_count)
            raise PromptError(f"Prompt token {bad} does not exist; the tokens are 0 to {self.token_count - 1}.")
        if len(tokens) >= self.context:
            raise PromptError(
                f"The prompt has {len(tokens)} tokens, and the context of {self.context} must also hold the answer; "
                "shorten the prompt or start a new conversation."
            )
        return tokens

    def start(self, prompt: list[int]) -> int:
        """Make `prompt` the conversation; returns how many leading tokens keep their KV. No model call.

        The last token is never reused: the row that follows it is needed.
        """
        same, end = 0, min(len(prompt) - 1, self.valid)
        while same < end and prompt[same] == self.tokens[same]:
            same += 1
        self.truncate(same)
        self.tokens.extend(prompt[same:])
        return same

    def truncate(self, length: int) -> None:
        """Cut the conversation to its first `length` tokens, everywhere."""
        # Drafts first: until `tokens` changes, having forgotten too much is harmless for them.
        for name in list(self._open):
            try:
                self._open[name].crop(length)
            except Exception as error:
                self.draft_failed(name, error)
        self._read = {name: min(count, length) for name, count in self._read.items()}
        if self._states is not None:
            self._states.crop(length)
        self.valid = min(self.valid, length)
        del self.tokens[length:]

    def adopt(self, tokens: Sequence[int], cache: KVCache) -> None:
        """Begin with the keys and values in `cache`, which are those of `tokens` (as many as it has positions).

        For a session that has none yet: `start` then reuses what its prompt begins with.
        """
        if self._cache is not None or len(tokens) != cache.length:
            raise ValueError(f"a cache of {cache.length} positions cannot be adopted for {len(tokens)} tokens")
        self.tokens[:] = tokens
        self._cache = cache
        self.valid = len(tokens)

    def prefill(self, cancelled: Callable[[], bool]) -> FloatArray | None:
        """Run the target over the tokens without KV; the last one's logits [1, vocab_rows], or None if cancelled."""
        logits = None
        while self.valid < len(self.tokens):
            if cancelled():
                return None
            part = self.ask_prefill(self._chunk)
            with self.tracer.span("prefill", width=len(part.tokens)):
                logits = self._forward_with_room(part).logits
                wait_for(logits)  # so that times are those of the work, and the next piece may still be called off
            self.valid += len(part.tokens)
        return logits

    def _forward_with_room(self, part: Part) -> ForwardOutput:
        """`_forward`; where the target lacks memory, once more when a draft has made room."""
        try:
            return self._forward(part)
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.make_room(error)
        return self._forward(part)

    def make_room(self, error: Exception) -> None:
        """The target lacks memory: a draft leaves for it, as do buffers that are only kept for later.

        Waits a moment until the draft has left; so to be called outside of any lease, which would hold it.
        """
        times = _short[self.target] = _short.get(self.target, 0) + 1
        level = logging.DEBUG if times & (times - 1) else logging.WARNING  # the 1st, 2nd, 4th, 8th time, and so on
        _log.log(level, "the target ran out of memory, by now %d times; it tries again with less: %s", times, error)
        shrink = getattr(self._residency, "shrink", None)
        if shrink is not None:
            shrink("the target ran out of memory")
        trim = getattr(self.target, "trim", None)
        if trim is not None:
            trim()

    def verify(self, guesses: list[int] | DeviceGuesses) -> FloatArray:
        """One target forward over the last committed token and `guesses`: rows [len(guesses) + 1, vocab_rows].

        The caller commits what stands: `tokens` first, `valid` last.
        """
        return self._forward(self.ask_verify(guesses)).logits

    # The same in halves, around a forward that takes several sessions at once

    def ask_prefill(self, rows: int) -> Part:
        """A forward over at most `rows` of the tokens without KV (there are some); logits of the very last only.

        After it `receive` its output, then raise `valid` by as many tokens.
        """
        cache = self._cropped_cache()  # first, as it may lower `valid`
        end = min(self.valid + rows, len(self.tokens))
        reads = self._states_for_drafts() is not None
        return Part(self.tokens[self.valid : end], cache, int(end == len(self.tokens)), reads)

    def ask_verify(self, guesses: list[int] | DeviceGuesses) -> Part:
        """The forward that `verify` makes. After it `receive` its output, then commit as after `verify`."""
        cache = self._cropped_cache()
        reads = self._states_for_drafts() is not None
        return Part(self.tokens[self.valid :] + guesses, cache, len(guesses) + 1, reads)

    def receive(self, output: ForwardOutput) -> None:
        """Keep the hidden states of a forward that began at `valid`, if a draft reads them.

        Those of guesses are kept too, and are right as far as `valid` will be raised; the next use crops the others.
        """
        states = self._states_for_drafts()
        if states is not None:
            if output.hidden is None:
                raise ModelError("The target gave no hidden states, which a draft needs; load it without that draft.")
            states.write(self.valid, output.hidden)

    def _forward(self, part: Part) -> ForwardOutput:
        output = self.target.forward(part.tokens, part.cache, logits=part.logits, hidden=part.hidden)
        self.receive(output)
        return output

    def _states_for_drafts(self) -> HiddenStates | None:
        """Where hidden states go; None if no draft reads them."""
        windows = [status.window for status in self.statuses.values() if status.reads_hidden and status.active]
        if not windows:
            return None
        if self._states is None:
            self._states = HiddenStates(self.target.spec.hidden_size)
        self._states.widen(max(windows))
        return self._states

    def _cropped_cache(self) -> KVCache:
        if self._cache is None:
            self._cache = self.target.new_cache(self.context)
        self.valid = min(self.valid, self._cache.length)
        self._cache.crop(self.valid)
        if self._states is not None:
            self._states.crop(self.valid)
        if self._cache.length != self.valid:
            raise ModelError(f"The target's cache has {self._cache.length} positions after a crop to {self.valid}.")
        return self._cache

    @contextmanager
    def leased(self) -> Iterator[frozenset[str]]:
        """What is resident now stays so for the length of this block, and only that is a candidate."""
        if self._residency is None:
            yield frozenset(self.statuses)
            return
        with self._residency.acquire() as lease:
            self._resident = lease.names
            try:
                yield lease.names
            finally:
                self._resident = frozenset()

    def candidates(self) -> list[Candidate]:
        """The drafts that are resident and have not been given up, with what each has to go on."""
        found = []
        for name, status in self.statuses.items():
            if status.active and self._present(status):
                try:
                    opened, lagging = self.draft(name), self._lagging.get(name)
                    behind = 0 if lagging is None else lagging.behind(self.tokens)
                    found.append(Candidate(name, opened.level(self.tokens), status.free, behind=behind))
                except Exception as error:
                    self.draft_failed(name, error)
        return found

    @property
    def changing(self) -> bool:
        """Whether drafts may come and go: how many there is room for changes with the memory that others take."""
        return self._residency is not None and any(status.loadable for status in self.statuses.values())

    def _present(self, status: DraftStatus) -> bool:
        if not status.loadable or self._residency is None:
            return True
        return self._resident is not None and status.name in self._resident

    def catch_up(self, name: str, limit: int) -> int | None:
        """Let a resident draft read at most `limit` of the tokens it missed; how many are left, None if it failed."""
        lagging = self._lagging.get(name)
        try:
            return 0 if lagging is None else lagging.catch_up(self.tokens, limit)
        except Exception as error:
            self.draft_failed(name, error)
            return None

    def draft(self, name: str) -> DraftSession:
        """The draft's memory of this conversation, made when first needed."""
        opened = self._open.get(name)
        if opened is None:
            status = self.statuses[name]
            opened = status.draft.open(self._states_for_drafts()) if status.reads_hidden else status.draft.open()
            self._open[name] = opened
            if isinstance(opened, Lagging):
                self._lagging[name] = opened
        return opened

    def unread(self, name: str) -> int:
        """How many tokens were committed since the draft last proposed; counts as read from now on."""
        before = self._read.get(name, 0)
        self._read[name] = len(self.tokens)
        return len(self.tokens) - before

    def draft_failed(self, name: str, error: Exception) -> None:
        """Note a failure, and drop the draft's memory: nobody knows what state it is in."""
        self.statuses[name].failed(error, self)
        self._read.pop(name, None)
        opened = self._open.pop(name, None)
        self._lagging.pop(name, None)
        if opened is not None:
            with suppress(Exception):
                opened.close()

    @property
    def states(self) -> HiddenStates | None:
        """The target's recent hidden states; None while no draft reads them."""
        return self._states

    @property
    def cache(self) -> KVCache | None:
        """The target's keys and values; None while there are none."""
        return self._cache

    @property
    def nbytes(self) -> int:
        """Bytes of the target's KV held by this conversation."""
        return 0 if self._cache is None else self._cache.nbytes

    def close(self) -> None:
        """Forget the conversation and release its caches. The session can be used again."""
        self.turn += 1
        release = getattr(self._cache, "release", None)  # one out of a pool, where others may reuse what is right in it
        right = self.tokens[: self.valid]
        self.truncate(0)
        self._cache = None
        for opened in self._open.values():
            with suppress(Exception):
                opened.close()
        self._open.clear()
        self._lagging.clear()
        self._states = None  # after the drafts that hold it
        if release is not None:  # last: it may fail
            release(right)
