"""One batch: a round of every request that runs and a piece of a prompt, judged by one forward of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter, perf_counter_ns
from typing import NamedTuple, TypeVar

from drafts.base import Proposal
from edgespec.decoding.counts import TO_SECONDS
from edgespec.decoding.halves import Looked, Prepared, Seen, Shared
from edgespec.models.base import Decoder, ForwardOutput, Part
from edgespec.models.cuda.memory import out_of_memory
from edgespec.serving.active import Active
from edgespec.serving.drafters import Drafters
from edgespec.serving.lengths import Lengths
from edgespec.serving.records import BatchRecord
from predictor.catch_up import FREELY
from predictor.planner import PLAIN, Plan

_T = TypeVar("_T")

PREFILL_ROWS = 64  # of prompts in one batch while others run: they keep their pace
PREFILL_ALONE = 256  # while nobody waits for a round


class Situation(NamedTuple):
    """What a batch has to know of the rest. kv_free: share of the pool."""

    queued: int = 0
    kv_free: float = 1.0


@dataclass(slots=True)
class _Turn:
    """One request's part in this batch. A part without `prepared` is a piece of its prompt."""

    active: Active
    looked: Looked | None = None
    plan: Plan | None = None
    prepared: Prepared | None = None
    resident: frozenset[str] = frozenset()
    part: Part | None = None
    seen: Seen | None = None
    error: Exception | None = None

    def give_up_guesses(self) -> None:
        """Make it a plain round, if it is one."""
        if self.prepared is not None:
            self.prepared = self.prepared._replace(plan=PLAIN, proposal=Proposal())
            self.part = self.active.session.ask_verify([])


