"""One request: prefill, then rounds of plan, propose, verify, accept, commit.

`Generation.step()` runs the prefill or one round; `take()` returns what became certain. Every token, also the first,
goes through the one `_commit` loop, where a stop, an end token or a limit cuts everything at the same place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import numpy as np

from drafts.base import FloatArray, Proposal
from edgespec.decoding.acceptance import Outcome, accept
from edgespec.decoding.counts import TO_SECONDS, Counts
from edgespec.decoding.guard import Guarded
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.sampling import LogitsPipeline, token_logprob
from edgespec.decoding.session import Session
from edgespec.decoding.stopping import Answer
from edgespec.results import GenerationResult, GenerationStats, TextDelta, TokenLogprob
from predictor.catch_up import CatchUp, Reading, able
from predictor.planner import PLAIN, Candidate, Observation, Plan, Planner


class Steering(Protocol):
    """Looks after the working set while one answer is made. Nothing here may raise, nor wait within a round."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Before the prefill."""

    def chunk(self) -> None:
        """Between two chunks of the prefill."""

    def first(self, tokens: Sequence[int], session: Session) -> None:
        """The answer's first token, which comes with the prefill."""

    def round(self, observation: Observation, emitted: Sequence[int], session: Session) -> None:
        """After a round, outside of its lease."""

    def saw(self, draft: str, right: bool) -> None:
        """The first token that a draft guessed, as what ran or as a shadow, was judged."""

    def read_up(self, draft: str, tokens: int, seconds: float) -> None:
        """A draft read so many tokens that it had missed."""

    def preferred(self) -> str | None:
        """The draft that is wanted most, resident or not."""

    def informed(self) -> bool | None:
        """Whether something says how each draft would do, without its reading the text."""


class _Shadow(NamedTuple):
    """A guess that is only compared, what it took, and how many tokens the draft had to read up on."""

    candidate: Candidate
    tokens: list[int]
    seconds: float
    unread: int


