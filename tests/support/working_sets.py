"""What tests of the working set share: drafts that read files, and what is held."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from drafts.base import LoadControl, Slot
from edgespec.errors import DraftError
from edgespec.memory.working_set import State, WorkingSet
from tests.support.loadables import WAIT, address


class FileDraft:
    """A Loadable that reads its weights from a file into its slot, as heads do, and checks them.

    The file is filled with one number. size: that it must have.
    """

    kind = "head"

    def __init__(self, name: str, path: Path, size: int, number: int) -> None:
        self.name = name
        self.path = path
        self.number = number
        self.slot_bytes = self.buffer_bytes = size
        self.weights: np.ndarray | None = None
        self.addresses: list[int] = []
        self.users = 0
        self.problems: list[str] = []
        path.write_bytes(bytes([number]) * size)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def loaded(self) -> bool:
        return self.weights is not None

    def load(self, slot: Slot, control: LoadControl) -> None:
        buffer = slot.buffer[: self.buffer_bytes]
        fd = os.open(self.path, os.O_RDONLY)
        try:
            control.read(fd, buffer, 0)
        finally:
            os.close(fd)
        weights = np.frombuffer(buffer, np.uint8)
        if not (weights[::997] == self.number).all():  # a comparison of all would take memory of its own
            raise DraftError(f"{self.path}: holds other weights")
        self.addresses.append(address(buffer))
        self.weights = weights

    def unload(self) -> None:
        if self.users:
            self.problems.append(f"{self.name} is unloaded in use")
        if self.weights is not None:
            self.weights[:] = 255  # whoever still looks at them notices
        self.weights = None

    def use(self) -> None:
        self.users += 1
        if self.weights is None or self.weights[0] != self.number or self.weights[-1] != self.number:
            self.problems.append(f"{self.name} is used but not there")
        self.users -= 1


def hold(working_set: WorkingSet, *names: str, **options: Any) -> None:
    """Retarget, and wait until nothing is left to do."""
    working_set.retarget(names, reason="test", **options)
    assert working_set.idle(WAIT)


def resident(working_set: WorkingSet) -> set[str]:
    """What a lease sees now."""
    with working_set.acquire() as lease:
        return set(lease.names)


def state(working_set: WorkingSet, name: str) -> State:
    return working_set.states()[name].state
