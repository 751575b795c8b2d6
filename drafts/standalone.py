"""An ordinary checkpoint with the target's tokenizer as a draft."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from drafts.base import Choose, FloatArray, LoadControl, Proposal, Slot
from drafts.device_proposal import DeviceProposal
from edgespec.errors import DraftError
from edgespec.models.batching import wait_for

if TYPE_CHECKING:
    from drafts.states import HiddenStates
    from edgespec.models.base import Decoder, KVCache
    from edgespec.models.cuda.guesses import DeviceTokens
    from edgespec.models.spec import ModelSpec
    from edgespec.models.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

CHUNK = 256  # tokens of one forward while catching up


@dataclass(frozen=True)
class Checkpoint:
    """Where a standalone draft's decoder comes from: its architecture, and how to build it.

    nbytes: what the decoder takes, keys and values of one conversation included. build: raises as `Loadable.load`; it
    may take over what another draft left in the slot, and leave what it makes there. further: bytes of each further
    conversation.
    """

    spec: ModelSpec
    nbytes: int
    files: tuple[Path, ...]
    build: Callable[[Slot, LoadControl], Decoder]
    further: int = 0


class StandaloneDraft:
    """A smaller decoder that guesses token by token.

    decoder: one that it owns from now on, or the checkpoint from which `load` builds it. token_count: the target's
    tokens; the draft's embedding may have more rows (padding, added tokens: never proposed) or fewer (a conversation
    that holds a token without a row is not drafted). max_positions: where the draft ends, at most its own limit; a
    longer conversation goes on without it, after one log line.
    """

    kind = "standalone"
    reads_hidden = False
    buffer_bytes = 0  # the engines keep weights in memory of their own
    refills = True  # what is left in a slot is the builder's to take or to free

    def __init__(
        self, name: str, decoder: Decoder | Checkpoint, token_count: int, *, max_positions: int | None = None
    ) -> None:
        if token_count < 1 or (max_positions is not None and max_positions < 1):
            raise ValueError(f"draft {name}: {token_count} tokens, {max_positions} positions")
        limit = decoder.spec.max_positions
        self.name = name
        self.decoder = None if isinstance(decoder, Checkpoint) else decoder
        self.rows = min(token_count, decoder.spec.vocab_size)
        self.max_positions = limit if max_positions is None else min(limit, max_positions)
        self.slot_bytes = decoder.nbytes
        self.further_bytes = decoder.further if isinstance(decoder, Checkpoint) else 0  # of each further conversation
        self._checkpoint = decoder if isinstance(decoder, Checkpoint) else None
        self._lock = threading.Lock()
        self._sessions: WeakSet[StandaloneSession] = WeakSet()

    @classmethod
    def for_target(
        cls, name: str, decoder: Decoder, tokenizer: Tokenizer, target: Tokenizer, *, max_positions: int | None = None
    ) -> StandaloneDraft:
        """The draft, after its tokens were compared with the target's; DraftError names the first id that differs."""
        from edgespec.models.tokenizer import compare_vocabularies

        compare_vocabularies(target, tokenizer)
        return cls(name, decoder, target.size, max_positions=max_positions)

    @property
    def files(self) -> tuple[Path, ...]:
        return () if self._checkpoint is None else self._checkpoint.files

    @property
    def on_device(self) -> bool:
        """Whether a device makes its blocks, so that the host has time meanwhile."""
        return hasattr(self.decoder, "guess")

    @property
    def loaded(self) -> bool:
        return self.decoder is not None

    def load(self, slot: Slot, control: LoadControl) -> None:
        if self.loaded:
            return
        if self._checkpoint is None:
            raise DraftError(f"draft {self.name} was made from a decoder that is closed now; it cannot be loaded again")
        control.checkpoint()
        decoder = self._checkpoint.build(slot, control)
        try:
            control.checkpoint()
            if decoder.spec != self._checkpoint.spec:
                raise DraftError(f"draft {self.name}: its checkpoint is another one now; add it again")
        except BaseException:
            decoder.close()
            raise
        self.decoder = decoder

    def unload(self) -> None:
        """Keys and values of conversations go with the weights: they are most of what the draft takes."""
        decoder, self.decoder = self.decoder, None
        with self._lock:
            opened = list(self._sessions)
        for each in opened:
            each.close()
        if decoder is not None:
            decoder.close()

    @property
    def nbytes(self) -> int:
        return 0 if self.decoder is None else self.decoder.nbytes

    def open(self, states: HiddenStates | None = None) -> StandaloneSession:
        opened = StandaloneSession(self)
        with self._lock:
            self._sessions.add(opened)
        return opened

    def close(self) -> None:
        self.unload()


