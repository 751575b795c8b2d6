"""Bandits over drafts: the published baselines that learn by trying, without a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predictor.bandits import Exp3, NormalHedge, Ucb1, UcbSpec
from predictor.costs import CostTable
from predictor.holding import Holding, View
from predictor.planner import Candidate, Forecast, Observation, Plan
from predictor.policies.base import LOOKUP, Baseline


class UcbPolicy(Baseline):
    """`mab-sync`, `mab-async`, `ucbspec`: an arm is a draft, pulled at a scheduling point and run till the next one.

    MemSpec's baselines (methods.md §2.5): UCB1 with c = 2.0, each draft tried once first, state reset for every text, N
    = 4 rounds between scheduling points, gamma 4. `mab-sync` waits for the load of the arm it pulled; `mab-async` goes
    on with the resident draft of highest index and runs the arm when it is there. An arm stays pulled until it ran.
    Reward: accepted tokens / gamma of each round (lookup rounds say nothing about the draft). `ucbspec` is `mab-async`
    with BanditSpec's confidence radius.
    """

    def __init__(
        self,
        name: str,
        costs: CostTable,
        drafts: Sequence[str],
        gamma: int,
        *,
        wait: bool,
        c: float = 2.0,
        lookup: bool = True,
        interval: int = 4,
    ) -> None:
        super().__init__(costs, drafts, gamma, lookup=lookup, interval=interval)
        self.name = name
        self._wait = wait
        self._c = c
        self._bandit = self._fresh()
        self._ran = True

    def _fresh(self) -> Ucb1:
        return UcbSpec(len(self.drafts)) if self.name == "ucbspec" else Ucb1(len(self.drafts), self._c)

    def begin(self) -> None:
        super().begin()
        self._bandit = self._fresh()
        self._active, self._ran = None, True

    def hold(self, view: View) -> Holding | None:
        able = [arm for arm, name in enumerate(self.drafts) if name not in view.failed]
        if not able or view.capacity < 1:
            self._active = None
            return None
        if self._ran or self._active in view.failed or self._active is None:
            self._active, self._ran = self.drafts[self._bandit.choose(able)], False
        # Equals in the order of the drafts: that of a set differs from run to run.
        others = [name for name in self.drafts if name in view.resident and name != self._active]
        kept = sorted(others, key=self._index, reverse=True)
        index = self._index(self._active)
        reason = f"pulled {self._active}: " + ("never tried in this text" if index == float("inf") else f"{index:.2f}")
        return Holding((self._active, *kept), reason, wait=self._wait and self._active not in view.resident)

    def _index(self, name: str) -> float:
        return self._bandit.index(self.drafts.index(name))

    def _stand_in(self, able: Mapping[str, Candidate]) -> str | None:
        resident = [name for name in self.drafts if name in able]
        return max(resident, key=self._index) if resident else None

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        o = observation
        if o.draft in self.drafts and o.proposed:
            self._bandit.update(self.drafts.index(str(o.draft)), o.accepted / max(o.asked, o.proposed))
            self._ran = self._ran or o.draft == self._active


class _Drawing(Baseline):
    """Policies that draw a draft at random, and begin every text anew (`_fresh`)."""

    def __init__(
        self,
        costs: CostTable,
        drafts: Sequence[str],
        gamma: int,
        rng: np.random.Generator,
        *,
        lookup: bool = True,
        interval: int = 4,
    ) -> None:
        super().__init__(costs, drafts, gamma, lookup=lookup, interval=interval)
        self._rng = rng
        self._fresh()

    def begin(self) -> None:
        super().begin()
        self._fresh()

    def _fresh(self) -> None:
        """Forget what was learned."""
        raise NotImplementedError


class Exp3Policy(_Drawing):
    """`exp3spec`: EXP3Spec of BanditSpec over drafts: drawn at scheduling points, loaded in the background.

    Loss: 1 - emitted / (gamma + 1), of the rounds that the drawn arm ran itself (their mean is one update). State is
    reset for every text.
    """

    name = "exp3spec"

    def _fresh(self) -> None:
        self._bandit = Exp3(len(self.drafts), self._rng)
        self._active = None
        self._probability = 1.0
        self._losses: list[float] = []

    def hold(self, view: View) -> Holding | None:
        if view.capacity < 1 or all(name in view.failed for name in self.drafts):
            return None
        if self._active is not None and not self._losses and self._active not in view.failed:
            return None  # it never ran yet
        if self._active is not None and self._losses:
            loss = sum(self._losses) / len(self._losses)
            self._bandit.update(self.drafts.index(self._active), loss, self._probability)
        arm, self._probability = self._bandit.choose()
        self._active, self._losses = self.drafts[arm], []
        kept = ranked_by(self._bandit, self.drafts, view.resident - {self._active})
        return Holding((self._active, *kept), f"drew {self._active} with probability {self._probability:.2f}")

    def _stand_in(self, able: Mapping[str, Candidate]) -> str | None:
        resident = [name for name in self.drafts if name in able]
        return ranked_by(self._bandit, self.drafts, resident)[0] if resident else None

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        o = observation
        if o.draft is not None and o.draft == self._active and o.proposed:
            self._losses.append(1 - (o.accepted + 1) / (max(o.asked, o.proposed) + 1))


def ranked_by(bandit: Exp3, drafts: Sequence[str], names: Any) -> list[str]:
    """Names, the most probable arm first."""
    p = bandit.probabilities()
    return sorted((name for name in drafts if name in names), key=lambda name: -p[drafts.index(name)])


class HedgePolicy(_Drawing):
    """`hedge`: HedgeSpec (arXiv 2510.20064): NormalHedge with full information over the resident drafts.

    In every round each resident draft guesses along, and is scored on what was emitted: loss = 1 - (right + 1) /
    (gamma + 1). The draft that runs is drawn from the weights at every round. HedgeSpec has all drafts in memory; here
    those that were not heard in this text are brought in first, then the ones of greatest regret stay. Drafts that are
    away sleep. State is reset for every text.
    """

    name = "hedge"

    def informed(self) -> bool:
        return False  # every resident draft guesses along in every round

    def _fresh(self) -> None:
        self._hedge = NormalHedge(len(self.drafts))
        self._heard = dict.fromkeys(self.drafts, 0)
        self._active = None
        self._weights: dict[int, float] = {}
        self._losses: dict[int, float] = {}

    def hold(self, view: View) -> Holding | None:
        able = [name for name in self.drafts if name not in view.failed]
        if not able or view.capacity < 1:
            return None
        order = sorted(able, key=lambda name: -self._hedge.regrets[self.drafts.index(name)])
        unheard = [name for name in able if not self._heard[name]]
        if not unheard:
            return Holding(tuple(order), f"{order[0]} has the greatest regret")
        keep = [name for name in order if self._heard[name]][: max(view.capacity - 1, 0)]
        fresh = sorted(unheard, key=lambda name: name not in view.resident | view.loading)
        return Holding((*keep, *fresh), f"{fresh[0]} was not heard in this text")

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        self._draw(candidates)
        return super().plan(candidates, limit)

    def forecast(self, candidates: Sequence[Candidate], limit: int) -> Forecast:
        self._draw(candidates)
        return super().forecast(candidates, limit)

    def _draw(self, candidates: Sequence[Candidate]) -> None:
        """The draft of the next round."""
        self._finish()
        awake = [arm for arm, name in enumerate(self.drafts) if any(c.name == name and c.level for c in candidates)]
        if awake:
            weights = self._hedge.weights(awake)
            self._weights = dict(zip(awake, weights))
            self._active = self.drafts[awake[int(self._rng.choice(len(awake), p=weights))]]

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c._replace(shadow=max(plan.gamma, 1)) for c in candidates if c.level and self._scored(c, plan)]

    def _scored(self, candidate: Candidate, plan: Plan) -> bool:
        return candidate.name in self._heard and candidate.name != plan.draft and plan.draft != LOOKUP

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        o = observation
        if o.draft in self._heard and o.proposed:
            self._hear(str(o.draft), o.accepted, o.proposed)

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        if candidate.name in self._heard and proposed:
            # Beyond what the round emitted nothing is known: all right so far counts as the rest of the block, too.
            reached = candidate.shadow if accepted == proposed else accepted
            self._hear(candidate.name, reached, candidate.shadow)

    def _hear(self, name: str, accepted: int, gamma: int) -> None:
        self._heard[name] += 1
        self._losses[self.drafts.index(name)] = 1 - (accepted + 1) / (gamma + 1)

    def _finish(self) -> None:
        """The losses of the round before, all of them known by now. (Another text's rounds may lie in between.)"""
        losses = {arm: loss for arm, loss in self._losses.items() if arm in self._weights}
        if len(losses) > 1:
            self._hedge.update(losses, self._weights)
        self._losses = {}
