"""What both engines do alike with the parts of a batched forward."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.models.base import Decoder, ForwardOutput, Part


def check_distinct(parts: Sequence[Part]) -> None:
    """Raises ValueError if a cache occurs twice: its positions would be written by both."""
    if len({id(part.cache) for part in parts}) != len(parts):
        raise ValueError("a batch may contain each cache only once")


def one_after_another(decoder: Decoder, parts: Sequence[Part]) -> list[ForwardOutput]:
    """`Decoder.forward_batch` by one forward for each part."""
    check_distinct(parts)
    lengths = [part.cache.length for part in parts]
    try:
        return [decoder.forward(part.tokens, part.cache, logits=part.logits, hidden=part.hidden) for part in parts]
    except BaseException:
        for part, length in zip(parts, lengths, strict=True):
            part.cache.crop(length)
        raise
