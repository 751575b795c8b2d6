"""`nightjar`: the length planner of Nightjar (arXiv 2512.22420, methods.md §1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from predictor.bandits import AdaBinGreedy
from predictor.costs import CostTable
from predictor.holding import Holding, View
from predictor.planner import PLAIN, Candidate, Observation, Plan
from predictor.policies.base import Baseline
from predictor.policies.fixed import ranked


class NightjarPolicy(Baseline):
    """gamma in 0..gamma_max (default 3, as in the paper's scripts) by ADA-BINGREEDY; the draft is given or ranked best.

    Loss of a step: seconds per token (1/goodput), plus C_switch / gamma where gamma 0 was followed by gamma > 0, with
    C_switch = what the draft takes to read what it missed, and a switch. The paper's context is the batch size, which
    is 1 here, so there is one timeline, and it lasts over texts, as a server's does. Where lookup has a match it is
    what proposes the bin's gamma: draft and lookup are one drafter to this planner.
    """

    name = "nightjar"

    def __init__(
        self,
        costs: CostTable,
        drafts: Sequence[str],
        gamma: int,
        rng: np.random.Generator,
        *,
        draft: str | None = None,
        lookup: bool = True,
        interval: int = 4,
    ) -> None:
        super().__init__(costs, drafts, gamma, lookup=lookup, interval=interval)
        self.gamma_max = gamma
        self._given = draft
        self._active = draft or (self.drafts[0] if self.drafts else None)
        self._planner = AdaBinGreedy(gamma, rng)
        self._behind = 0
        self._last = 0
        self._locked: int | None = None

    def hold(self, view: View) -> Holding | None:
        able = [name for name in self.drafts if name not in view.failed]
        if self._given is None and able:
            self._active = ranked(able, view.ranking)[0] if view.ranking else (self._active or able[0])
        if self._active is None or self._active in view.failed:
            return None
        return Holding((self._active,), f"{self._active} is " + ("given" if self._given else "ranked best"))

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        mine = next((c for c in candidates if c.name == self._active), None)
        self._behind = 0 if mine is None else mine.behind
        self.gamma = self._locked = self._planner.choose(switch_loss=self._switch())
        return super().plan(candidates, limit) if self.gamma else PLAIN

    def _stand_in(self, able: Mapping[str, Candidate]) -> str | None:
        resident = [name for name in self.drafts if name in able]
        return ranked(resident, self._ranking)[0] if resident and self._given is None else None

    def _switch(self) -> float:
        draft = self._active
        return 0.0 if draft is None else self.costs.catch_up(draft, self._behind)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        o, gamma = observation, self._locked
        self._locked = None
        if gamma is None or (gamma and o.draft is None):
            return  # nothing could propose: that is no step of this gamma
        seconds = (o.draft_seconds + o.target_seconds) / max(o.emitted, 1)
        if gamma and not self._last:
            seconds += self._switch() / gamma
        self._planner.update(gamma, seconds)
        self._last = gamma
