"""What an answer must be, written as plainly as possible and independently of the product's code: no increments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from edgespec.decoding.params import SamplingParams
from edgespec.models.tokenizer import Tokenizer


def shown_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bytes]:
    return [b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i) or b"" for i in ids]


def is_open(data: bytes) -> bool:
    """Whether further bytes could still complete the character at the end."""
    broken = data.decode("utf-8", "replace").count("\ufffd")
    tails = (bytes(t) for n in (1, 2, 3) for t in itertools.product((0x80, 0x90, 0xA0, 0xBF), repeat=n))
    return any((data + tail).decode("utf-8", "replace").count("\ufffd") < broken for tail in tails)


def certain_text(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return text[:-1] if is_open(data) else text


def contributing(pieces: Sequence[bytes], length: int) -> int:
    """How many tokens it takes until every byte of the first `length` characters is there."""
    data, characters, at = b"".join(pieces), [], 0  # characters: where each one ends
    while at < len(data):
        try:
            good, bad = data[at:], b""
            good.decode("utf-8")
        except UnicodeDecodeError as error:
            good, bad = data[at : at + error.start], data[at + error.start : at + error.end]
        for character in good.decode("utf-8"):
            at += len(character.encode("utf-8"))
            characters.append(at)
        if bad:
            at += len(bad)
            characters.append(at)
    needed = characters[length - 1] if length else 0
    count = 0
    while len(b"".join(pieces[:count])) < needed:
        count += 1
    return count


Expected = tuple[str, list[int], str]


def reference(
    tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams, stop_ids: set[int], last: str
) -> Expected:
    """What the answer must be if the target says `ids` and the caller then ends it with `last`."""
    if params.max_new_tokens == 0:
        return "", [], "length"
    special = {i for s in params.stop if (i := tokenizer.special_tokens.get(s)) is not None}
    stop_ids = stop_ids | set(params.stop_token_ids)
    before = ""
    for count in range(1, len(ids) + 1):
        token, enough = ids[count - 1], count >= params.min_new_tokens
        by_id = token in stop_ids or (token in special and enough)
        pieces = shown_bytes(tokenizer, ids[: count - 1] if by_id else ids[:count])
        at_limit = count >= params.max_new_tokens
        data = b"".join(pieces)
        texts = [] if by_id else [certain_text(data)]
        if by_id or at_limit or count == len(ids):
            texts.append(data.decode("utf-8", "replace"))  # nothing will complete an open character
        for text in texts:
            starts = [
                at
                for s in params.stop
                for at in range(len(text))
                if text.startswith(s, at) and at + len(s) > len(before)
            ]
            if starts and enough:
                cut = min(starts)
                return text[:cut], list(ids[: contributing(pieces, cut)]), "stop"
            before = text
        if by_id or at_limit:
            return before, list(ids[:count]), "stop" if by_id else "length"
    return before, list(ids), last