class StandaloneSession:
    """The draft's own KV of one conversation.

    `_fed` lists the tokens whose KV is in the cache, the unjudged ones of the last round included; the first `_agreed`
    of them are known to be the conversation's. Both grow only after the forward that makes them true, and every forward
    starts by cropping the cache to `_fed`: an exception in between costs a few positions, nothing else.

    A block that stays on the device joins `_fed` when its tokens have arrived on the host, with what the target said of
    them. If they never do, it counts as not fed.
    """

    def __init__(self, draft: StandaloneDraft) -> None:
        self._draft = draft
        self._cache: KVCache | None = None
        self._fed: list[int] = []
        self._block: DeviceTokens | None = None  # fed after `_fed`, but for its last token
        self._agreed = 0
        self._known = 0  # tokens already seen to have a row in this draft's embedding
        self._told = False

    def level(self, tokens: Sequence[int]) -> int:
        if not self._draft.loaded:
            return 0
        if len(tokens) > self._draft.max_positions:
            if not self._told:
                self._told = True
                name, limit = self._draft.name, self._draft.max_positions
                _log.warning("draft %s ends at %d tokens; this conversation goes on without it", name, limit)
            return 0
        return int(self._has_rows(tokens))

    def _has_rows(self, tokens: Sequence[int]) -> bool:
        for at in range(self._known, len(tokens)):
            if not 0 <= tokens[at] < self._draft.rows:
                return False
            self._known = at + 1
        return True

    def behind(self, tokens: Sequence[int]) -> int:
        if not tokens or len(tokens) > self._draft.max_positions or not self._has_rows(tokens):
            return 0
        return len(tokens) - 1 - self._same(tokens)

    def catch_up(self, tokens: Sequence[int], limit: int) -> int:
        missing = self.behind(tokens)
        count = min(limit, missing, CHUNK)
        if count > 0:
            self._roll_back(tokens)
            begin = len(self._fed)
            wait_for(self._forward(tokens[begin : begin + count], logits=0))  # else its launch alone would be timed
            self._agreed = len(self._fed)
        return missing - count

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        """At most `gamma` forwards (more only while a long absence is caught up, in chunks)."""
        proposal = Proposal()
        # The last guess needs no KV of its own: `tokens` and gamma - 1 guesses must fit.
        gamma = min(gamma, self._draft.max_positions - len(tokens) + 1)
        if gamma < 1 or not self._has_rows(tokens):
            return proposal
        self._roll_back(tokens)
        missing = list(tokens[len(self._fed) :])
        at_once = self._guess_at_once(missing, gamma, choose)
        if at_once is not None:
            return at_once
        while len(proposal) < gamma:
            token, q = choose(self._forward(missing)[0], proposal.tokens)
            proposal.tokens.append(token)
            proposal.rows.append(q)
            if token >= self._draft.rows:  # the request's bias forces a token that this draft cannot read
                break
            missing = [token]
        return proposal

    def _guess_at_once(self, missing: list[int], gamma: int, choose: Choose) -> Proposal | None:
        """The block of a decoder that makes all of it by itself, on its device. See `CudaDecoder.guess`."""
        decoder = self._draft.decoder
        guess = getattr(decoder, "guess", None)
        temperature = None if guess is None else 0.0 if choose.argmax else choose.temperature
        if decoder is None or guess is None or temperature is None:
            return None
        since = decoder.stopwatch()  # type: ignore[attr-defined]  # what is read on the way is part of the block's time
        if len(missing) > decoder.most_pending:  # type: ignore[attr-defined]
            self._forward(missing[:-1], logits=0)
            del missing[:-1]
        uniforms = [choose.uniform() for _ in range(gamma)] if temperature else []
        cache = self._cropped(decoder)
        options = {"temperature": temperature, "uniforms": uniforms, "since": since}
        made = guess(missing, cache, gamma, real=self._draft.rows, **options)
        if made is None:
            return None
        self._fed += missing
        self._block = made.on_device
        return DeviceProposal(made, choose.row_length)

    def _settle(self) -> None:
        """Count what was fed of the last block, as far as the host knows it."""
        block, self._block = self._block, None
        if block is not None and block.arrived:
            for token in block.read()[:-1]:
                if token < 0:  # what followed a damaged row was not this
                    break
                self._fed.append(token)

    def _cropped(self, decoder: Decoder) -> KVCache:
        """The cache, with what was fed and nothing else."""
        self._settle()
        if self._cache is None:
            self._cache = decoder.new_cache(self._draft.max_positions)
        self._cache.crop(len(self._fed))
        return self._cache

    def _roll_back(self, tokens: Sequence[int]) -> None:
        """Keep what was fed only as far as it is the conversation, and never its last token: its row is needed."""
        self._agreed = self._same(tokens)
        del self._fed[self._agreed :]

    def _same(self, tokens: Sequence[int]) -> int:
        """How many leading tokens, the last one aside, are in the cache."""
        self._settle()
        fed = self._fed
        end = min(len(fed), len(tokens) - 1)
        same = min(self._agreed, end)
        while same < end and fed[same] == tokens[same]:
            same += 1
        return same

    def _forward(self, tokens: Sequence[int], *, logits: int = 1) -> FloatArray:
        """Feed `tokens` and return the last `logits` (0 or 1) of them's rows: float32 [logits, vocab_rows]."""
        decoder, fed = self._draft.decoder, self._fed
        if decoder is None:
            raise DraftError(f"draft {self._draft.name} is not loaded.")
        cache = self._cropped(decoder)
        for begin in range(0, len(tokens), CHUNK):
            part = tokens[begin : begin + CHUNK]
            output = decoder.forward(part, cache, logits=logits if begin + CHUNK >= len(tokens) else 0)
            fed.extend(part)
        return output.logits

    def crop(self, length: int) -> None:
        self._settle()
        self._agreed = min(self._agreed, length)
        self._known = min(self._known, length)
        del self._fed[length:]

    def close(self) -> None:
        self._cache = None
        self.crop(0)