class BatchRunner:
    """Runs batches on one target. Belongs to the serving thread; `lengths` may be changed by any."""

    def __init__(
        self,
        decoder: Decoder,
        lengths: Lengths,
        drafters: Drafters,
        *,
        prefill_rows: int = PREFILL_ROWS,
        prefill_alone: int = PREFILL_ALONE,
    ) -> None:
        self._decoder, self.lengths, self._drafters = decoder, lengths, drafters
        self._prefill_rows, self._prefill_alone = prefill_rows, prefill_alone

    def run(self, actives: Sequence[Active], now: Situation) -> BatchRecord:
        """One turn of each; what fails one of them fails it alone, what fails the target fails those it was for."""
        begin, lengths = perf_counter(), self.lengths  # which another thread may change
        rounds = [_Turn(active) for active in actives if not active.prefilling]
        if lengths.direct and not now.queued and len(rounds) == len(actives) == 1:
            return self._alone(rounds[0], begin)
        pieces = self._pieces([active for active in actives if active.prefilling], bool(rounds))
        with ExitStack() as leases:
            rounds = [turn for turn in rounds if self._look(turn, leases)]
            drafting = perf_counter()
            _plan(lengths, rounds, now, sum(len(turn.part.tokens) for turn in pieces if turn.part))
            jobs = [(turn.plan.draft if turn.plan else None, partial(self._prepare, turn)) for turn in rounds]
            self._drafters.run(jobs)
            for turn in rounds:
                if turn.error is not None:
                    turn.active.fail(turn.error)
            drafted = perf_counter()
            turns = [turn for turn in rounds if turn.part is not None] + pieces
            rows = sum(len(turn.part.tokens) for turn in turns if turn.part)
            target = self._judge(turns)
        for turn in rounds:
            if turn.seen is not None:
                _attempt(turn.active, partial(turn.active.generation.learned, turn.seen))
        record = self._record(begin, turns, rows, drafted - drafting, target)
        lengths.observe(record)
        return record

    def _alone(self, turn: _Turn, begin: float) -> BatchRecord:
        """The round that `Generation.step` would make."""
        turn.seen = _attempt(turn.active, turn.active.generation.round)
        turn.active.rounds += 1
        seconds = (0.0, 0.0)
        if turn.seen is not None:
            seconds = turn.seen.observation.draft_seconds, turn.seen.observation.target_seconds
        width = turn.seen.observation.width if turn.seen is not None else 0
        return self._record(begin, [turn], width, *seconds)

    # Before the forward

    def _pieces(self, prefilling: Iterable[Active], others: bool) -> list[_Turn]:
        """The next pieces of prompts, those that came first before the others."""
        left, turns = self._prefill_rows if others else self._prefill_alone, []
        for active in prefilling:
            if left <= 0:
                break
            turn = _Turn(active)
            turn.part = _attempt(active, partial(_piece, active, left))
            if turn.part is not None:
                left -= len(turn.part.tokens)
                turns.append(turn)
        return turns

    def _look(self, turn: _Turn, leases: ExitStack) -> bool:
        """Lease what is resident, for the length of the batch, and see what may run. False if that failed."""
        turn.resident = leases.enter_context(turn.active.session.leased())
        turn.looked = _attempt(turn.active, partial(turn.active.generation.look, read=False))
        return turn.looked is not None

    def _prepare(self, turn: _Turn) -> None:
        """Let the drafts guess; may run beside those of others, in another thread. Does not raise."""
        assert turn.looked is not None
        assert turn.plan is not None
        looked, planned = turn.looked, turn.plan.draft
        if looked.candidates is not None:
            # One that lags reads only if it was planned, on the way; it is not asked for a guess to compare.
            able = [c for c in looked.candidates if c.behind <= FREELY or c.name == planned]
            looked = looked._replace(candidates=able)
        try:
            turn.prepared = turn.active.generation.prepare(looked, turn.plan, perf_counter_ns())
            turn.part = turn.active.session.ask_verify(turn.prepared.proposal.tokens)
        except Exception as error:
            turn.error = error

    def close(self) -> None:
        self._drafters.close()

    # The forward, and after it

    def _judge(self, turns: Sequence[_Turn]) -> float:
        """Forward, accept and commit, as many at once as the target takes; the seconds of the forwards."""
        slots, total, remaining = self._decoder.batch_slots, 0, iter(turns)
        while group := list(islice(remaining, slots if slots > 1 else None)):
            begin = perf_counter_ns()
            outputs = self._forward(group)
            if outputs is None:
                continue
            shared = Shared(begin, perf_counter_ns(), len(group))
            total += shared.end - shared.begin
            for turn, output in zip(group, outputs, strict=True):
                _attempt(turn.active, partial(self._take, turn, output, shared))
        return total * TO_SECONDS

    def _forward(self, group: Sequence[_Turn]) -> list[ForwardOutput] | None:
        """None: it failed, and with it all of these. Where memory ran out, it is tried once more without guesses."""
        for again in (False, True):
            try:
                return self._decoder.forward_batch([turn.part for turn in group if turn.part is not None])
            except Exception as caught:
                error = caught
            if again or not out_of_memory(error):
                break
            group[0].active.session.make_room(error, wait=False)
            for turn in group:
                turn.give_up_guesses()
        for turn in group:
            turn.active.fail(error)
        return None

    def _take(self, turn: _Turn, output: ForwardOutput, shared: Shared) -> None:
        """What the forward says about one request."""
        active, session = turn.active, turn.active.session
        session.receive(output)
        if turn.prepared is not None:
            turn.seen = active.generation.finish(turn.prepared, output.logits, turn.resident, shared)
            active.rounds += 1
            return
        assert turn.part is not None
        session.valid += len(turn.part.tokens)
        if session.valid == len(session.tokens):
            active.generation.first(output.logits)
            active.prefilled()

    def _record(self, begin: float, turns: Sequence[_Turn], rows: int, drafting: float, target: float) -> BatchRecord:
        seen = [(turn.active.request.id, turn.seen.observation) for turn in turns if turn.seen is not None]
        return BatchRecord(
            time=begin,
            sequences=len(turns),
            rows=rows,
            prefill_rows=sum(len(turn.part.tokens) for turn in turns if turn.part and turn.prepared is None),
            requests=tuple(name for name, _ in seen),
            drafts=tuple(observation.draft for _, observation in seen),
            gammas=tuple(observation.asked for _, observation in seen),
            drafted=tuple(observation.drafted for _, observation in seen),
            accepted=tuple(observation.accepted for _, observation in seen),
            emitted=tuple(observation.emitted for _, observation in seen),
            resident=tuple(sorted(frozenset().union(*(turn.resident for turn in turns)))),
            draft_seconds=drafting,
            target_seconds=target,
            seconds=perf_counter() - begin,
        )


def _plan(lengths: Lengths, rounds: Sequence[_Turn], now: Situation, prefill_rows: int) -> None:
    """Which draft guesses how many tokens, for all of them at once."""
    asked = [(turn.active, turn.looked) for turn in rounds if turn.looked is not None]
    plans = lengths.plans(asked, queued=now.queued, kv_free=now.kv_free, prefill_rows=prefill_rows)
    for turn, plan in zip(rounds, plans, strict=True):
        turn.plan = plan


def _piece(active: Active, rows: int) -> Part | None:
    """A forward over the next tokens of its prompt; None if it was cancelled."""
    if not active.begun:
        active.begin()
    if active.generation.between_chunks():
        return None
    return active.session.ask_prefill(rows)


def _attempt(active: Active, half: Callable[[], _T]) -> _T | None:
    """Do something for one request; what it raises fails that request and no other."""
    try:
        return half()
    except Exception as error:
        active.fail(error)
        return None
