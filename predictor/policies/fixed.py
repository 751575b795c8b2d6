"""Policies that decide nothing while a text is made: plain decoding, and one draft with one gamma."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from predictor.costs import CostTable
from predictor.holding import Holding, View
from predictor.planner import NOTHING_TO_DRAFT, PLAIN, Candidate, Forecast, Plan
from predictor.policies.base import Baseline


class PlainPolicy(Baseline):
    """`plain`: every round is a plain step; no draft is held."""

    name = "plain"
    off = True

    def __init__(self, costs: CostTable, drafts: Sequence[str]) -> None:
        super().__init__(costs, drafts, 0)

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        return PLAIN

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        return NOTHING_TO_DRAFT

    def hold(self, view: View) -> Holding | None:
        return Holding((), "plain decoding holds no draft") if view.round == 0 else None


class StaticPolicy(Baseline):
    """`static:<draft>@<gamma>`: always this draft with this gamma (default 4); a plain step while it is not there.

    The draft may be a free one (`ngram`).
    """

    def __init__(self, costs: CostTable, drafts: Sequence[str], draft: str, gamma: int, *, lookup: bool = True) -> None:
        super().__init__(costs, drafts, gamma, lookup=lookup)
        self.name = f"static:{draft}@{gamma}"
        self._active = draft

    def hold(self, view: View) -> Holding | None:
        if view.round:
            return None
        wanted = () if self._active not in self.drafts else (str(self._active),)
        return Holding(wanted, f"{self._active} is the only draft of this policy")

    def preferred(self) -> str | None:
        return self._active if self._active in self.drafts else None


def ranked(drafts: Sequence[str], ranking: Mapping[str, float]) -> list[str]:
    """The drafts, best expected first; equals, and ones without an expectation, in their fixed order."""
    return sorted(drafts, key=lambda name: -ranking.get(name, 0.0))
