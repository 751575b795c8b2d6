"""An ordinary checkpoint with the target's tokenizer as a draft."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafts.base import Choose, FloatArray, Proposal

if TYPE_CHECKING:
    from drafts.states import HiddenStates
    from edgespec.models.base import Decoder, KVCache
    from edgespec.models.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

CHUNK = 256  # tokens of one forward while catching up


class StandaloneDraft:
    """A smaller decoder that guesses token by token. It owns `decoder`.

    token_count: the target's tokens; the draft's embedding may have more rows (padding, added tokens: never proposed)
    or fewer (a conversation that holds a token without a row is not drafted). max_positions: where the draft ends, at
    most its own limit; a longer conversation goes on without it, after one log line.
    """

    kind = "standalone"
    reads_hidden = False

    def __init__(self, name: str, decoder: Decoder, token_count: int, *, max_positions: int | None = None) -> None:
        if token_count < 1 or (max_positions is not None and max_positions < 1):
            raise ValueError(f"draft {name}: {token_count} tokens, {max_positions} positions")
        limit = decoder.spec.max_positions
        self.name = name
        self.decoder = decoder
        self.rows = min(token_count, decoder.spec.vocab_size)
        self.max_positions = limit if max_positions is None else min(limit, max_positions)

    @classmethod
    def for_target(
        cls, name: str, decoder: Decoder, tokenizer: Tokenizer, target: Tokenizer, *, max_positions: int | None = None
    ) -> StandaloneDraft:
        """The draft, after its tokens were compared with the target's; DraftError names the first id that differs."""
        from edgespec.models.tokenizer import compare_vocabularies

        compare_vocabularies(target, tokenizer)
        return cls(name, decoder, target.size, max_positions=max_positions)

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes

    def open(self, states: HiddenStates | None = None) -> StandaloneSession:
        return StandaloneSession(self)

    def close(self) -> None:
        self.decoder.close()


class StandaloneSession:
    """The draft's own KV of one conversation.

    `_fed` lists the tokens whose KV is in the cache, the unjudged ones of the last round included; the first `_agreed`
    of them are known to be the conversation's. Both grow only after the forward that makes them true, and every forward
    starts by cropping the cache to `_fed`: an exception in between costs a few positions, nothing else.
    """

    def __init__(self, draft: StandaloneDraft) -> None:
        self._draft = draft
        self._cache: KVCache | None = None
        self._fed: list[int] = []
        self._agreed = 0
        self._known = 0  # tokens already seen to have a row in this draft's embedding
        self._told = False

    def level(self, tokens: Sequence[int]) -> int:
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

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        """At most `gamma` forwards (more only while a long absence is caught up, in chunks)."""
        proposal = Proposal()
        # The last guess needs no KV of its own: `tokens` and gamma - 1 guesses must fit.
        gamma = min(gamma, self._draft.max_positions - len(tokens) + 1)
        if gamma < 1 or not self._has_rows(tokens):
            return proposal
        self._roll_back(tokens)
        missing = list(tokens[len(self._fed) :])
        while len(proposal) < gamma:
            token, q = choose(self._forward(missing), proposal.tokens)
            proposal.tokens.append(token)
            proposal.rows.append(q)
            if token >= self._draft.rows:  # the request's bias forces a token that this draft cannot read
                break
            missing = [token]
        return proposal

    def _roll_back(self, tokens: Sequence[int]) -> None:
        """Keep what was fed only as far as it is the conversation, and never its last token: its row is needed."""
        fed = self._fed
        end = min(len(fed), len(tokens) - 1)
        same = min(self._agreed, end)
        while same < end and fed[same] == tokens[same]:
            same += 1
        self._agreed = same
        del fed[same:]

    def _forward(self, tokens: Sequence[int]) -> FloatArray:
        """Feed `tokens` and return the last one's logits row."""
        decoder, fed = self._draft.decoder, self._fed
        if self._cache is None:
            self._cache = decoder.new_cache(self._draft.max_positions)
        cache = self._cache
        cache.crop(len(fed))
        for begin in range(0, len(tokens), CHUNK):
            part = tokens[begin : begin + CHUNK]
            output = decoder.forward(part, cache, logits=int(begin + CHUNK >= len(tokens)))
            fed.extend(part)
        return output.logits[0]

    def crop(self, length: int) -> None:
        self._agreed = min(self._agreed, length)
        self._known = min(self._known, length)
        del self._fed[length:]

    def close(self) -> None:
        self._cache = None
        self.crop(0)
