"""Shadows: a draft with weights guesses along, and its guess is compared with what the round emits.

It costs the draft's own steps and no wider forward of the target, so it is the cheap way to find out that another draft
would do better. All shadows together stay within a share of the plain steps' time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from predictor.costs import CostTable

if TYPE_CHECKING:
    from predictor.planner import Candidate

SHARE = 0.015  # of the time of plain steps
EVERY = 8  # rounds between two shadows, where nothing asks for more
_PATIENCE = 2  # shadows without promise, after which they become half as frequent, twice at most
_SAVED_ROUNDS = 128  # what is not spent adds up to the share of this many plain steps
_OWED = 2  # shadows of each draft in the first rounds of a text
_TOKENS = 2  # that a shadow guesses; 1 where many drafts are asked in a hurry
_MEMORY = 0.7  # of what a draft's shadows cost so far, reading up on the text included


class _Purse:
    """What shadows may cost, and cost; one for all texts."""

    __slots__ = ("held", "seconds")

    def __init__(self, held: float) -> None:
        self.held = held  # seconds that may be spent
        self.seconds: dict[str, float] = {}  # what one shadow of a draft took lately


class Shadows:
    """Whose turn it is to guess along in a text, within the share. Not locked: `AutoPlanner` does that.

    beside: the shadows of another text that runs at the same time, out of the same purse.
    """

    def __init__(self, costs: CostTable, beside: Shadows | None = None) -> None:
        self._costs = costs
        self._purse: _Purse = _Purse(SHARE * _SAVED_ROUNDS / 2 * costs.verify(1)) if beside is None else beside._purse
        self._paid: dict[str, float] = {}  # what was taken from the purse for a shadow that runs
        self._turn: dict[str, int] = {}
        self._turns = 0
        self._rounds = EVERY
        self._every = EVERY
        self._fruitless = 0
        self._owed: dict[str, int] | None = None  # None: two for each, once it is known who there is

    def earn(self, part: float = 1.0) -> None:
        """A round begins, which takes this part of a plain step's time or more."""
        step, purse = self._costs.verify(1), self._purse
        purse.held = min(purse.held + part * SHARE * step, SHARE * _SAVED_ROUNDS * step)

    def hurry(self) -> None:
        """A text begins, or turned: ask everybody in the next rounds."""
        self._owed = None
        self._fruitless = 0

    def promised(self, promising: bool) -> None:
        """Whether the draft that was asked may pay. Where none does, asking is all that is spent on drafts."""
        self._fruitless = 0 if promising else self._fruitless + 1

    def relax(self, informed: bool) -> None:
        """Whether something else says, too, how well each draft does: then half as many shadows will do."""
        self._every = 2 * EVERY if informed else EVERY

    def owe(self, name: str) -> None:
        """A draft has just come in: ask it in the next rounds."""
        if self._owed is not None:
            self._owed[name] = _OWED

    def affordable(self, name: str) -> bool:
        """Whether one step of this draft in `EVERY` rounds stays within the share; it has to be probed otherwise."""
        return self._costs.draft(name) <= SHARE * EVERY * self._costs.curve(1)[0]

    def pick(self, able: Sequence[Candidate]) -> Candidate | None:
        """The draft among `able` that guesses along in this round, with how many tokens, or None."""
        self._rounds += 1
        able = [candidate for candidate in able if self.affordable(candidate.name)]
        if not able:
            return None
        if self._owed is None:
            self._owed = {candidate.name: _OWED for candidate in able}
        owed = [candidate for candidate in able if self._owed.get(candidate.name, 0) > 0]
        if not owed and self._rounds < self._every * 2 ** min(self._fruitless // _PATIENCE, 2):
            return None
        chosen = min(owed or able, key=lambda candidate: self._turn.get(candidate.name, -1))
        tokens = 1 if len(owed) > 1 else _TOKENS
        price = max(self._costs.draft(chosen.name) * tokens, self._purse.seconds.get(chosen.name, 0.0))
        if price > self._purse.held:
            return None
        self._purse.held -= price
        self._paid[chosen.name] = price
        self._turns += 1
        self._turn[chosen.name] = self._turns
        self._rounds = 0
        if owed:
            self._owed[chosen.name] -= 1
        return chosen._replace(shadow=tokens)

    def charge(self, name: str, seconds: float) -> None:
        """What a shadow really took; 0 = not measured."""
        paid = self._paid.pop(name, None)
        if paid is None or seconds <= 0:
            return
        self._purse.held += paid - seconds
        known = self._purse.seconds
        known[name] = _MEMORY * known.get(name, seconds) + (1 - _MEMORY) * seconds
