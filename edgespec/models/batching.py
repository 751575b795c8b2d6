"""What engines do alike with the parts of a batched forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from edgespec.errors import EdgespecError, ModelError
from edgespec.models.base import Decoder, FloatArray, ForwardOutput, Part

SLOTS = (1, 2, 4, 8, 16)  # sequences that a forward may be prepared for
_Ready = TypeVar("_Ready")


class PartError(ModelError):
    """One of several parts of a batch cannot run, so nothing was computed; the others may run without it.

    part: its index. error: what is wrong with it.
    """

    def __init__(self, part: int, error: EdgespecError) -> None:
        super().__init__(str(error))
        self.part, self.error = part, error


def ready_parts(parts: Sequence[Part], check: Callable[[Part], _Ready]) -> list[_Ready]:
    """What `check` makes of each part; positions for all of their tokens are writable then.

    check: raises ModelError or ValueError for a part that cannot run. Raises ValueError for a cache that occurs twice,
    PartError for the first part that cannot run or whose cache refuses the positions; of a single part, the error
    itself. What else a cache raises (a device whose memory is out) is no part's fault, and raised as it is.
    """
    if len({id(part.cache) for part in parts}) != len(parts):
        raise ValueError("a batch may contain each cache only once: both parts would write the same positions")
    ready = [_asked(parts, index, check) for index in range(len(parts))]
    for index in range(len(parts)):
        _asked(parts, index, _reserve)
    return ready


def _asked(parts: Sequence[Part], index: int, ask: Callable[[Part], _Ready]) -> _Ready:
    try:
        return ask(parts[index])
    except (EdgespecError, ValueError) as error:
        if len(parts) == 1:
            raise
        raise PartError(index, error if isinstance(error, EdgespecError) else ModelError(str(error))) from error


def _reserve(part: Part) -> None:
    part.cache.reserve(part.cache.length + len(part.tokens))


def check_slots(slots: int) -> None:
    """Raises ValueError for a number of sequences that no forward is prepared for."""
    if slots not in SLOTS:
        raise ValueError(f"a batch has {', '.join(map(str, SLOTS[:-1]))} or {SLOTS[-1]} slots, not {slots}")


def one_after_another(decoder: Decoder, parts: Sequence[Part], check: Callable[[Part], object]) -> list[ForwardOutput]:
    """`Decoder.forward_batch` by one forward for each part. check: see `ready_parts`."""
    ready_parts(parts, check)
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
