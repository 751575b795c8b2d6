"""Which draft reads up on the conversation in a round, and how much of it.

A draft that becomes active after an absence (or meets a new prompt) has to read what it missed before it can propose.
The draft that is wanted most reads at once, in pieces, if the policy says that it pays; the others get a small share of
the time, and none where a ranker says how they would do: what they read is mostly never used (replays: 0.7% of all
time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from predictor.planner import Candidate

FREELY = 16  # tokens that a draft may lag behind and still run: about two rounds' worth, read on the way
PIECE = 64  # tokens of one piece: some 3 ms for a head, a tenth of a round
_SHARE = 0.03  # of the rounds' time for drafts that are not wanted most
_SAVED_ROUNDS = 16
_MEMORY = 0.8


class Reading(NamedTuple):
    """The draft that reads now, and how many tokens at most."""

    draft: str
    limit: int


class CatchUp:
    """Hands out pieces within one answer. Not shared between answers."""

    def __init__(self) -> None:
        self._purse = 0.0
        self._token_seconds = 5e-5  # until measured
        self._turn: dict[str, int] = {}
        self._turns = 0
        self._begun = False

    def earn(self, round_seconds: float) -> None:
        """A round of that length is over."""
        self._begun = True
        purse, most = self._purse + _SHARE * round_seconds, _SAVED_ROUNDS * _SHARE * round_seconds
        if purse > most:
            purse = min(purse, max(most, PIECE * self._token_seconds))
        self._purse = purse

    def choose(
        self,
        candidates: Sequence[Candidate],
        preferred: str | None,
        informed: bool = False,
        pays: Callable[[Candidate, Sequence[Candidate]], bool] = lambda lagging, candidates: True,
    ) -> Reading | None:
        """The draft that reads now, among those that lag too far to run.

        informed: the policy knows how each would do. pays: `Policy.pays_to_read`, of the preferred one; where it does
        not, there is the share of all others still, if the policy is not informed. Before the first round, the
        preferred one (the first, if none is preferred) reads everything: a stutter there is part of the time to the
        first tokens, and waiting would cost rounds without a draft.
        """
        lagging = [candidate for candidate in candidates if candidate.behind > FREELY]
        if not lagging:
            return None
        for candidate in lagging:
            first = candidate.name == preferred or (preferred is None and not self._begun)
            if first and pays(candidate, candidates):
                return Reading(candidate.name, PIECE if self._begun else candidate.behind)
        if informed and any(candidate.name == preferred for candidate in candidates):
            return None
        if self._purse < PIECE * self._token_seconds:
            return None
        chosen = min(lagging, key=lambda candidate: self._turn.get(candidate.name, -1))
        self._turns += 1
        self._turn[chosen.name] = self._turns
        self._purse -= PIECE * self._token_seconds
        return Reading(chosen.name, PIECE)

    def took(self, tokens: int, seconds: float) -> None:
        """What a piece really took."""
        if tokens > 0 and seconds > 0:
            self._token_seconds = _MEMORY * self._token_seconds + (1 - _MEMORY) * seconds / tokens


def able(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that may run or guess along in this round."""
    return [candidate for candidate in candidates if candidate.behind <= FREELY]
