"""Results in OpenAI's shapes: whole answers, chunks of a stream, usage, log probabilities."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgespec import __version__
from edgespec.results import GenerationResult, TextDelta, TokenLogprob

if TYPE_CHECKING:
    from edgespec.models.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # OpenAI's word for minus infinity, which JSON has not
FINGERPRINT = f"edgespec-{__version__}"


@dataclass(frozen=True)
class Shape:
    """Of one answer: what stays the same in all its chunks. chat: of /v1/chat/completions, else of /v1/completions.

    include_usage: whether a stream ends with a chunk of usage; the others then say that they have none.
    """

    chat: bool
    model: str
    tokenizer: Tokenizer
    ignored: list[str] = field(default_factory=list)
    include_usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, result: GenerationResult, cancelled: str | None) -> dict[str, Any]:
        """The answer in one object. cancelled: why it ended early, None if it did not."""
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
        else:
            choice["text"] = result.text
        choice["logprobs"] = self.logprobs(result.logprobs)
        choice["finish_reason"] = finish_reason(result.finish_reason)
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            **self._head(kind),
            "choices": [choice],
            "usage": usage(result),
            "edgespec": self.summary(result, cancelled),
        }

    def first(self) -> dict[str, Any]:
        """A chat's first chunk: who speaks."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, "", None)

    def piece(self, delta: TextDelta, offset: int = 0) -> dict[str, Any]:
        """One piece of text, with the log probabilities of its tokens. offset: characters of the tokens before it.

        edgespec.guessed: how many characters of it the draft guessed (those come first).
        """
        note = {
            "draft": delta.draft,
            "tokens": len(delta.token_ids),
            "accepted": delta.accepted,
            "guessed": guessed_characters(delta, self.tokenizer),
        }
        logprobs = self.logprobs(delta.logprobs or None, offset)
        return {**self._chunk({"content": delta.text}, delta.text, None, logprobs), "edgespec": note}

    def length(self, delta: TextDelta) -> int:
        """Characters of the tokens of a piece, as `text_offset` of a completion counts them."""
        if self.chat or not delta.logprobs:
            return 0
        return sum(len(_token(self.tokenizer, one.token_id)[0]) for one in delta.logprobs)

    def last(self, result: GenerationResult, cancelled: str | None) -> dict[str, Any]:
        """The last chunk: why it ended, and what the drafts did."""
        chunk = self._chunk({}, "", finish_reason(result.finish_reason))
        return {**chunk, "edgespec": self.summary(result, cancelled)}

    def usage_chunk(self, result: GenerationResult) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage(result)}

    def summary(self, result: GenerationResult, cancelled: str | None) -> dict[str, Any]:
        """The `edgespec` object: what the drafts did for this answer."""
        stats = result.stats
        rounds = sum(stats.draft_share.values()) or 1
        histogram = stats.gamma_histogram
        summary: dict[str, Any] = {
            "draft_share": {name: round(n / rounds, 4) for name, n in stats.draft_share.items() if n},
            "gamma": {str(gamma): count for gamma, count in sorted(histogram.items())},
            "gamma_mean": _mean(histogram),
            "acceptance_rate": round(stats.acceptance_rate, 4),
            "accepted_tokens": stats.accepted_tokens,
            "proposed_tokens": stats.proposed_tokens,
            "tokens_per_second": round(stats.tokens_per_second, 2),
            "mean_tokens_per_round": round(stats.mean_tokens_per_round, 3),
            "time_to_first_token_s": round(stats.time_to_first_token_s, 4),
        }
        if cancelled is not None:
            summary["cancelled"] = cancelled
        if self.ignored:
            summary["ignored"] = self.ignored
        return summary

    def logprobs(self, ones: Sequence[TokenLogprob] | None, offset: int = 0) -> dict[str, Any] | None:
        """In the endpoint's form; None unless asked for. offset: characters of the tokens before them."""
        if ones is None:
            return None
        return chat_logprobs(ones, self.tokenizer) if self.chat else completion_logprobs(ones, self.tokenizer, offset)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(
        self, delta: dict[str, Any], text: str, finish: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": finish}
        choice["delta" if self.chat else "text"] = delta if self.chat else text
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], **({"usage": None} if self.include_usage else {})}


def finish_reason(reason: str) -> str:
    """OpenAI has no word for an answer that was ended from outside: like one at its limit, it is cut."""
    return "stop" if reason == "stop" else "length"


def usage(result: GenerationResult) -> dict[str, Any]:
    """Tokens read and written; cached: those of the prompt that had been read before."""
    stats, written = result.stats, len(result.token_ids)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": result.prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
    }


def guessed_characters(delta: TextDelta, tokenizer: Tokenizer) -> int:
    """Characters of `delta.text` that a draft guessed; accepted tokens come first, the target's own token last."""
    if delta.draft is None or not delta.accepted:
        return 0
    if delta.accepted >= len(delta.token_ids):
        return len(delta.text)
    guess = tokenizer.decode(delta.token_ids[: delta.accepted])
    if delta.text.startswith(guess):
        return len(guess)
    # Text that was held back before, or half a character: in proportion.
    return len(delta.text) * delta.accepted // len(delta.token_ids)


def chat_logprobs(ones: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text, data = _token(tokenizer, token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": data}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(token, value) for token, value in one.top]}
        for one in ones
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(ones: Sequence[TokenLogprob], tokenizer: Tokenizer, offset: int = 0) -> dict[str, Any]:
    """offset: where the first of them begins, in characters of all tokens' texts."""
    texts = [_token(tokenizer, one.token_id)[0] for one in ones]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(one.logprob) for one in ones],
        "top_logprobs": [
            {_token(tokenizer, token)[0]: _finite(value) for token, value in one.top} if one.top else None
            for one in ones
        ],
        "text_offset": list(itertools.accumulate(map(len, texts), initial=offset))[:-1],
    }


def _token(tokenizer: Tokenizer, token_id: int) -> tuple[str, list[int] | None]:
    """A token's text and bytes. Part of a character is told as `bytes:\\xe2`, as OpenAI does."""
    data = tokenizer.token_bytes(token_id)
    if data is None:
        return tokenizer.decode([token_id], skip_special=False), None
    try:
        return data.decode(), list(data)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB


def _mean(histogram: dict[int, int]) -> float:
    rounds = sum(histogram.values())
    return round(sum(gamma * count for gamma, count in histogram.items()) / rounds, 3) if rounds else 0.0
