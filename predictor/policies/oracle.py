"""`oracle-static` and `oracle-dynamic`: what knowing the future would bring. Only in replay, which hands it over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from predictor.costs import CostTable
from predictor.holding import Holding, View
from predictor.planner import Candidate
from predictor.policies.base import Baseline


class Stretch(NamedTuple):
    """What some rounds would be: tokens, seconds, and the position (tokens of the answer) they end at."""

    tokens: int
    seconds: float
    end: int


class Foresight(Protocol):
    """The text that is being made, known ahead."""

    @property
    def position(self) -> int:
        """Tokens of the answer that are there."""

    def stretch(self, draft: str | None, gamma: int, rounds: int | None, start: int, *, lookup: bool) -> Stretch:
        """The next `rounds` rounds (None = all) from position `start`, if that draft proposes gamma tokens in each."""

    def best(
        self, choices: tuple[tuple[str | None, int], ...], rounds: int | None, start: int, *, lookup: bool
    ) -> tuple[tuple[str | None, int], Stretch]:
        """The (draft, gamma) whose next `rounds` rounds make most tokens a second, the first of equals."""


class _Oracle(Baseline):
    """gamma None: the best one is found, too (0 to gamma_max)."""

    def __init__(
        self,
        costs: CostTable,
        drafts: Sequence[str],
        gamma: int | None,
        gamma_max: int,
        ahead: Foresight,
        *,
        lookup: bool = True,
        interval: int = 4,
    ) -> None:
        super().__init__(costs, drafts, gamma or 0, lookup=lookup, interval=interval)
        self._ahead = ahead
        self._gammas = range(1, gamma_max + 1) if gamma is None else (gamma,)
        self._plain = gamma is None
        self._choices: dict[tuple[str, ...], tuple[tuple[str | None, int], ...]] = {}

    def _best(self, drafts: Sequence[str], rounds: int | None, start: int) -> tuple[str | None, int, Stretch]:
        """The (draft, gamma) that makes most tokens a second of the rounds from `start` on."""
        key = tuple(drafts)
        choices = self._choices.get(key)
        if choices is None:
            made: list[tuple[str | None, int]] = [(draft, gamma) for draft in drafts for gamma in self._gammas]
            # Without a draft lookup alone proposes, with the policy's gamma.
            made += [(None, gamma) for gamma in self._gammas]
            choices = self._choices[key] = (*made, (None, 0)) if self._plain else tuple(made)
        (draft, gamma), stretch = self._ahead.best(choices, rounds, start, lookup=self._lookup)
        return draft, gamma, stretch


class OracleStatic(_Oracle):
    """`oracle-static`: the best (draft, gamma) of each text, by trying all on all of it. With `@gamma`, that gamma."""

    name = "oracle-static"

    def hold(self, view: View) -> Holding | None:
        if view.round:
            return None
        able = [name for name in self.drafts if name not in view.failed]
        self._active, self.gamma, _ = self._best(able if view.capacity else (), None, self._ahead.position)
        return Holding(() if self._active is None else (self._active,), f"{self._active} will be best in this text")


class OracleDynamic(_Oracle):
    """`oracle-dynamic`: at every scheduling point the best (draft, gamma) of the next N rounds, same N and K.

    It loads the draft of the stretch after next while the next one runs, so with K >= 2 and loads shorter than N rounds
    it always has the draft it wants; else the best of the resident ones runs. It is greedy: most tokens a second of
    every stretch by itself. With `@gamma`, that gamma.
    """

    name = "oracle-dynamic"
    _wanted: str | None = None

    def hold(self, view: View) -> Holding | None:
        able = [name for name in self.drafts if name not in view.failed]
        if not view.capacity:
            able = []
        here = self._ahead.position
        self._wanted = self._best(able, self._interval, here)[0]
        resident = [name for name in able if name in view.resident]
        self._active, self.gamma, now = self._best(resident, self._interval, here)
        wanted = [self._active] if self._active is not None else []
        start = now.end
        for _ in range(8):  # the drafts in the order in which they will be wanted
            draft, _gamma, stretch = self._best(able, self._interval, start)
            if stretch.tokens == 0:
                break
            start = stretch.end
            if draft is not None and draft not in wanted:
                wanted.append(draft)
            if len(wanted) >= view.capacity:
                break
        if self._wanted is not None and self._wanted not in wanted:
            wanted.append(self._wanted)
        wanted += [name for name in resident if name not in wanted]
        return Holding(tuple(wanted), f"{self._active} will be best in the next {self._interval} rounds")

    def preferred(self) -> str | None:
        return self._wanted

    def _stand_in(self, able: Mapping[str, Candidate]) -> str | None:
        return None
