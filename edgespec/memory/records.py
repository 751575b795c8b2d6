"""What the working set remembers: of each draft, of a job of the loader, of a failure, of a lease."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgespec.errors import DraftError, EdgespecError
from edgespec.memory.loader import Control
from edgespec.memory.slots import MemorySlot
from edgespec.memory.states import DraftState, State

if TYPE_CHECKING:
    from drafts.base import Loadable

Stamps = tuple[object, ...]
_LONGEST_WAIT = 3600.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a draft did not load, and when it may be tried again.

    due: not before that (seconds of the clock); wait: how long that was, twice as long after each failure. stamps: of
    its files when they were found damaged or wrong: it is tried again only when they have changed. None: whatever it
    was may have passed by itself.
    """

    cause: str
    due: float
    wait: float
    stamps: Stamps | None = None

    @classmethod
    def after(cls, last: Failure | None, error: BaseException, now: float, first: float, stamps: Stamps) -> Failure:
        """The failure that follows `last`. first: seconds to wait after the first one."""
        wait = first if last is None else min(2 * last.wait, max(first, _LONGEST_WAIT))
        return cls(cause_of(error), now + wait, wait, stamps if isinstance(error, DraftError) else None)

    @classmethod
    def for_good(cls, cause: str) -> Failure:
        return cls(cause, math.inf, math.inf)

    def postponed(self, now: float) -> Failure:
        return Failure(self.cause, now + self.wait, self.wait, self.stamps)

    def passed(self) -> Failure:
        """Its files have changed: it may be tried at once."""
        return Failure(self.cause, -math.inf, self.wait)


def cause_of(error: BaseException) -> str:
    """The error in words."""
    if isinstance(error, EdgespecError):
        return str(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory for it" + (f" ({error})" if str(error) else "")
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}cannot be read ({error.strerror})"
    return f"{type(error).__name__}: {error}"


def stamps_of(files: Sequence[Path]) -> Stamps:
    """(size, mtime in ns, inode) of each file, None for one that is not there. Waits for the storage."""
    found: list[object] = []
    for file in files:
        try:
            status = file.stat()
            found.append((status.st_size, status.st_mtime_ns, status.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


@dataclass(slots=True, eq=False)
class Record:
    """One draft. Guarded by the working set's lock.

    slot: set from the begin of a load to the end of the unload. unloading: the loader is at it, too late to keep it.
    dropping: it was loaded but never offered. stuck: a thread that was given up is still in its load. unreadable: its
    files could not be read ahead, which is not tried again.
    """

    draft: Loadable
    since: float
    state: State = State.COLD
    reason: str = "not asked for yet"
    load_seconds: float = 0.0
    slot: MemorySlot | None = None
    failure: Failure | None = None
    unloading: bool = False
    dropping: bool = False
    stuck: bool = False
    unreadable: bool = False

    @property
    def name(self) -> str:
        return self.draft.name

    def become(self, state: State, reason: str, now: float) -> None:
        self.state, self.reason, self.since = state, reason, now

    def described(self) -> DraftState:
        slot = None if self.slot is None else self.slot.index
        return DraftState(self.state, self.reason, self.since, self.load_seconds, slot)


JobKind = Literal["load", "evict", "rest", "check", "warm"]


@dataclass(slots=True, eq=False)
class Job:
    """What the loader's thread does now. reason: why. begin: when (seconds of the clock).

    abandoned: its thread was given up, and what it brings is dropped.
    """

    kind: JobKind
    record: Record | None
    control: Control
    reason: str
    begin: float
    slot: MemorySlot | None = None
    abandoned: bool = False

    @property
    def draft(self) -> Record:
        """The record of a job that is about a draft."""
        assert self.record is not None, f"a job {self.kind} about no draft"
        return self.record


class Lease:
    """What was resident when it was taken stays usable until it is released (a context manager does).

    names: the resident drafts. A lease that is forgotten ends when it is collected.
    """

    __slots__ = ("_forget", "_release", "names", "ticket")

    def __init__(self, ticket: int, release: Callable[[int], None], forget: Callable[[int], object]) -> None:
        self.ticket = ticket
        self.names: frozenset[str] = frozenset()
        self._release = release
        self._forget = forget

    def release(self) -> None:
        """The drafts may go now. Idempotent."""
        self._release(self.ticket)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        # The collector may run in a thread that holds the working set's lock: this must not take it.
        self._forget(self.ticket)
