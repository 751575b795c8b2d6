"""Guesses that stay on the device until the target has judged them there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgespec.models.cuda import looks


class DeviceTokens(Sequence[int]):
    """Ids int64 [n] on a device, -1 where a draft's row was damaged. They arrive with the look at what the target says.

    Read earlier, on the host, they cost a look of their own. `known + guesses` is what a target is given.
    """

    def __init__(self, ids: Tensor) -> None:
        """ids: nobody writes to them any more."""
        self.ids = ids
        self._read: list[int] | None = None

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @property
    def arrived(self) -> bool:
        """Whether reading them costs nothing now."""
        return self._read is not None

    def arrive(self, ids: list[int]) -> None:
        self._read = ids

    def read(self) -> list[int]:
        if self._read is None:
            self._read = [int(token) for token in looks.look(self.ids)]
        return self._read

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def __getitem__(self, index: Any) -> Any:
        return self.read()[index]

    def __radd__(self, known: list[int]) -> Continued:
        return Continued(known, self)


class Continued(Sequence[int]):
    """Tokens that the host knows, and guesses after them that it need not."""

    def __init__(self, known: list[int], guesses: DeviceTokens) -> None:
        self.known, self.guesses = known, guesses

    def __len__(self) -> int:
        return len(self.known) + len(self.guesses)

    def __getitem__(self, index: Any) -> Any:
        return (self.known + self.guesses.read())[index]
