"""Runs any policy over recorded texts, without models: the same calls in the same order as the live loop.

What is simulated: acceptance as recorded, seconds from a table, loads in the background (one at a time, visible between
rounds), catch-up in pieces, a ranking that comes a round after it was asked for. Deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from predictor.costs import CostTable
from predictor.holding import View
from predictor.planner import PLAIN, Candidate, Observation, Plan
from predictor.policies.base import LOOKUP, Policy
from predictor.policies.oracle import Stretch
from predictor.replay_ahead import Ahead, Choice
from predictor.replay_memory import Memory, Reading
from predictor.replay_world import Outcome, Rankings, TextResult, TextTrace, World

__all__ = ["Outcome", "Rankings", "Replay", "TextResult", "TextTrace", "World", "replay"]


def replay(
    make: Callable[[CostTable, Replay], Policy],
    texts: Sequence[TextTrace],
    world: World,
    rankings: Rankings | None = None,
) -> Outcome:
    """Run a policy over texts in this order; `make` gets a table of costs and the replay (an oracle's foresight)."""
    run = Replay(world, rankings)
    run.policy = make(world.known_costs(), run)
    for text in texts:
        run.text(text)
    run.outcome.loads, run.outcome.cancelled = run.memory.loads, run.memory.cancelled
    run.outcome.hidden_seconds = run.memory.load_seconds - run.outcome.exposed_seconds
    return run.outcome


_MEMORY = 0.8  # of what was seen of a draft's first guesses, as `edgespec.steering` has it


class Replay:
    """A policy at work. Memory and what the policy learned last from text to text."""

    policy: Policy

    def __init__(self, world: World, rankings: Rankings | None = None) -> None:
        self.world = world
        self.outcome = Outcome()
        self.memory = Memory(world.costs, world.capacity, world.resident, world.failing)
        self._rankings = rankings
        self._index = {name: row for row, name in enumerate(world.names)}
        self._verify = [0.0] + [world.costs.verify(width) for width in range(1, 66)]
        self._steps = {name: world.costs.draft(name) for name in (*world.names, LOOKUP)}
        self._names = world.weighted
        self._weighted = frozenset(self._names)
        self._last: str | None = None
        self._ahead: Ahead | None = None
        self._resident: frozenset[str] | None = None
        self._held: list[str] = []  # drafts with weights that are resident, in their order
        self._free_known: dict[tuple[str, int], Candidate] = {}
        self.position = 1

    # Foresight

    def stretch(self, draft: str | None, gamma: int, rounds: int | None, start: int, *, lookup: bool) -> Stretch:
        """See `predictor.policies.oracle.Foresight`."""
        return self._foresight().stretch((draft, gamma), rounds, start, lookup)

    def best(
        self, choices: tuple[Choice, ...], rounds: int | None, start: int, *, lookup: bool
    ) -> tuple[Choice, Stretch]:
        """See `predictor.policies.oracle.Foresight`."""
        return self._foresight().best(choices, rounds, start, lookup)

    def _foresight(self) -> Ahead:
        if self._ahead is None:
            self._ahead = Ahead(self.world, self._trace, self._verify, self._steps)
        return self._ahead

    # One text

    def text(self, trace: TextTrace) -> None:
        """Make one answer."""
        world, policy, memory = self.world, self.policy, self.memory
        self._trace = trace
        self._ahead = None
        self._length = trace.accepts.shape[1] + 1
        self._accepts = dict(zip(world.names, trace.accepts.tolist()))
        self._accepts[LOOKUP] = self._looked = trace.lookup_accepts.tolist()
        self._levels = trace.lookup_level.tolist()
        self._chances: dict[str, list[list[float]]] = {}
        always = [1] * (self._length - 1)
        self._free_levels = {
            name: trace.levels[name].tolist() if name in trace.levels else always for name in world.free
        }
        self._free_levels[LOOKUP] = self._levels
        self._seen: dict[str, float] = {}
        self._confidences = None if trace.confidences is None else trace.confidences
        self._limit = max(world.max_new_tokens, self._length)
        self._rounds = self._fallbacks = self._due = 0
        self._exposed = self._seconds = 0.0
        self._share: Counter[str] = Counter()
        self._ranking: Mapping[str, float] | None = None
        self._asked: tuple[int, Mapping[str, float] | None] | None = None
        self._active: str | None = None
        self.position = 1
        self._reading = Reading(world.costs, trace.prompt_length, world.window)
        self._base = trace.prompt_length
        policy.begin()
        self._answered(None if self._rankings is None else self._rankings(trace, 0, {}))
        memory.advance(world.prefill * trace.prompt_length)
        if world.rank_after_prefill and self._rankings is not None:
            self._due = world.interval or max(policy.interval(), 1)
            self._answered(self._rankings(trace, self.position, self._seen))
        while self.position < self._length:
            self._round()
        self.outcome.texts.append(
            TextResult(
                trace.domain,
                self._length - 1,
                self._seconds,
                self._rounds,
                self._fallbacks,
                self._exposed,
                dict(self._share),
            )
        )
        self.outcome.share.update(self._share)

    def _round(self) -> None:
        world, policy, memory = self.world, self.policy, self.memory
        loading = memory.loading is not None
        resident = memory.acquire()
        limit = self._limit - self.position - 1
        seconds = 0.0
        candidates: list[Candidate] = []
        if limit > 0 and not policy.off:
            seconds, candidates = self._candidates(resident)
        plan = policy.plan(candidates, limit) if candidates and limit > 0 else PLAIN
        gamma = min(plan.gamma, limit)
        chosen = None
        if plan.draft is not None and gamma > 0:
            for candidate in candidates:
                if candidate.name == plan.draft:
                    chosen = candidate
        if chosen is None:
            plan, gamma = PLAIN, 0
        shadows = policy.shadows(plan, candidates) if candidates else ()
        preferred = policy.preferred()
        observation, shadowed = self._judge(plan, gamma, chosen, shadows)
        if loading:
            observation_seconds = observation.target_seconds * (world.slow_down - 1)
            seconds += observation_seconds
        seconds += observation.draft_seconds + observation.target_seconds + world.overhead + shadowed
        self._finish(plan, observation, seconds, preferred is not None and preferred not in resident)

    def _candidates(self, resident: frozenset[str]) -> tuple[float, list[Candidate]]:
        """The drafts that may run, and the seconds in which one of them read a piece of what it missed."""
        column = self.position - 1
        found = [self._free(name, levels[column]) for name, levels in self._free_levels.items()]
        known, reading = self._base + self.position, self._reading
        if resident is not self._resident:
            self._resident, self._held = resident, [name for name in self._names if name in resident]
        lagging = reading.lagging(self._held, known)
        seconds = reading.catch_up(lagging, self.policy.preferred(), known, self.policy.informed())
        if seconds:
            self.outcome.catch_up_seconds += seconds
            lagging = reading.lagging(self._held, known)
        found += [Candidate(name, 1, False, 4, behind) for name, behind in lagging if behind <= Reading.FREELY]
        return seconds, found

    def _free(self, name: str, level: int) -> Candidate:
        key = name, level
        if key not in self._free_known:
            self._free_known[key] = Candidate(name, level, True)
        return self._free_known[key]

    def _judge(
        self, plan: Plan, gamma: int, chosen: Candidate | None, shadows: Sequence[Candidate]
    ) -> tuple[Observation, float]:
        """Propose, verify, commit, learn; returns what was observed and the seconds of shadows."""
        column, left, known = self.position - 1, self._length - self.position, self._base + self.position
        drafted = right = unread = level = 0
        draft_seconds = 0.0
        if chosen is not None and plan.draft is not None:
            level = chosen.level
            drafted, steps = self._offered(plan.draft, gamma, plan.floor)
            right = min(self._accepts[plan.draft][column], drafted)
            unread = self._reading.read(plan.draft, known) if plan.draft in self._weighted else 1
            draft_seconds = steps * self._steps[plan.draft]
            if unread > Reading.FREELY // 2:
                draft_seconds += self.world.costs.catch_up(plan.draft, unread)
        emitted = min(right + 1, left)
        stood = min(right, emitted)
        observation = Observation(
            draft=plan.draft,
            level=level,
            drafted=drafted,
            proposed=(drafted if emitted > right else stood) if drafted or plan.draft is None else 1,
            accepted=stood,
            width=drafted + 1,
            draft_seconds=draft_seconds,
            target_seconds=self._verify[drafted + 1],
            caught_up=unread,
            asked=gamma,
            emitted=emitted,
        )
        self.policy.observe(observation)
        if plan.draft is not None and observation.proposed:
            self._saw(plan.draft, stood > 0)
        shadowed = 0.0
        for shadow in shadows:
            weighted = shadow.name in self._weighted
            unread = self._reading.read(shadow.name, known) if weighted else 1
            taken = shadow.shadow * self._steps[shadow.name]
            if weighted and unread > Reading.FREELY // 2:
                taken += self.world.costs.catch_up(shadow.name, unread)
            shadowed += taken
            comparable = min(shadow.shadow, emitted)
            hits = min(self._accepts[shadow.name][column], comparable)
            judged = min(hits + 1, comparable)
            self.policy.credit(shadow, judged, hits, drafted=shadow.shadow, seconds=taken, caught_up=unread)
            if judged:
                self._saw(shadow.name, hits > 0)
        self.outcome.shadow_seconds += shadowed
        return observation, shadowed

    def _saw(self, draft: str, right: bool) -> None:
        before = self._seen.get(draft)
        self._seen[draft] = float(right) if before is None else _MEMORY * before + (1 - _MEMORY) * right

    def _offered(self, draft: str, gamma: int, floor: float) -> tuple[int, int]:
        """Tokens that the draft offers of `gamma`, and the steps it took: one more where it thought better of it."""
        if self._confidences is None or draft not in self._index:
            return gamma, gamma
        rows = self._chances.get(draft)
        if rows is None:
            chances = np.cumprod(self._confidences[self._index[draft]] / 255.0, axis=-1)
            rows = self._chances[draft] = chances.tolist()
        row = rows[self.position - 1][:gamma]
        for place, chance in enumerate(row):
            if chance < floor or not chance:
                return place, place + 1
        return len(row), len(row)

    def _finish(self, plan: Plan, observation: Observation, seconds: float, fallback: bool) -> None:
        ran = observation.draft if observation.drafted else None
        self.position += observation.emitted
        self._seconds += seconds
        self._rounds += 1
        self._fallbacks += fallback
        self._share[ran or "plain"] += 1
        self.outcome.gammas[plan.gamma] += 1
        if ran is not None:
            self.outcome.switches += self._last not in (None, ran)
            self._last = ran
        self._reading.earn(seconds)
        for name, took in self.memory.advance(seconds):
            self.policy.costs.observe_load(name, took)
        if observation.draft in self._weighted:
            self._active = observation.draft
        if self.position < self._length:
            self._schedule()

    # Scheduling points

    def _schedule(self) -> None:
        if self._asked is not None and self._asked[0] <= self._rounds:
            ranking, self._asked = self._asked[1], None
            self._answered(ranking)
        if self._rounds < self._due:
            return
        self._due = self._rounds + (self.world.interval or max(self.policy.interval(), 1))
        if self._rankings is None:
            self._hold()
            return
        ready = self._rounds + self.world.ranking_rounds
        self._asked = (ready, self._rankings(self._trace, self.position, self._seen))
        if ready <= self._rounds:
            ranking, self._asked = self._asked[1], None
            self._answered(ranking)

    def _answered(self, ranking: Mapping[str, float] | None) -> None:
        if ranking is not None:
            self._ranking = ranking
            self.policy.rank(ranking)
        self._hold()

    def _hold(self) -> None:
        memory, made = self.memory, self.position - 1
        per_round = max(made / self._rounds, 1.0) if self._rounds else 1.5
        view = View(
            round=self._rounds,
            resident=memory.acquire(),
            loading=frozenset(() if memory.loading is None else (memory.loading,)),
            failed=memory.failed,
            capacity=self.world.capacity,
            drafts=self._names,
            active=self._active,
            ranking=self._ranking,
            rounds_left=self._rounds_left(per_round),
        )
        holding = self.policy.hold(view)
        if holding is None:
            return
        if not self.outcome.reasons or self.outcome.reasons[-1] != holding.reason:
            self.outcome.reasons.append(holding.reason)
        memory.retarget(holding.wanted if self.world.prefetch else self._unfetched(holding.wanted), self._active)
        if holding.wait and holding.wanted:
            waited = memory.wait_for(holding.wanted[0])
            self._seconds += waited
            self._exposed += waited

    def _unfetched(self, wanted: Sequence[str]) -> list[str]:
        """What is wanted where nothing is loaded ahead: what is there, and the first once it is needed."""
        here = self.memory.acquire()
        first = list(wanted[:1]) if self._rounds else []
        return first + [name for name in (*wanted, *sorted(here)) if name in here and name not in first]

    def _rounds_left(self, per_round: float) -> float:
        """As a live run guesses it, which does not know how long an answer will be."""
        most, typical = max(self._limit - self.position, 0), self.world.typical_tokens
        if typical:
            most = min(max(min(self._limit, typical) - self.position, typical // 4), most)
        return most / per_round
