"""The one place where tokens become an answer: EOS, stop strings and limits, token by token, with one cut for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.decoding.params import SamplingParams
from edgespec.decoding.text import NO_TEXT, IncrementalDecoder
from edgespec.results import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from edgespec.models.tokenizer import Tokenizer


class Answer:
    """The answer of one request while it grows. A round pushes its tokens one by one and stops at the first reason.

    Text, token ids, drafts and logprobs always end at the same token:
    - a stop id ends it ("stop"); the id stays in `token_ids`, its text is not shown;
    - a stop string ends it ("stop") right before the earliest one; `token_ids` keep the tokens that contribute to the
      text that is left. It counts if it is completed inside the answer, by token number min_new_tokens or a later one.
      A stop string that is the text of a special token (which is never shown) works as a stop id;
    - max_new_tokens ends it ("length"), unless that very token ends it otherwise.

    stop_ids: what ends the answer: EOS ids (the caller leaves them out for ignore_eos) and params.stop_token_ids, which
    are added here in any case.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, *, stop_ids: frozenset[int]) -> None:
        self.token_ids: list[int] = []
        self.drafts: list[str | None] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None if params.max_new_tokens > 0 else "length"
        self._params = params
        self._stop_ids = stop_ids.union(params.stop_token_ids)
        special = tokenizer.special_tokens
        self._stop_specials = frozenset(special[text] for text in params.stop if text in special)
        self._stops = [_StopString(text) for text in params.stop]
        self._decoder = IncrementalDecoder(tokenizer)
        self._pieces: list[str] = []
        self._length = 0  # characters in _pieces
        self._fresh: list[str] = []  # the end of _pieces that was not taken
        self._taken_length = 0
        self._taken_tokens = 0
        self._scanned = 0  # tokens whose text is released; those after _taken_tokens have none

    @property
    def text(self) -> str:
        """All text so far; before the end it may hold the beginning of a stop string."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, token: int, draft: str | None = None, logprob: TokenLogprob | None = None) -> FinishReason | None:
        """Add one token; returns why the answer is over now, or None. RuntimeError if it was over before."""
        if self.finish_reason is not None:
            raise RuntimeError(f"The answer is over ({self.finish_reason}); token {token} does not belong to it.")
        self.token_ids.append(token)
        self.drafts.append(draft)
        if self.logprobs is not None and logprob is not None:
            self.logprobs.append(logprob)
        if token in self._stop_ids or (token in self._stop_specials and self._long_enough):
            return self.finish("stop")
        self._add_text(self._decoder.push(token))
        if self.finish_reason is None and len(self.token_ids) >= self._params.max_new_tokens:
            return self.finish("length")
        return self.finish_reason

    def finish(self, reason: FinishReason) -> FinishReason:
        """End the answer, showing what is left of the text. Returns the reason that stands: the first one, or "stop" if
        the flushed text completes a stop string."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._add_text(self._decoder.flush())
        return self.finish_reason

    def take(self) -> tuple[str, list[int], list[str | None]]:
        """Text, token ids and drafts that are certain and were not taken before.

        Held back: text that may turn out to be a stop string, and tokens whose text is not all released. All pieces
        together equal the final text, ids and drafts.
        """
        text = self._take_text()
        begin, end = self._taken_tokens, self._certain_tokens()
        self._taken_tokens = end
        return text, self.token_ids[begin:end], self.drafts[begin:end]

    @property
    def taken(self) -> int:
        """How many tokens were taken so far."""
        return self._taken_tokens

    def _take_text(self) -> str:
        held = 0 if self.finish_reason else max((stop.matched for stop in self._stops), default=0)
        count = self._length - held - self._taken_length
        if count <= 0:
            return ""
        fresh = "".join(self._fresh)
        self._fresh = [fresh[count:]]
        self._taken_length += count
        return fresh[:count]

    def _certain_tokens(self) -> int:
        """How many tokens no later cut can remove."""
        if self.finish_reason is not None:
            return len(self.token_ids)
        certain, spans = self._taken_tokens, self._decoder.spans
        while self._scanned < len(spans) and spans[self._scanned][1] <= self._taken_length:
            # A token without text falls to a stop string right after it, so it waits for the next one with text.
            if spans[self._scanned] != NO_TEXT or not self._stops:
                certain = self._scanned + 1
            self._scanned += 1
        return certain

    @property
    def _long_enough(self) -> bool:
        return len(self.token_ids) >= self._params.min_new_tokens

    def _add_text(self, piece: str) -> None:
        start = self._stop_start(piece)
        self._pieces.append(piece)
        self._fresh.append(piece)
        self._length += len(piece)
        if start is not None:
            self._cut(start)

    def _stop_start(self, piece: str) -> int | None:
        """Where the earliest stop string that `piece` completes begins, in the whole text."""
        starts = [self._length + end - len(stop.text) for stop in self._stops for end in stop.feed(piece)]
        return min(starts, default=None) if self._long_enough else None

    def _cut(self, length: int) -> None:
        """Keep the first `length` characters, and the tokens that contribute to them."""
        text = self.text[:length]
        self._pieces, self._fresh, self._length = [text], [text[self._taken_length :]], length
        spans = self._decoder.spans  # one a token, but for a stop id at the end
        keep = len(spans)
        while keep and spans[keep - 1][0] >= length:
            keep -= 1
        del self.token_ids[keep:], self.drafts[keep:]
        if self.logprobs is not None:
            del self.logprobs[keep:]
        self.finish_reason = "stop"


class _StopString:
    """One stop string, matched character by character as the text grows (Knuth-Morris-Pratt: linear in the text).

    matched: how many of its first characters the text ends with; always a proper prefix.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0, 0]  # [n]: the longest proper prefix of text[:n] that text[:n] also ends with
        length = 0
        for n in range(1, len(text)):
            length = self._extend(length, text[n])
            self._shorter.append(length)

    def _extend(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._shorter[length]
        return length + (self.text[length] == character)

    def feed(self, piece: str) -> list[int]:
        """Add `piece` to the text; returns the places in it (characters consumed) where the stop string is complete."""
        if not self.matched and self.text[0] not in piece:
            return []
        ends = []
        for place, character in enumerate(piece, 1):
            self.matched = self._extend(self.matched, character)
            if self.matched == len(self.text):
                ends.append(place)
                self.matched = self._shorter[self.matched]
        return ends
