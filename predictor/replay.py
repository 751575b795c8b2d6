"""Runs any policy over recorded texts, without models: the same calls in the same order as the live loop.

What is simulated: acceptance as recorded, seconds from a table, loads in the background (one at a time, visible between
rounds), a ranking that comes a round after it was asked for. Who reads up is decided by the live loop's own code. What
policies take to plan and to learn costs nothing here, unless `World.overhead` has it. Deterministic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from predictor.catch_up import FREELY, CatchUp, able
from predictor.costs import CostTable
from predictor.features import lately
from predictor.holding import View, rounds_left
from predictor.planner import PLAIN, Candidate, Observation, Plan
from predictor.policies.base import LOOKUP, Policy
from predictor.policies.oracle import Leg, Ways
from predictor.replay_ahead import Ahead, Entry, pieces
from predictor.replay_memory import Ledger, Loads, Memory
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
    run.outcome.hidden_seconds = run.memory.hidden_seconds
    return run.outcome


class _Text:
    """A recorded text as rounds ask for it, and what was made of it so far.

    accepts: of each draft, by position. levels: by position, of the drafts without weights, lookup the last of them.
    position: tokens of the answer. seen: how often each draft's first guess was right of late.
    """

    __slots__ = (
        "_chances", "_rows", "accepts", "exposed", "fallbacks", "length", "levels", "limit", "position", "rounds",
        "seconds", "seen", "share", "trace",
    )  # fmt: skip

    def __init__(self, world: World, trace: TextTrace) -> None:
        self.trace = trace
        self.length = trace.accepts.shape[1] + 1
        self.limit = max(world.max_new_tokens, self.length)
        self.accepts: dict[str, list[int]] = {**dict(zip(world.names, trace.rights)), LOOKUP: trace.rights[-1]}
        always = [1] * (self.length - 1)
        grounds = [trace.grounds.get(name, always) for name in world.names if name in world.free]
        self.levels: list[tuple[int, ...]] = list(zip(*grounds, trace.lookup_grounds))
        self._rows = {name: row for row, name in enumerate(world.names)}
        self._chances: dict[int, list[list[float]] | None] = {}  # of this text alone: of a corpus they are gigabytes
        self.position = 1
        self.rounds = self.fallbacks = 0
        self.seconds = self.exposed = 0.0
        self.share: Counter[str] = Counter()
        self.seen: dict[str, float] = {}

    @property
    def known(self) -> int:
        """Tokens of the conversation."""
        return self.trace.prompt_length + self.position

    def offered(self, draft: str, gamma: int, floor: float) -> tuple[int, int]:
        """Tokens that the draft offers of `gamma`, and the steps it took: one more where it thought better of it."""
        row = self._rows.get(draft)
        if row is not None and row not in self._chances:
            self._chances[row] = self.trace.chances(row)
        chances = None if row is None else self._chances[row]
        if chances is None:
            return gamma, gamma
        block = chances[self.position - 1][:gamma]
        for place, chance in enumerate(block):
            if chance < floor or not chance:
                return place, place + 1
        return len(block), len(block)

    def saw(self, draft: str, right: bool) -> None:
        """The first token that the draft guessed was judged."""
        self.seen[draft] = lately(self.seen.get(draft), right)

    @property
    def result(self) -> TextResult:
        tokens, share = self.length - 1, dict(self.share)
        return TextResult(
            self.trace.domain, tokens, self.seconds, self.rounds, self.fallbacks, self.exposed, share
        )  # fmt: skip


class Replay:
    """A policy at work. Memory and what the policy learned last from text to text."""

    policy: Policy

    def __init__(self, world: World, rankings: Rankings | None = None) -> None:
        self.world = world
        self.outcome = Outcome()
        self.memory = Memory(world.costs, world.capacity, world.resident, world.failing)
        self._rankings = rankings
        self._verify = [0.0] + [world.costs.verify(width) for width in range(1, 66)]
        self._steps = {name: world.costs.draft(name) for name in (*world.names, LOOKUP)}
        self._names = world.weighted
        self._weighted = frozenset(self._names)
        self._resident: frozenset[str] | None = None
        self._held: list[str] = []  # drafts with weights that are resident, in their order
        self._free = (*(name for name in world.names if name in world.free), LOOKUP)
        self._free_known: dict[tuple[int, ...], list[Candidate]] = {}  # by their levels
        self._spent = 0.0  # seconds of the round so far
        self._ahead: Ahead | None = None  # of the text, where somebody asks

    # Foresight

    @property
    def position(self) -> int:
        """Tokens of the answer that are there."""
        return self._text.position

    def foresee(self, own: Mapping[str, Ways], common: Ways, rounds: int | None, capacity: int) -> Sequence[Leg]:
        """See `predictor.policies.oracle.Foresight`."""
        if self._ahead is None:
            self._ahead = Ahead(self.world, self._text.trace, self._verify, self._steps)
        entries = {name: self._entry(name) for name in own}
        return self._ahead.foresee(own, common, rounds, capacity, self.position, entries)

    def behind(self, draft: str) -> int:
        """See `predictor.policies.oracle.Foresight`."""
        behind = self._ledger.behind(draft, self._text.known)
        return behind if behind > FREELY and draft in self.memory.acquire() else 0

    def _entry(self, draft: str) -> Entry:
        behind = self._ledger.behind(draft, self._text.known)
        rounds = math.ceil(max(self.memory.arrival(draft) - self._grace, 0.0) / self._verify[1])
        if rounds or self._text.rounds:  # before the first round it reads all at once
            rounds += max(pieces(behind) - 1, 0)
        return Entry(rounds, self.world.costs.catch_up(draft, behind), draft in self.memory.acquire())

    # One text

    def text(self, trace: TextTrace) -> None:
        """Make one answer."""
        world, policy = self.world, self.policy
        text = self._text = _Text(world, trace)
        self._ahead = None
        self._due = 0
        self._ranking: Mapping[str, float] | None = None
        self._asked: tuple[Mapping[str, float] | None] | None = None  # what the ranker will have said after a round
        self._active: str | None = None
        self._last: str | None = None
        self._ledger = Ledger(world.window)
        self._catch_up = CatchUp()
        self._grace = world.prefill * trace.prompt_length
        policy.begin()
        self._answered(None if self._rankings is None else self._rankings(trace, 0, {}))
        self._loaded(self.memory.advance(self._grace))
        self._grace = 0.0
        if self._rankings is not None:
            self._due = world.interval or max(policy.interval(), 1)
            self._answered(self._rankings(trace, 1, {}))
        while text.position < text.length:
            self._round()
        self.outcome.texts.append(text.result)
        self.outcome.share.update(text.share)

    def _loaded(self, loads: Loads) -> None:
        for name, seconds in loads:
            self.policy.costs.observe_load(name, seconds)

    def _round(self) -> None:
        policy, text = self.policy, self._text
        limit = text.limit - text.position - 1
        self._spent = 0.0
        plan, candidates, level = PLAIN, [], 0
        if limit > 0 and not policy.off:
            candidates = self._candidates()
            there = {candidate.name: candidate.level for candidate in candidates}
            wanted = policy.plan(candidates, limit)
            if wanted.draft in there and wanted.gamma > 0:
                plan = wanted if wanted.gamma <= limit else Plan(wanted.draft, limit, wanted.floor)
                level = there[wanted.draft]
        shadows = policy.shadows(plan, candidates)
        preferred = policy.preferred()
        fallback = preferred is not None and preferred not in (there if candidates else self.memory.acquire())
        self._finish(plan, self._judge(plan, level, shadows), fallback)

    def _candidates(self) -> list[Candidate]:
        """The drafts that may run, after one that lags has read a piece of what it missed."""
        text, ledger, known = self._text, self._ledger, self._text.known
        resident = self.memory.acquire()
        if resident is not self._resident:
            self._resident, self._held = resident, [name for name in self._names if name in resident]
        levels = text.levels[text.position - 1]
        free = self._free_known.get(levels)
        if free is None:
            free = [Candidate(name, level, True) for name, level in zip(self._free, levels)]
            self._free_known[levels] = free
        held = [ledger.candidate(name, known) for name in self._held]
        for candidate in held:
            if candidate.behind > FREELY:
                return self._reading([*free, *held], known)
        return [*free, *held]

    def _reading(self, found: list[Candidate], known: int) -> list[Candidate]:
        """Let one that lags read, if any may; those that can run then."""
        ledger = self._ledger
        policy = self.policy
        reading = self._catch_up.choose(found, policy.reads(), policy.informed(), policy.pays_to_read)
        if reading is not None:
            tokens = ledger.reads(reading.draft, known, reading.limit)
            seconds = self._work(self.world.costs.catch_up(reading.draft, tokens))
            self.outcome.catch_up_seconds += seconds
            self._catch_up.took(tokens, seconds)
            self.policy.costs.observe_catch_up(reading.draft, tokens, seconds)
            found = [ledger.candidate(c.name, known) if c.name == reading.draft else c for c in found]
        return able(found)

    def _work(self, seconds: float) -> float:
        """Let work be done in the round; returns what it takes: longer as far as a load goes on beside it."""
        slow = self.world.slow_down
        if slow != 1 and self.memory.loading is not None:
            beside = min(max(self.memory.busy() - self._spent, 0.0), seconds * slow)
            seconds += beside * (1 - 1 / slow)
        self._spent += seconds
        return seconds

    def _guessed(self, draft: str, steps: int) -> tuple[float, int]:
        """Seconds of a draft's steps, with what it has to read first, and tokens since it proposed last."""
        since, behind = self._ledger.proposes(draft, self._text.known)
        seconds = steps * self._steps[draft]
        if behind and draft in self._weighted:
            seconds += self.world.costs.catch_up(draft, behind)
        return self._work(seconds), since

    def _judge(self, plan: Plan, level: int, shadows: Sequence[Candidate]) -> Observation:
        """Propose, verify, commit, learn. level: of the draft that proposes."""
        text, draft = self._text, plan.draft
        column, left = text.position - 1, text.length - text.position
        guessed = [self._guessed(shadow.name, shadow.shadow) for shadow in shadows] if shadows else []
        for seconds, _ in guessed:
            self.outcome.shadow_seconds += seconds
        drafted = right = unread = 0
        draft_seconds = 0.0
        if draft is not None:
            drafted, steps = text.offered(draft, plan.gamma, plan.floor)
            right = min(text.accepts[draft][column], drafted)
            draft_seconds, unread = self._guessed(draft, steps)
        emitted = min(right + 1, left)
        stood = min(right, emitted)
        observation = Observation(
            draft=draft,
            level=level,
            drafted=drafted,
            proposed=(drafted if emitted > right else stood) if drafted or draft is None else 1,
            accepted=stood,
            width=drafted + 1,
            draft_seconds=draft_seconds,
            target_seconds=self._work(self._verify[drafted + 1]),
            caught_up=unread,
            asked=plan.gamma,
            emitted=emitted,
        )
        self.policy.observe(observation)
        if draft is not None and observation.proposed:
            text.saw(draft, stood > 0)
        for shadow, (seconds, since) in zip(shadows, guessed):
            comparable = min(shadow.shadow, emitted)
            hits = min(text.accepts[shadow.name][column], comparable)
            judged = min(hits + 1, comparable)
            self.policy.credit(shadow, judged, hits, drafted=shadow.shadow, seconds=seconds, caught_up=since)
            if judged:
                text.saw(shadow.name, hits > 0)
        return observation

    def _finish(self, plan: Plan, observation: Observation, fallback: bool) -> None:
        text, ran = self._text, observation.draft if observation.drafted else None
        seconds = self._spent + self.world.overhead
        text.position += observation.emitted
        text.seconds += seconds
        text.rounds += 1
        text.fallbacks += fallback
        text.share[ran or "plain"] += 1
        self.outcome.gammas[plan.gamma] += 1
        if ran is not None:
            self.outcome.switches += self._last not in (None, ran)
            self._last = ran
        self._catch_up.earn(seconds)
        if self.memory.loading is not None:
            self._loaded(self.memory.advance(seconds))
        if observation.draft in self._weighted:
            self._active = observation.draft
        if text.position < text.length and (self._asked is not None or text.rounds >= self._due):
            self._schedule()

    # Scheduling points

    def _schedule(self) -> None:
        text = self._text
        if self._asked is not None:
            (ranking,), self._asked = self._asked, None
            self._answered(ranking)
        if text.rounds < self._due:
            return
        self._due = text.rounds + (self.world.interval or max(self.policy.interval(), 1))
        if self._rankings is None:
            self._hold()
        else:
            self._asked = (self._rankings(text.trace, text.position, text.seen),)

    def _answered(self, ranking: Mapping[str, float] | None) -> None:
        if ranking is not None:
            self._ranking = ranking
            self.policy.rank(ranking)
        self._hold()

    def _hold(self) -> None:
        memory, text = self.memory, self._text
        view = View(
            round=text.rounds,
            resident=memory.acquire(),
            loading=frozenset(() if memory.loading is None else (memory.loading,)),
            failed=memory.failed,
            capacity=self.world.capacity,
            drafts=self._names,
            active=self._active,
            ranking=self._ranking,
            rounds_left=rounds_left(text.limit, text.position - 1, text.rounds, self.world.typical_tokens),
        )
        holding = self.policy.hold(view)
        if holding is None:
            return
        memory.retarget(holding.wanted if self.world.prefetch else self._unfetched(holding.wanted), self._active)
        if holding.wait and holding.wanted:
            waited, loads = memory.wait_for(holding.wanted[0])
            self._loaded(loads)
            text.seconds += waited
            text.exposed += waited

    def _unfetched(self, wanted: Sequence[str]) -> list[str]:
        """What is wanted where nothing is loaded ahead: the first once it is needed, and what is there."""
        here = self.memory.acquire()
        first = wanted[:1] if self._text.rounds else ()
        return list(dict.fromkeys((*first, *(name for name in wanted if name in here), *sorted(here))))