class Generation:
    """The answer to one prompt while it is being made.

    Raises PromptError and ParameterError before any model work. Sampling with a seed gives the same text on every run:
    where the session's planner depends on clocks or earlier requests, such a request runs with a fixed gamma instead,
    and where drafts come and go, on those that never do (the law of the text is the same for any plan, but which text a
    seed picks is not).
    After an exception from `step` (the target's failure, Ctrl-C) the generation is over as "cancelled" with the tokens
    that were committed, and the session is ready for the next one.

    began_ns: `perf_counter_ns()` when the request arrived, for the time to the first token. steering: None = what is
    resident is nobody's business here.
    """

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        began_ns: int | None = None,
        steering: Steering | None = None,
    ) -> None:
        self._began = perf_counter_ns() if began_ns is None else began_ns
        self.session = session
        self.prompt = session.check(prompt)
        # The context's end is one more limit on new tokens; as such it cuts exactly where any other limit would.
        limit = min(params.max_new_tokens, session.context - len(self.prompt))
        params = dataclasses.replace(params, max_new_tokens=limit, min_new_tokens=min(params.min_new_tokens, limit))
        self.params = params
        self._pipeline = LogitsPipeline(
            params,
            vocab_rows=session.target.spec.vocab_size,
            token_count=session.token_count,
            eos_ids=session.eos_ids,
            prompt=self.prompt,
        )
        self._answer = self._empty_answer()
        self._pushed: list[tuple[int, str | None, TokenLogprob | None]] = []  # what the answer is made of
        self._taken_at = 0  # how much of it was there at the last `take`
        self._committing = False
        judging, drafting = np.random.SeedSequence(params.seed).spawn(2)
        self._rng = np.random.default_rng(judging)
        self._choose = self._pipeline.draft_choose(np.random.default_rng(drafting))
        self._planner: Planner = Guarded(session.planner)
        seeded = not params.greedy and params.seed is not None
        if seeded:
            self._planner = self._planner.seeded()
        self._only_free = seeded and session.changing
        self._steering = steering
        self._catch_up = CatchUp()
        self._counts = Counts(session.statuses, len(self.prompt))
        self._cancelled = False
        self._begun = False
        self._closed = False
        self._last_taken = False
        self._last_draft: str | None = None
        session.turn += 1
        self._turn = session.turn

    def _empty_answer(self) -> Answer:
        stop_ids = frozenset() if self.params.ignore_eos else self.session.eos_ids
        return Answer(self.params, self.session.tokenizer, stop_ids=stop_ids)

    # What the caller sees

    @property
    def finished(self) -> bool:
        return self._answer.finish_reason is not None

    def cancel(self) -> None:
        """End the answer at the next chunk or round, as "cancelled". May be called from any thread."""
        self._cancelled = True

    def step(self) -> bool:
        """Run the prefill or one round; True while there is more to do. What the target raises is passed on."""
        if self.finished or self._cancelled or self._turn != self.session.turn:
            self.close()
            return False
        try:
            if self._begun:
                with self.session.leased() as resident:
                    observation, emitted = self._round(resident)
                if self._steering is not None:
                    self._steering.round(observation, emitted, self.session)
            else:
                self._prefill()
            if self.finished:
                self.close()
        except BaseException:
            if self._committing:
                self._remake_answer()
            self.close()
            raise
        return not self.finished

    def take(self) -> TextDelta | None:
        """What became certain since the last call, or None; the piece with the finish reason comes exactly once."""
        if self._last_taken:
            return None
        text, token_ids, drafts = self._answer.take()
        self._taken_at = len(self._pushed)
        if not (text or token_ids or self.finished):
            return None
        self._last_taken = self.finished
        accepted = sum(draft is not None for draft in drafts)
        return TextDelta(text, tuple(token_ids), self._last_draft, accepted, self._answer.finish_reason)

    def deltas(self) -> Iterator[TextDelta]:
        """Run to the end, piece by piece. Leaving the loop early ends the answer as "cancelled"."""
        try:
            more = True
            while more:
                more = self.step()
                delta = self.take()
                if delta is not None:
                    yield delta
        finally:
            self.close()

    def close(self) -> None:
        """End the answer (as "cancelled" if it is not over) and cut the session to exactly its tokens."""
        if self._closed:
            return
        self._answer.finish("cancelled")
        if self._begun and self._turn == self.session.turn:
            self.session.truncate(len(self.prompt) + len(self._answer.token_ids))
        self._closed = True

    def _remake_answer(self) -> None:
        """Ctrl-C inside a push may leave text, ids and logprobs at different tokens: push what was committed anew."""
        answer = self._empty_answer()
        for place, entry in enumerate(self._pushed):
            if place == self._taken_at:
                answer.take()
            answer.push(*entry)
        if len(self._pushed) == self._taken_at:
            answer.take()
        self._answer = answer

    @property
    def stats(self) -> GenerationStats:
        """Counters so far; final when the generation is over."""
        return self._counts.stats(self._answer.drafts)

    @property
    def result(self) -> GenerationResult:
        """The answer so far; final when the generation is over."""
        answer = self._answer
        logprobs = answer.logprobs
        return GenerationResult(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason or "cancelled",
            prompt_tokens=len(self.prompt),
            stats=self.stats,
            drafts=tuple(answer.drafts),
            logprobs=None if logprobs is None else tuple(logprobs),
        )

    # The path of the request

    def _prefill(self) -> None:
        begin = perf_counter_ns()
        self._begun = True
        reused = self.session.start(self.prompt)
        if self._steering is not None:
            self._steering.begin(self.prompt)
        logits = self.session.prefill(self._between_chunks)
        end = perf_counter_ns()
        self._counts.prefilled(reused, begin, end, complete=logits is not None)
        if logits is None:
            self.close()
            return
        first = self._commit(logits, [], accept([], [], logits, self._pipeline, self._rng), None)
        if self._steering is not None:
            self._steering.first(first, self.session)
        self._counts.first_token(self._began, perf_counter_ns())

    def _between_chunks(self) -> bool:
        if self._steering is not None:
            self._steering.chunk()
        return self._cancelled

    def _round(self, resident: frozenset[str]) -> tuple[Observation, list[int]]:
        session = self.session
        begin = perf_counter_ns()
        able_now = self._read_up()
        read = perf_counter_ns()
        plan, candidates = self._plan(able_now)
        shadows = self._guess_shadows(plan, candidates)
        planned = perf_counter_ns()
        preferred = None if self._steering is None else self._steering.preferred()
        unread = session.unread(plan.draft) if plan.draft is not None else 0
        proposal = self._propose(plan) if plan.draft is not None else Proposal()
        draft = plan.draft if proposal.tokens else None
        drafted = perf_counter_ns()
        logits = session.verify(proposal.tokens)
        verified = perf_counter_ns()
        outcome = accept(proposal.tokens, proposal.rows, logits, self._pipeline, self._rng)
        accepted = perf_counter_ns()
        emitted = self._commit(logits, proposal.tokens, outcome, draft)
        committed = perf_counter_ns()
        # A guess is judged if the text got that far: what lies behind a cut is neither right nor wrong.
        stood = min(outcome.accepted, len(emitted))
        judged = len(proposal) if len(emitted) > outcome.accepted else stood
        observation = Observation(
            draft=plan.draft,
            level=next((c.level for c in candidates if c.name == plan.draft), 0),
            drafted=len(proposal),
            proposed=judged if draft == plan.draft else 1,  # asked and nothing usable came: as good as a wrong guess
            accepted=stood,
            width=len(proposal) + 1,
            draft_seconds=(drafted - planned) * TO_SECONDS,
            target_seconds=(verified - drafted) * TO_SECONDS,
            caught_up=unread,
            asked=plan.gamma if plan.draft is not None else 0,
            emitted=len(emitted),
        )
        self._learn(observation, shadows, emitted)
        end = perf_counter_ns()
        stamps = (begin, read, planned, drafted, verified, accepted, committed, end)
        there = resident if able_now is None else {candidate.name for candidate in able_now}
        # A request with a seed keeps to free drafts: then nothing is missed.
        missed = preferred is not None and preferred not in there and not self._only_free
        self._counts.round(plan, draft, judged, stood, stamps, emitted=len(emitted), fallback=missed)
        self._catch_up.earn((end - begin) * TO_SECONDS)
        if session.tracer.enabled:
            self._trace(plan, draft, observation, stamps)
        return observation, emitted

    @property
    def _limit(self) -> int:
        """Tokens that a draft may still add, before the one that the target adds itself."""
        return self.params.max_new_tokens - (len(self.session.tokens) - len(self.prompt)) - 1

    def _read_up(self) -> Sequence[Candidate] | None:
        """The drafts that may run in this round, after one that lags has read a piece of what it missed.

        None if there is nothing to plan.
        """
        session = self.session
        if self._limit <= 0 or self._planner.off or not session.statuses:
            return None
        candidates = session.candidates()
        if self._only_free:
            return [candidate for candidate in candidates if candidate.free]
        if self._steering is None:
            return candidates  # who runs reads all it missed on the way
        reading = self._catch_up.choose(candidates, self._steering.preferred(), bool(self._steering.informed()))
        if reading is None:
            return able(candidates)
        begin = perf_counter_ns()
        before = next(c.behind for c in candidates if c.name == reading.draft)
        left = self._read(reading, before)
        end = perf_counter_ns()
        if left is None:
            return able([candidate for candidate in candidates if candidate.name != reading.draft])
        self._catch_up.took(before - left, (end - begin) * TO_SECONDS)
        self._steering.read_up(reading.draft, before - left, (end - begin) * TO_SECONDS)
        session.tracer.event("catch-up", begin, end, draft=reading.draft, tokens=before - left, left=left)
        return able([c._replace(behind=left) if c.name == reading.draft else c for c in candidates])

    def _read(self, reading: Reading, behind: int) -> int | None:
        """Let a draft read; how many tokens are left, None if it failed. One call may read less than what it may."""
        goal, left = max(behind - reading.limit, 0), behind
        while True:
            before, rest = left, self.session.catch_up(reading.draft, left - goal)
            if rest is None or rest <= goal or rest >= before or self._cancelled:
                return rest
            left = rest

    def _plan(self, candidates: Sequence[Candidate] | None) -> tuple[Plan, Sequence[Candidate]]:
        """The planner's plan, clipped to what may still be emitted; a gamma of 0 looks at no draft."""
        limit = self._limit
        if candidates is None or limit <= 0:
            return PLAIN, ()
        plan = self._planner.plan(candidates, limit)
        gamma = min(plan.gamma, limit)
        if plan.draft is None or gamma <= 0 or all(c.name != plan.draft for c in candidates):
            return PLAIN, candidates
        return Plan(plan.draft, gamma, plan.floor), candidates

    def _propose(self, plan: Plan) -> Proposal:
        """The draft's guesses, cleaned; nothing if it fails."""
        session, name = self.session, plan.draft
        assert name is not None
        try:
            raw = session.draft(name).propose(session.tokens, plan.gamma, self._choose, floor=plan.floor)
            proposal = clean(raw, plan.gamma, self._pipeline)
        except Exception as error:
            session.draft_failed(name, error)
            return Proposal()
        session.statuses[name].worked()
        return proposal

    def _commit(self, logits: FloatArray, guesses: list[int], outcome: Outcome, draft: str | None) -> list[int]:
        """Add the tokens that stand one by one until one ends the answer; returns those that were added."""
        session, answer, pipeline = self.session, self._answer, self._pipeline
        top, base = self.params.logprobs, len(session.tokens)
        emitted = []
        self._committing = True
        for place, token in enumerate((*guesses[: outcome.accepted], outcome.token)):
            logprob = None if top is None else token_logprob(logits[place, : session.token_count], token, top)
            entry = (token, draft if place < outcome.accepted else None, logprob)
            reason = answer.push(*entry)
            pipeline.push(token)
            session.tokens.append(token)
            self._pushed.append(entry)
            emitted.append(token)
            if reason is not None:
                break
        self._committing = False
        self._last_draft = draft
        # Last, because it declares right what was computed: the guesses that stand. The final token has no KV yet.
        session.valid = base + min(outcome.accepted, len(emitted))
        return emitted

    # What the planner learns

    def _guess_shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> list[_Shadow]:
        """Guesses of drafts that will not run, made before anything is judged."""
        session, guessed = self.session, []
        for candidate in self._planner.shadows(plan, candidates):
            begin = perf_counter_ns()
            try:
                unread = session.unread(candidate.name)
                draft = session.draft(candidate.name)
                tokens = draft.propose(session.tokens, candidate.shadow, self._choose).tokens
            except Exception as error:
                session.draft_failed(candidate.name, error)
            else:
                guessed.append(_Shadow(candidate, tokens, (perf_counter_ns() - begin) * TO_SECONDS, unread))
        return guessed

    def _learn(self, observation: Observation, shadows: Iterable[_Shadow], emitted: list[int]) -> None:
        self._planner.observe(observation)
        if observation.draft is not None and observation.proposed:
            self._saw(observation.draft, observation.accepted)
        for candidate, guess, seconds, unread in shadows:
            comparable = min(len(guess), len(emitted))
            right = next((i for i in range(comparable) if guess[i] != emitted[i]), comparable)
            judged = min(right + 1, comparable)
            self._planner.credit(candidate, judged, right, drafted=len(guess), seconds=seconds, caught_up=unread)
            if judged:
                self._saw(candidate.name, right)

    def _saw(self, draft: str, right: int) -> None:
        if self._steering is not None:
            self._steering.saw(draft, right > 0)

    def _trace(self, plan: Plan, draft: str | None, seen: Observation, stamps: Sequence[int]) -> None:
        event = self.session.tracer.event
        begin, read, planned, drafted, verified, accepted, committed, end = stamps
        event("round", begin, end, draft=draft, gamma=plan.gamma, accepted=seen.accepted)
        event("plan", read, planned)
        event("draft", planned, drafted, draft=plan.draft, tokens=seen.drafted)
        event("verify", drafted, verified, width=seen.width)
        event("accept", verified, accepted)
        event("commit", accepted, committed)
        event("learn", committed, end)


