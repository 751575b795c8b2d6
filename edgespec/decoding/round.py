"""One request: prefill, then rounds of plan, propose, verify, accept, commit.

`Generation.step()` runs the prefill or one round; `take()` returns what became certain. Every token, also the first,
goes through the one `_commit` loop, where a stop, an end token or a limit cuts everything at the same place.

Both also come in halves, around a forward that takes several requests at once (`edgespec.serving.batch`): `begin` and
`first` around the prefill's forwards, `look`, `prepare` and `finish` around a round's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter_ns

import numpy as np

from drafts.base import FloatArray
from edgespec.decoding.acceptance import Outcome, accept
from edgespec.decoding.counts import TO_SECONDS, Counts, Stamps
from edgespec.decoding.drafting import Shadow, guess, read_piece
from edgespec.decoding.guard import Guarded
from edgespec.decoding.halves import Looked, Prepared, Seen, Shared, clipped, observed, settled, trace_round
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.room import run_round
from edgespec.decoding.sampling import LogitsPipeline, token_logprob
from edgespec.decoding.session import Session
from edgespec.decoding.stopping import Answer
from edgespec.decoding.watching import Steering
from edgespec.results import GenerationResult, GenerationStats, TextDelta, TokenLogprob
from predictor.catch_up import CatchUp, Reading, able
from predictor.planner import NOTHING_TO_DRAFT, PLAIN, Candidate, Forecast, Observation, Plan, Planner


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
        self.seeded = not params.greedy and params.seed is not None
        if self.seeded:
            self._planner = self._planner.seeded()
        self._only_free = self.seeded and session.changing
        self._steering = steering
        self._catch_up = CatchUp()
        self._counts = Counts(session.statuses, len(self.prompt))
        self._reused = self._began_prefill = 0
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

    @property
    def over(self) -> bool:
        """Whether nothing is left to do but to close it."""
        return self.finished or self._cancelled or self._turn != self.session.turn

    def step(self) -> bool:
        """Run the prefill or one round; True while there is more to do. What the target raises is passed on."""
        if self.over:
            self.close()
            return False
        try:
            if self._begun:
                self.round()
            else:
                self._prefill()
        except BaseException:
            self.abandon()
            raise
        return not self.finished

    def take(self) -> TextDelta | None:
        """What became certain since the last call, or None; the piece with the finish reason comes exactly once."""
        if self._last_taken:
            return None
        begin = self._answer.taken
        text, token_ids, drafts = self._answer.take()
        self._taken_at = len(self._pushed)
        if not (text or token_ids or self.finished):
            return None
        self._last_taken = self.finished
        accepted = sum(draft is not None for draft in drafts)
        every = self._answer.logprobs
        logprobs = None if every is None else tuple(every[begin : begin + len(token_ids)])
        return TextDelta(text, tuple(token_ids), self._last_draft, accepted, self._answer.finish_reason, logprobs)

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
        if self._began_prefill:  # it has not come to its end
            self._count_prefill(complete=False)
        if self._begun and self._turn == self.session.turn:
            self.session.truncate(len(self.prompt) + len(self._answer.token_ids))
        self._closed = True

    def abandon(self) -> None:
        """End the answer after something was raised within a step, or within a half of one."""
        if self._committing:
            self._remake_answer()
        self.close()

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
        self.begin()
        logits = self.session.prefill(self.between_chunks)
        if logits is None:
            self.close()
        else:
            self.first(logits)

    def begin(self) -> None:
        """Make the prompt the conversation; forwards over what it has no KV for must follow, then `first`."""
        self._begun, self._began_prefill = True, perf_counter_ns()
        self._reused = self.session.start(self.prompt)
        if self._steering is not None:
            self._steering.begin(self.prompt)

    def between_chunks(self) -> bool:
        """To be called before each forward of the prefill; whether the answer was cancelled."""
        if self._steering is not None:
            self._steering.chunk()
        return self._cancelled

    def first(self, logits: FloatArray) -> None:
        """The prefill is done: choose the first token from its last row, float32 [1, vocab_rows]."""
        self._count_prefill(complete=True)
        first = self._commit(logits, [], accept([], [], logits, self._pipeline, self._rng), None)
        if self._steering is not None:
            self._steering.first(first, self.session)
        self._counts.first_token(self._began, perf_counter_ns())
        if self.finished:
            self.close()

    def _count_prefill(self, *, complete: bool) -> None:
        self._counts.prefilled(self._reused, self._began_prefill, perf_counter_ns(), complete=complete)
        self._began_prefill = 0

    def round(self) -> Seen:
        """One round, by the planner's own plan and with a forward of its own (two, if memory runs out)."""
        seen = run_round(self)
        self.learned(seen)
        return seen

    def look(self, *, read: bool = True) -> Looked:
        """Begin a round, under a lease of the session: drafts read up, and those are found that may run.

        read: whether drafts that lag read now. If not, they are found as well, and who plans decides what to do.
        """
        begin = perf_counter_ns()
        candidates = self._read_up(read)
        return Looked(candidates, begin, perf_counter_ns())

    def read(self, looked: Looked, reading: Reading) -> Looked:
        """Let a draft read a piece of what it missed, under the lease of `look`; then with those that may run."""
        begin = perf_counter_ns()
        left = read_piece(
            self.session, looked.candidates or (), reading, self._catch_up, self._steering, lambda: self._cancelled
        )
        return Looked(able(left), looked.begin, looked.read + perf_counter_ns() - begin)

    def plan(self, looked: Looked) -> Plan:
        """The planner's own plan for this text."""
        if looked.candidates is None or self.limit <= 0:
            return PLAIN
        return self._planner.plan(looked.candidates, self.limit)

    def forecast(self, looked: Looked) -> Forecast:
        """Which draft would run for this text and what is expected of it, where somebody else chooses gamma."""
        if looked.candidates is None or self.limit <= 0:
            return NOTHING_TO_DRAFT
        return self._planner.forecast(looked.candidates, self.limit)

    def prepare(self, looked: Looked, plan: Plan, asked: int | None = None) -> Prepared:
        """Let drafts guess, under the lease of `look`; then the target has to judge `proposal`.

        The plan is clipped to what may still be emitted; a gamma of 0 looks at no draft. asked: when it was asked for
        the plan, None = as soon as the drafts had read up.
        """
        session, candidates = self.session, looked.candidates if self.limit > 0 else None
        plan, level = clipped(plan, candidates or (), self.limit)
        compared = () if candidates is None else self._planner.shadows(plan, candidates)
        preferred = None if self._steering is None else self._steering.preferred()
        proposal, shadows, unread, planned, drafted = guess(session, plan, compared, self._choose, self._pipeline)
        began = looked.read if asked is None else asked
        return Prepared(looked, plan, level, proposal, shadows, unread, preferred, began, planned, drafted)

    def finish(
        self, prepared: Prepared, logits: FloatArray, resident: frozenset[str], shared: Shared | None = None
    ) -> Seen:
        """Accept, commit and learn, still under the lease; then call `learned` outside of it.

        logits: the target's rows for the proposal, float32 [guesses + 1, vocab_rows]. shared: None = the forward was
        made for this request alone, right after `prepare`.
        """
        session = self.session
        prepared, logits = settled(prepared, logits, session, self._pipeline)
        looked, plan, proposal = prepared.looked, prepared.plan, prepared.proposal
        draft = plan.draft if proposal.tokens else None
        taken = perf_counter_ns()
        sent, verified = (prepared.drafted, taken) if shared is None else (shared.begin, shared.end)
        outcome = accept(proposal.tokens, proposal.rows, logits, self._pipeline, self._rng)
        accepted = perf_counter_ns()
        emitted = self._commit(logits, proposal.tokens, outcome, draft)
        committed = perf_counter_ns()
        # A guess is judged if the text got that far: what lies behind a cut is neither right nor wrong.
        stood = min(outcome.accepted, len(emitted))
        judged = len(proposal) if len(emitted) > outcome.accepted else stood
        observation = observed(prepared, judged, stood, len(emitted), (verified - sent) * TO_SECONDS, shared)
        self._learn(observation, prepared.shadows, emitted)
        end = perf_counter_ns()
        stamps = Stamps(*looked[1:], *prepared[-3:], sent, verified, taken, accepted, committed, end)
        there = resident if looked.candidates is None else {candidate.name for candidate in looked.candidates}
        # A request with a seed keeps to free drafts: then nothing is missed.
        missed = prepared.preferred is not None and prepared.preferred not in there and not self._only_free
        self._counts.round(plan, draft, judged, stood, stamps, emitted=len(emitted), fallback=missed)
        self._catch_up.earn((end - looked.begin) * TO_SECONDS)
        if session.tracer.enabled:
            trace_round(session.tracer, plan, draft, observation, stamps)
        return Seen(observation, emitted)

    def learned(self, seen: Seen) -> None:
        """The end of a round, outside of its lease: tell who looks after the working set."""
        if self._steering is not None:
            self._steering.round(*seen, self.session)
        if self.finished:
            self.close()

    @property
    def limit(self) -> int:
        """Tokens that a draft may still add, before the one that the target adds itself."""
        return self.params.max_new_tokens - (len(self.session.tokens) - len(self.prompt)) - 1

    def _read_up(self, read: bool) -> Sequence[Candidate] | None:
        """The drafts that may run in this round, after one that lags has read a piece of what it missed.

        None if there is nothing to plan.
        """
        session = self.session
        if self.limit <= 0 or self._planner.off or not session.statuses:
            return None
        candidates = session.candidates()
        if self._only_free:
            return [candidate for candidate in candidates if candidate.free]
        if self._steering is None or not read:
            return candidates  # who runs reads all it missed on the way, unless `read` is called before
        steering = self._steering
        reading = self._catch_up.choose(
            candidates,
            steering.reads(),
            bool(steering.informed()),
            lambda lagging, among: steering.pays_to_read(lagging, among) is not False,
        )
        if reading is None:
            return able(candidates)
        return able(read_piece(session, candidates, reading, self._catch_up, self._steering, lambda: self._cancelled))

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

    def _learn(self, observation: Observation, shadows: Iterable[Shadow], emitted: list[int]) -> None:
        self._planner.observe(observation)
        if observation.draft is not None and observation.proposed:
            self._saw(observation.draft, observation.accepted)
        for shadow in shadows:
            candidate, tokens, seconds, unread = shadow
            judged, right = shadow.judged(emitted)
            self._planner.credit(candidate, judged, right, drafted=len(tokens), seconds=seconds, caught_up=unread)
            if judged:
                self._saw(candidate.name, right)

    def _saw(self, draft: str, right: int) -> None:
        if self._steering is not None:
            self._steering.saw(draft, right > 0)
