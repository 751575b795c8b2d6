"""A world of arrivals: the serving loop's batches over simulated sequences, with the planners' own code, no real time.

As in `edgespec/serving`: requests wait in a queue, first come first served, for one of `max_sessions` places and for
the KV positions that they can need at most; a batch is one forward over every running sequence's block and a piece of
prompts (`prefill_rows` tokens beside others, more alone); drafts of one name work one after the other, different ones
side by side on a few threads; a sequence's draft reads what it missed before it proposes.

What a guess is worth at each position of an answer is drawn once for each job, so that the fate of a token is the same
under every planner. What a planner is told of a text is learned as in `AutoPlanner`: from what ran and from shadows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from predictor.acceptance import Acceptance
from predictor.costs import CostTable
from predictor.load.base import BatchOutcome, LoadPlanner, LoadView, Running
from predictor.load.costs import BatchCosts

PREFILL_ROWS, PREFILL_ALONE = 64, 256
_USUAL = 16  # tokens that a draft may lag behind without extra cost: about two rounds' worth
_WINDOW = 256  # tokens that a draft looks back at most
_SHADOW_EVERY, _SHADOW_TOKENS = 16, 2  # rounds in which a text without guesses lets its draft guess along
_PRIOR = 0.5  # acceptance of a draft before anything was seen of it


class Turn(NamedTuple):
    """From that token of the answer on another draft has more to go on, as lookup has where the text repeats itself."""

    begin: int
    draft: str | None
    rates: Sequence[float]


class Job(NamedTuple):
    """A request. time: of its arrival, seconds. prompt, new: tokens. draft: that it would use; None = none can help.
    rates[i]: the chance that guess i of a block is right, given those before. fixed: the gamma it must have.
    expected: what the ranker says of the draft's first token in this text; None = there is no ranker. turns: ascending;
    what a text turns to is known when it does, as a policy knows what a draft has to go on."""

    time: float
    prompt: int
    new: int
    draft: str | None
    rates: Sequence[float]
    fixed: int | None = None
    expected: float | None = None
    turns: Sequence[Turn] = ()


class Done(NamedTuple):
    """What became of a job. Times in seconds since the begin: first token, last token (NaN = not in this run). pieces:
    (time, tokens) of each round."""

    time: float
    first: float
    finished: float
    tokens: int
    pieces: Sequence[tuple[float, int]]


class Batch(NamedTuple):
    """One batch. time: of its begin. lengths: tokens drafted, by sequence; drafted, accepted, emitted: in all. kv_free:
    share of the pool."""

    time: float
    seconds: float
    sequences: int
    queued: int
    rows: int
    lengths: tuple[int, ...]
    drafted: int
    accepted: int
    emitted: int
    kv_free: float


class _Drafting(NamedTuple):
    """Seconds of a batch in which drafts worked: of all, shadows included; of what was planned, as `BatchOutcome` has
    it; and of that, one sequence after the other."""

    seconds: float
    planned: float
    work: float


@dataclass
class WorldResult:
    """requests: in the order of the jobs. batches: empty if they were not kept."""

    requests: list[Done]
    batches: list[Batch]
    seconds: float = 0.0  # until the last batch ended
    busy: float = 0.0  # of them, in which a batch ran
    tokens: int = 0
    batch_count: int = 0

    @property
    def throughput(self) -> float:
        """Tokens a second in which there was something to do."""
        return self.tokens / self.busy if self.busy else 0.0


class _Sequence:
    """A job that has a place."""

    __slots__ = (
        "arm", "arms", "behind", "coming", "done", "draft", "first", "hits", "job", "key", "pieces", "turns", "unread",
        "unshadowed",
    )  # fmt: skip

    def __init__(self, key: int, job: Job, hits: Sequence[int]) -> None:
        self.key, self.job, self.hits = key, job, hits
        self.draft: str | None = None
        self.arm: Acceptance | None = None
        self.arms: dict[str, Acceptance] = {}  # of the drafts that it had so far
        self.coming = 0  # turns that are behind it
        self.turns = (Turn(0, job.draft, job.rates), *job.turns)
        self.unread = job.prompt  # of the prompt, by the target
        self.behind = min(job.prompt, _WINDOW)  # of the conversation, by the draft
        self.done = 0  # tokens of the answer
        self.first = math.nan
        self.pieces: list[tuple[float, int]] = []
        self.unshadowed = 0  # rounds in which nothing was guessed


class World:
    """A device that serves with a load planner; `run` may be called once for each stream of jobs.

    costs, drafts: the true seconds. The planner has tables of its own, which learn from batches as they go.
    max_sessions, prefill_rows, prefill_alone: as in the loop. kv_tokens: positions of the pool, None = no limit.
    gamma_max: guesses of a block that are looked ahead. threads: drafts of different names that work at a time.
    noise: relative spread of all seconds. seed: of the jobs' luck and of the noise.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        costs: BatchCosts,
        drafts: CostTable | Mapping[str, float],
        *,
        max_sessions: int = 8,
        prefill_rows: int = PREFILL_ROWS,
        prefill_alone: int = PREFILL_ALONE,
        kv_tokens: int | None = None,
        gamma_max: int = 8,
        threads: int = 2,
        noise: float = 0.0,
        seed: int = 0,
        keep_batches: bool = True,
    ) -> None:
        self._planner = planner
        self._costs = costs
        self._drafts = drafts if isinstance(drafts, CostTable) else CostTable(drafts=drafts)
        self._places = max_sessions
        self._prefill_rows, self._prefill_alone = prefill_rows, prefill_alone
        self._kv = kv_tokens
        self._gamma_max = gamma_max
        self._threads = threads
        self._noise = noise
        self._seed = seed
        self._keep = keep_batches
        self._rng = np.random.default_rng([seed, 1])
        self._arms: dict[str, Acceptance] = {}

    def run(self, jobs: Sequence[Job], until: float = math.inf) -> WorldResult:
        """Serve these jobs (ascending in time) to their end, or until that second."""
        self._now, self._used = 0.0, 0
        self._waiting: deque[_Sequence] = deque()
        self._placed: list[_Sequence] = []
        result = WorldResult([Done(job.time, math.nan, math.nan, 0, ()) for job in jobs], [])
        coming = 0
        while coming < len(jobs) or self._waiting or self._placed:
            if not self._waiting and not self._placed:
                self._now = max(self._now, jobs[coming].time)
            if self._now >= until:
                break
            while coming < len(jobs) and jobs[coming].time <= self._now:
                self._waiting.append(self._arrived(coming, jobs[coming]))
                coming += 1
            self._admit()
            if not self._placed:
                raise ValueError(f"job {self._waiting[0].key} can never fit: {self._kv} positions in all")
            self._batch(result)
        result.seconds = self._now
        for sequence in (*self._placed, *self._waiting):
            result.requests[sequence.key] = _done(sequence, math.nan)
        return result

    def _arrived(self, key: int, job: Job) -> _Sequence:
        for common in self._arms.values():
            common.age()
        sequence = _Sequence(key, job, self._fates(key, job))
        self._turn(sequence)
        return sequence

    def _turn(self, s: _Sequence) -> None:
        """The text may have come to where another draft has more to go on."""
        while s.coming < len(s.turns) and s.turns[s.coming].begin <= s.done:
            s.draft = name = s.turns[s.coming].draft
            s.coming += 1
            s.arm = None if name is None else s.arms.get(name)
            if name is not None and s.arm is None:
                common = self._arms.setdefault(name, Acceptance(_PRIOR, self._gamma_max))
                s.arm = s.arms[name] = common.for_text()
                s.arm.expect(s.job.expected if name == s.job.draft else None)

    def _fates(self, key: int, job: Job) -> list[int]:
        """How many of the first `gamma_max` guesses are right, at each position of the answer.

        The token at a position has one luck, and is guessed at place i where that is below the rate of place i: blocks
        that begin at neighbouring positions mostly agree, as they do in real text.
        """
        count = self._gamma_max
        luck = np.random.default_rng([self._seed, 0, key]).random(job.new + 1 + count)
        windows = np.lib.stride_tricks.sliding_window_view(luck, count)[: job.new + 1]
        hits: list[int] = [0] * (job.new + 1)
        turns = (Turn(0, job.draft, job.rates), *job.turns)
        ends = [turn.begin for turn in turns[1:]] + [job.new + 1]
        for turn, end in zip(turns, ends):
            rates = np.asarray(turn.rates[:count], dtype=np.float64)
            if turn.draft is not None and len(rates):
                right = windows[turn.begin : end, : len(rates)] < rates
                hits[turn.begin : end] = np.cumprod(right, axis=1).sum(axis=1).tolist()
        return hits

    def _need(self, sequence: _Sequence) -> int:
        return sequence.job.prompt + sequence.job.new

    def _admit(self) -> None:
        while self._waiting and len(self._placed) < self._places:
            need = self._need(self._waiting[0])
            if self._kv is not None and self._used + need > self._kv:
                break
            self._used += need
            self._placed.append(self._waiting.popleft())

    @property
    def _kv_free(self) -> float:
        return 1.0 if not self._kv else 1 - self._used / self._kv

    # One batch

    def _batch(self, result: WorldResult) -> None:
        running = [s for s in self._placed if not s.unread]
        reading, rows_read = self._prompts(bool(running))
        view = LoadView([self._shown(s) for s in running], len(self._waiting), self._kv_free, rows_read, self._now)
        planned = self._planner.lengths(view) if running else ()
        lengths = [self._length(s, length) for s, length in zip(running, planned)]
        drafting = self._draft(running, lengths)
        rows, context = len(running) + rows_read + sum(lengths), sum(s.context for s in view.running)
        forward = self._costs.seconds(len(running), rows, context) * self._noisy()
        seconds = drafting.seconds + forward + self._costs.overhead * len(running)
        begin, self._now = self._now, self._now + seconds
        outcome = self._judge(view, running, lengths, drafting, forward, seconds, rows)
        for sequence, tokens in reading:
            sequence.unread -= tokens
            if not sequence.unread:
                self._emit(sequence, 1, result)
        for sequence, tokens in zip(running, outcome.emitted):
            self._emit(sequence, tokens, result)
        if running:
            self._planner.observe(outcome)
        result.busy += seconds
        result.batch_count += 1
        if self._keep:
            drafted, accepted, emitted = sum(lengths), sum(outcome.accepted), sum(outcome.emitted)
            about = (len(running), len(self._waiting), rows, tuple(lengths), drafted, accepted, emitted, self._kv_free)
            result.batches.append(Batch(begin, seconds, *about))

    def _prompts(self, beside: bool) -> tuple[list[tuple[_Sequence, int]], int]:
        """The pieces of prompts of this batch, first come first served."""
        left = self._prefill_rows if beside else self._prefill_alone
        most, pieces = left, []
        for sequence in self._placed:
            if sequence.unread and left:
                tokens = min(sequence.unread, left)
                pieces.append((sequence, tokens))
                left -= tokens
        return pieces, most - left

    def _shown(self, s: _Sequence) -> Running:
        """What is known of a sequence before its round."""
        job = s.job
        limit = job.new - s.done - 1  # as the loop shows it; how far ahead rates go is another matter
        behind = s.behind if s.behind > _USUAL else 0
        fixed = None if job.fixed is None else min(job.fixed, self._gamma_max)
        if s.arm is None:
            return Running(s.key, None, (), (), 0, limit, job.prompt + s.done, fixed)
        return Running(
            s.key, s.draft, s.arm.rates(), s.arm.offered(), behind, limit, job.prompt + s.done, fixed
        )  # fmt: skip

    def _length(self, s: _Sequence, length: int) -> int:
        return 0 if s.arm is None else min(length, s.job.new - s.done - 1)

    def _draft(self, running: Sequence[_Sequence], lengths: Sequence[int]) -> _Drafting:
        """All drafting: groups of one draft, the longest first, to the thread that is free first."""
        groups: dict[str, float] = {}
        planned = 0.0
        for s, length in zip(running, lengths):
            name, seconds = s.draft, 0.0
            if name is None:
                continue
            if length:
                seconds = length * self._drafts.draft(name)
                if s.behind > _USUAL:
                    seconds += self._drafts.catch_up(name, s.behind)
                s.behind = 0
                planned += seconds
            elif s.unshadowed >= _SHADOW_EVERY:
                seconds = _SHADOW_TOKENS * self._drafts.draft(name)
            if seconds:
                groups[name] = groups.get(name, 0.0) + seconds
        if not groups:
            return _Drafting(0.0, 0.0, 0.0)
        threads = [0.0] * self._threads
        for seconds in sorted(groups.values(), reverse=True):
            threads[threads.index(min(threads))] += seconds
        noisy = self._noisy()
        took = max(threads) * noisy
        return _Drafting(took, took * planned / sum(groups.values()), planned * noisy)

    def _judge(
        self,
        view: LoadView,
        running: Sequence[_Sequence],
        lengths: Sequence[int],
        drafting: _Drafting,
        forward: float,
        seconds: float,
        rows: int,
    ) -> BatchOutcome:
        """What each block brings; the texts' statistics learn from it."""
        accepted, emitted = [], []
        for s, length in zip(running, lengths):
            right = min(s.hits[s.done], length)
            tokens = min(right + 1, s.job.new - s.done)
            accepted.append(right)
            emitted.append(tokens)
            if s.arm is None:
                continue
            if length:
                s.arm.update(length, right)
                s.unshadowed = 0
            elif s.unshadowed >= _SHADOW_EVERY:  # only the token that was emitted can be compared
                s.arm.update(1, min(s.hits[s.done], 1))
                s.unshadowed = 0
            else:
                s.unshadowed += 1
            if not length:
                s.behind = min(s.behind + tokens, _WINDOW)
        return BatchOutcome(view, lengths, accepted, emitted, *drafting[1:], forward, seconds, rows)

    def _emit(self, s: _Sequence, tokens: int, result: WorldResult) -> None:
        if not s.done:
            s.first = self._now
        s.done += tokens
        if s.coming < len(s.turns):
            self._turn(s)
        s.pieces.append((self._now, tokens))
        result.tokens += tokens
        if s.done >= s.job.new:
            self._placed.remove(s)
            self._used -= self._need(s)
            result.requests[s.key] = _done(s, self._now)

    def _noisy(self) -> float:
        return math.exp(self._noise * self._rng.standard_normal()) if self._noise else 1.0


def _done(s: _Sequence, finished: float) -> Done:
    return Done(s.job.time, s.first, finished, s.done, s.pieces)
