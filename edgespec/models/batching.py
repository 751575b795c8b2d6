"""What engines do alike with the parts of a batched forward."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.errors import EdgespecError, ModelError
from edgespec.models.base import Decoder, FloatArray, ForwardOutput, Part


class PartError(ModelError):
    """One part of a batch cannot have the memory that it needs, so nothing was computed; the others may run without it.

    part: its index. error: what its cache has raised, which is the cause too.
    """

    def __init__(self, part: int, error: EdgespecError) -> None:
        super().__init__(str(error))
        self.part, self.error = part, error


def check_distinct(parts: Sequence[Part]) -> None:
    """Raises ValueError if a cache occurs twice: its positions would be written by both."""
    if len({id(part.cache) for part in parts}) != len(parts):
        raise ValueError("a batch may contain each cache only once")


def reserve_parts(parts: Sequence[Part]) -> None:
    """Make the positions writable that the parts will append. Raises PartError for the first one that cannot have them.

    What a cache raises that is no EdgespecError (a device whose memory is out) is nobody's fault, and raised as it is.
    """
    for index, part in enumerate(parts):
        length = part.cache.length + len(part.tokens)
        try:
            if length <= part.cache.capacity:  # else the forward refuses it
                part.cache.reserve(length)
        except EdgespecError as error:
            raise PartError(index, error) from error


def one_after_another(decoder: Decoder, parts: Sequence[Part]) -> list[ForwardOutput]:
    """`Decoder.forward_batch` by one forward for each part."""
    check_distinct(parts)
    reserve_parts(parts)
    lengths = [part.cache.length for part in parts]
    try:
        return [decoder.forward(part.tokens, part.cache, logits=part.logits, hidden=part.hidden) for part in parts]
    except BaseException:
        for part, length in zip(parts, lengths, strict=True):
            part.cache.crop(length)
        raise


def wait_for(logits: FloatArray) -> object:
    """Return when the forward that gave these is over; what its device says of it, None if it was over before."""
    wait = getattr(logits, "wait", None)
    return None if wait is None else wait()
