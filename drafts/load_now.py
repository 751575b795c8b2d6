"""Loading a draft at once, where there is no working set to do it: evaluation, training, tests."""

from __future__ import annotations

import mmap
import os
from typing import TypeVar

from drafts.base import Loadable

AnyLoadable = TypeVar("AnyLoadable", bound=Loadable)


class OwnSlot:
    """A slot for one draft alone, made when it is asked for."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = memoryview(mmap.mmap(-1, nbytes) if nbytes else bytearray())


class Unhindered:
    """The control of a load that nobody calls off and nothing slows down."""

    def checkpoint(self) -> None:
        pass

    def read(self, fd: int, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], offset + done)
            if count == 0:
                raise OSError(f"the file ends at {offset + done}, {offset + len(into)} bytes were expected")
            done += count


def load_now(draft: AnyLoadable) -> AnyLoadable:
    """Load `draft` into memory of its own, unless it is loaded. Raises as `Loadable.load`. Returns it."""
    if not draft.loaded:
        draft.load(OwnSlot(draft.buffer_bytes), Unhindered())
    return draft