def clean(proposal: Proposal, gamma: int, pipeline: LogitsPipeline) -> Proposal:
    """At most `gamma` guesses, cut before the first id that is no token, as plain ints with rows that are laws.

    Raises ValueError or TypeError for what no correct draft returns; the round then counts a failure.
    """
    if len(proposal.rows) != len(proposal.tokens):
        raise ValueError(f"{len(proposal.tokens)} guesses with {len(proposal.rows)} rows")
    tokens: list[int] = []
    for token in proposal.tokens[:gamma]:
        token = index(token)
        if not 0 <= token < pipeline.token_count:
            break
        tokens.append(token)
    if pipeline.greedy:
        return Proposal(tokens, [None] * len(tokens))
    rows = proposal.rows[: len(tokens)]
    for token, row in zip(tokens, rows):
        if row is not None and not _is_law(row, token, pipeline.vocab_rows):
            raise ValueError(f"the row of guess {token} is not the distribution it was drawn from")
    return Proposal(tokens, rows)


def _is_law(row: FloatArray, token: int, length: int) -> bool:
    """Non-negative, adds up to 1, gives the token some mass. Comparisons with NaN are false."""
    return row.shape == (length,) and bool(row[token] > 0 and row.min() >= 0 and abs(float(row.sum()) - 1) < 1e-3)
