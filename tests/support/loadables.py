"""Drafts whose loads follow a script: gated, failing, hanging, reading a file. They notice what must not happen."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafts.base import LoadControl, Slot
from edgespec.memory.working_set import WorkingSetEvent

WAIT = 10.0  # seconds; far more than anything takes


class ScriptedDraft:
    """A Loadable. Its load waits for `gate`, which is open at first, in steps between checkpoints.

    errors: raised by the next loads, in order. hang: an event that a load waits for as a dead storage does, without
    any checkpoint. at_end: called when all is read. asserts: no load while loaded, no unload while `users` use it.
    """

    kind = "head"

    def __init__(self, name: str, *, slot_bytes: int = 100, buffer_bytes: int = 0, file: Path | None = None) -> None:
        self.name = name
        self.slot_bytes = slot_bytes
        self.buffer_bytes = buffer_bytes
        self.files = () if file is None else (file,)
        self.loaded = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.errors: list[BaseException] = []
        self.hang: threading.Event | None = None
        self.at_end: Callable[[], None] | None = None
        self.users = 0
        self.loads = 0
        self.unloads = 0
        self.addresses: list[int] = []
        self.problems: list[str] = []
        self._inside = threading.Lock()

    def load(self, slot: Slot, control: LoadControl) -> None:
        if not self._inside.acquire(blocking=False):
            self.problems.append(f"{self.name} is loaded twice at once")
        try:
            self.loads += 1
            if self.loaded:
                self.problems.append(f"{self.name} was loaded already")
            self.entered.set()
            if self.hang is not None:
                self._hang(control)
            while not self.gate.wait(0.002):
                control.checkpoint()
            control.checkpoint()
            if self.errors:
                raise self.errors.pop(0)
            self._read(slot, control)
            if self.at_end is not None:
                self.at_end()
            self.loaded = True
        finally:
            self._inside.release()

    def _hang(self, control: Any) -> None:
        control.reading = True  # as inside a read that does not come back
        assert self.hang is not None
        self.hang.wait(WAIT)
        control.reading = False

    def _read(self, slot: Slot, control: LoadControl) -> None:
        for file in self.files:
            fd = os.open(file, os.O_RDONLY)
            try:
                control.read(fd, slot.buffer[: self.buffer_bytes], 0)
            finally:
                os.close(fd)
            self.addresses.append(address(slot.buffer))

    def unload(self) -> None:
        if self.users:
            self.problems.append(f"{self.name} is unloaded while it is used")
        if not self.loaded:
            self.problems.append(f"{self.name} is unloaded twice")
        self.loaded = False
        self.unloads += 1

    def use(self) -> None:
        """As a round does, under a lease."""
        self.users += 1
        if not self.loaded:
            self.problems.append(f"{self.name} is used but not loaded")
        self.users -= 1


def address(buffer: memoryview) -> int:
    """Where a buffer's bytes are."""
    import numpy as np

    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Events:
    """Collects events of a working set; `wait` for one of a kind."""

    def __init__(self) -> None:
        self.all: list[WorkingSetEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: WorkingSetEvent) -> None:
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def wait(self, kind: str, count: int = 1) -> WorkingSetEvent:
        with self._changed:
            found = self._changed.wait_for(lambda: len(self.of(kind)) >= count, WAIT)
        assert found, f"no {kind}: {self.all}"
        return self.of(kind)[count - 1]

    def of(self, kind: str) -> list[WorkingSetEvent]:
        return [event for event in self.all if event.kind == kind]
