"""A proposal that stays where the draft made it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from drafts.base import FloatArray, InvalidLogits, Proposal

if TYPE_CHECKING:
    from edgespec.models.cuda.draft import Guesses
    from edgespec.models.cuda.guesses import DeviceTokens


class DeviceProposal(Proposal):
    """A block on the device, as long as it was asked for.

    A target on the same device takes `guesses` as they are, so nobody waits for the draft. `tokens` and `rows` look at
    them when they are asked for; then the block ends before the first row that was damaged. Raises InvalidLogits if
    that is the first one.
    """

    __slots__ = ("_guesses", "_made", "_row_length")

    def __init__(self, guesses: Guesses, row_length: int) -> None:
        """row_length: of the rows q, which are wider than the draft's own."""
        self._guesses, self._row_length = guesses, row_length
        self._made: tuple[list[int], list[FloatArray | None]] | None = None
        self.confidences = []

    @property
    def guesses(self) -> list[int] | DeviceTokens:
        return self._guesses.on_device if self._made is None else self.tokens

    @property
    def seconds(self) -> float | None:
        """What the block took on the device, when somebody has looked; None if that is not known."""
        return self._guesses.seconds

    @property
    def tokens(self) -> list[int]:  # type: ignore[override]
        return self._look()[0]

    @tokens.setter
    def tokens(self, tokens: list[int]) -> None:
        self._made = tokens, self._look()[1]

    @property
    def rows(self) -> list[FloatArray | None]:  # type: ignore[override]
        return self._look()[1]

    def __len__(self) -> int:
        return len(self._guesses.on_device) if self._made is None else len(self._made[0])

    def _look(self) -> tuple[list[int], list[FloatArray | None]]:
        if self._made is None:
            tokens, laws = self._guesses.tokens, self._guesses.rows
            sound = next((at for at, token in enumerate(tokens) if token < 0), len(tokens))
            if not sound:
                raise InvalidLogits("the draft's first row has no best token")
            rows: list[FloatArray | None] = [None] * sound
            for at, law in enumerate(() if laws is None else laws[:sound]):
                rows[at] = wide = np.zeros(self._row_length, np.float32)
                wide[: len(law)] = law
            self._made = tokens[:sound], rows
        return self._made
