"""`edgespec`: our policy. Expected tokens a second decide, in every round and about what to hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from predictor.catch_up import able
from predictor.costs import CostTable
from predictor.holding import Holding, Prospect, View, choose_holding
from predictor.planner import AutoPlanner, Candidate, Observation

SLACK = 1  # rounds that a load may take longer than measured
SHORTEST, LONGEST = 2, 16  # rounds between scheduling points
_SMOOTH = 0.5  # weight of the newest ranking among those of a text; the prompt's alone says least
_ROUND = 0.1  # weight of the newest round in the mean of their seconds
_READS = 64  # tokens that a newcomer is assumed to have to read
_AT_HOME = 0.75  # a draft that does that part of what its manifest promises may be in its own domain
_TRUSTED = 0.3  # share of the ranker below which drafts are tried out as if there were none
_SURE = 0.8  # and above which those that it does not praise need not read the text
_TEMPTS = 1.1  # what a draft that was not heard in this text must promise at best, against what is here
_TEMPTS_FROM_HOME = 1.25  # the same, while the best one here does what it promised
# What a draft must promise for the rest of a text, in times of what its reading takes: of several promises the greatest
# is one that is too great, and how long the text will be is a guess.
_WORTH_READING = 4.0
_UNKNOWN = 4.0  # first tokens of a draft, below which reading is the way to get to know it, where no ranker tells
_FREE = 1 / 64  # weight of the newest round in the share of those in which a draft without weights ran


class _Trust:
    """Two forecasters of the first token, ranker and long run, weighed by how likely each made what was seen.

    Bayes' rule on discounted log likelihoods, tempered: the drafts that are seen are those the ranker praised, which
    makes it look worse than it is. Nineteen to one for the ranker at first. Lasts from text to text.
    """

    _BEGIN, _MOST, _KEEP, _TEMPER = math.log(19.0), 4.0, 0.99, 0.2

    def __init__(self) -> None:
        self._odds = self._BEGIN

    @property
    def share(self) -> float:
        """Weight of the ranker, 0 to 1."""
        return 1 / (1 + math.exp(-self._odds))

    def judge(self, ranked: float, usual: float, right: bool) -> None:
        ranked, usual = (min(max(rate, 0.02), 0.98) for rate in (ranked, usual))
        likelihood = math.log(ranked / usual) if right else math.log((1 - ranked) / (1 - usual))
        odds = self._BEGIN + self._KEEP * (self._odds - self._BEGIN) + self._TEMPER * likelihood
        self._odds = min(max(odds, -self._MOST), self._MOST)


class _Clock:
    """Rounds of all texts, how long one takes, and the share of them in which a draft without weights ran."""

    def __init__(self) -> None:
        self.rounds = 0
        self.round_seconds = 0.0
        self.free_share = 0.0

    def tick(self, seconds: float, free: bool) -> None:
        """A round of a text is over. free: a draft without weights ran."""
        self.free_share += _FREE * (free - self.free_share)
        if 0 < seconds < math.inf:
            self.rounds += 1
            self.round_seconds += max(_ROUND, 1 / self.rounds) * (seconds - self.round_seconds)


class EdgePolicy(AutoPlanner):
    """`AutoPlanner` over the drafts in memory, gamma 0 included, and the choice of what is in memory.

    Acceptance of a draft in this text: the ranker's expectation (mean of its answers so far, newer ones heavier), which
    some ten tries in the text outweigh; without a ranker the long run of all texts, or the manifest's figure. Which of
    the two foresees better what is accepted is kept count of (`_Trust`), so a ranker that is wrong soon counts for
    nothing. The same estimate ranks drafts that are away: what to hold follows from what would be run
    (`choose_holding`).

    Without a ranker (to trust) nothing is known of a draft that is away. Then, while another would be much better at
    its best, one that was not heard in this text yet is brought into the last slot, the one that was away longest
    first: each at most once a text (again when the text turns), one in two scheduling points at most.

    Of several texts at a time each has its own ranking, what it heard and what it wants (`for_text`); the trust in the
    ranker, the clock and when a draft was here last are common.

    The draft that is wanted most reads the text only if what it promises for the rounds left, beside those that can
    run, is several times what the reading takes. Else it is not wanted in this text, though it stays in memory. Without
    a ranker (to trust) one that was hardly ever seen at work reads whatever it promises.

    `interval` = rounds of the longest load + 1, from measured costs, 2 to 16. `reads` = the first of what it wants;
    `preferred` = the same, None while the text is not worth its reading.
    """

    name = "edgespec"

    def __init__(self, costs: CostTable, drafts: Sequence[str], gamma_max: int = 8) -> None:
        super().__init__(costs, gamma_max)
        self.drafts = tuple(drafts)
        self._ranking: dict[str, float] = {}
        self._trust = _Trust()
        self._wanted: tuple[str, ...] = ()
        self._clock = _Clock()
        self._seen_at = dict.fromkeys(self.drafts, -1)  # the round in which a draft was here last; of all texts
        self._heard: set[str] = set()  # in this text
        self._here: frozenset[str] = frozenset()
        self._fallen: set[str] = set()
        self._unread: set[str] = set()  # drafts for which the text is not worth reading
        self._rounds_left = math.inf  # as the last view had them; a text that begins may be long
        self._patience = 0  # scheduling points until another draft may be tried out

    def for_text(self) -> EdgePolicy:
        own = super().for_text()
        own._ranking, own._heard, own._fallen, own._unread = {}, set(), set(), set()
        own._here, own._wanted = self._here, self._wanted
        return own

    def begin(self) -> None:
        super().begin()
        with self._lock:
            self._ranking = {}
            self._heard, self._unread = set(), set()
            self._rounds_left = math.inf
            self._patience = 1

    def rank(self, ranking: Mapping[str, float]) -> None:
        with self._lock:
            share = self._trust.share
            for name in self.drafts:
                rate = ranking.get(name)
                if rate is not None and 0 <= rate <= 1:
                    before = self._ranking.get(name, rate)
                    self._ranking[name] = ranked = before + _SMOOTH * (rate - before)
                    arm = self._arm(name, 1)
                    arm.expect(share * ranked + (1 - share) * arm.usual())
            self._guessing_along().relax(self._informed)

    @property
    def _informed(self) -> bool:
        return bool(self._ranking) and self._trust.share > _TRUSTED

    def informed(self) -> bool:
        return bool(self._ranking) and self._trust.share > _SURE

    def _judge_ranker(self, name: str | None, proposed: int, accepted: int) -> None:
        if name in self._ranking and proposed:
            self._trust.judge(self._ranking[str(name)], self._arm(str(name), 1).usual(), accepted > 0)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        seconds = observation.draft_seconds + observation.target_seconds
        with self._lock:
            self._judge_ranker(observation.draft, observation.proposed, observation.accepted)
            self._clock.tick(seconds, observation.draft is not None and observation.draft not in self._seen_at)

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        super().credit(candidate, proposed, accepted, **measured)
        with self._lock:
            self._judge_ranker(candidate.name, proposed, accepted)

    def interval(self) -> int:
        seconds = self._clock.round_seconds or self.costs.verify(2)
        longest = max((self.costs.load(name) for name in self.drafts), default=0.0)
        return min(max(math.ceil(longest / seconds) + SLACK, SHORTEST), LONGEST)

    def reads(self) -> str | None:
        return self._wanted[0] if self._wanted else None

    def preferred(self) -> str | None:
        wanted = self.reads()
        return None if wanted in self._unread else wanted

    def pays_to_read(self, lagging: Candidate, candidates: Sequence[Candidate]) -> bool:
        with self._lock:
            ready = [c for c in able(candidates) if not c.free and c.level > 0]
            others = [self._value(c._replace(behind=0), self.gamma_max)[1] for c in ready]
            speed = self._value(lagging._replace(behind=0), self.gamma_max)[1]
            saved = 1 - max([1 / self.costs.verify(1), *others]) / speed  # of the time of a round that it runs
            rounds = self._rounds_left * (1 - self._clock.free_share)
            seconds = rounds * (self._clock.round_seconds or self.costs.verify(2))
            unknown = not self.informed() and self._arm(lagging.name, 1).seen < _UNKNOWN
            pays = unknown or saved * seconds > _WORTH_READING * self.costs.catch_up(lagging.name, lagging.behind)
            (self._unread.discard if pays else self._unread.add)(lagging.name)
            return pays

    def hold(self, view: View) -> Holding | None:
        with self._lock:
            self._rounds_left = view.rounds_left
            self._arrived(view)
            prospects = {name: self._prospect(name) for name in view.drafts}
            plain = 1 / self.costs.verify(1)
            holding = choose_holding(view, prospects, plain, self._clock.round_seconds or self.costs.verify(2))
            if holding is not None and not self._informed:
                holding = self._try_out(view, prospects, holding, plain)
            self._wanted = () if holding is None else holding.wanted[: view.capacity]
            return holding

    def _arrived(self, view: View) -> None:
        for name in view.resident - self._here:
            self._guessing_along().owe(name)
        self._here = view.resident
        self._unread &= view.resident
        fallen = {name for name in view.resident if self._arm(name, 1).fallen}
        if fallen - self._fallen:  # the text has turned: who was heard before it did may be asked again
            self._heard = set()
        self._fallen = fallen
        self._heard |= view.resident
        for name in view.resident & self._seen_at.keys():
            self._seen_at[name] = self._clock.rounds

    def _prospect(self, name: str) -> Prospect:
        _, speed = self._value(Candidate(name, 1), self.gamma_max)
        rate = self._arm(name, 1).rates()[0]
        return Prospect(name, speed, rate, self.costs.load(name), self.costs.catch_up(name, _READS))

    def _try_out(self, view: View, prospects: Mapping[str, Prospect], holding: Holding, plain: float) -> Holding:
        """What is held, with the last slot for a draft that was not heard in this text, if that may be much better."""
        self._patience -= 1
        here = [prospect for name, prospect in prospects.items() if name in view.resident]
        if self._patience > 0 or view.loading or not here or view.capacity < 1:
            return holding
        best = max(here, key=lambda p: p.speed)
        at_home = best.rate >= _AT_HOME * self._expected.get(best.name, 1.0)
        speed = (_TEMPTS_FROM_HOME if at_home else _TEMPTS) * max(best.speed, plain)
        unheard = [name for name in view.drafts if name not in self._heard | view.failed]
        away = [name for name in unheard if self._at_best(name) > speed]
        load = self.costs.load(away[0]) if away else 0.0
        if not away or view.rounds_left * self._clock.round_seconds < 8 * load:
            return holding
        fresh = min(away, key=lambda name: self._seen_at[name])
        self._patience = 2
        kept = [best.name, *(n for n in holding.wanted if n in view.resident and n != best.name)][: view.capacity - 1]
        rest = [name for name in holding.wanted if name not in kept and name != fresh]
        reason = f"{fresh} was not heard in this text, and {best.name} gets {best.rate:.2f}"
        return Holding((*kept, fresh, *rest), reason)

    def _at_best(self, name: str) -> float:
        """Tokens a second that a draft may make in a text of its own domain, by its manifest."""
        rate, curve = self._expected.get(name, 0.5), self.costs.curve(self.gamma_max + 1)
        expected = reached = 1.0
        top = 1 / curve[0]
        for gamma in range(1, self.gamma_max + 1):
            reached *= rate
            expected += reached
            top = max(top, expected / (curve[gamma] + gamma * self.costs.draft(name)))
        return top
