"""One batch: a round of every request that runs and a piece of a prompt, judged by one forward of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter, perf_counter_ns
from typing import NamedTuple, TypeVar

from drafts.base import Proposal
from drafts.device_proposal import DeviceProposal
from edgespec.decoding.counts import TO_SECONDS
from edgespec.decoding.halves import Looked, Prepared, Seen, Shared, shared_by
from edgespec.models.base import Decoder, ForwardOutput, Part
from edgespec.models.batching import PartError, wait_for
from edgespec.models.cuda.memory import out_of_memory
from edgespec.serving.active import Active
from edgespec.serving.drafters import Drafters
from edgespec.serving.lengths import Lengths
from edgespec.serving.records import BatchRecord
from predictor.catch_up import FREELY, PIECE, Reading
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
    """One request's part in this batch. A part without `prepared` is a piece of its prompt.

    own, spent: ns in which the draft of its plan read up and guessed, and of all that `_prepare` did.
    """

    active: Active
    looked: Looked | None = None
    plan: Plan | None = None
    prepared: Prepared | None = None
    resident: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()
    part: Part | None = None
    output: ForwardOutput | None = None
    seen: Seen | None = None
    error: BaseException | None = None
    own: int = 0
    spent: int = 0

    @property
    def on_device(self) -> bool:
        """Whether its guesses are made there, while the host goes on."""
        return self.prepared is not None and isinstance(self.prepared.proposal, DeviceProposal)

    def give_up_guesses(self) -> None:
        """Make it a plain round, if it is one. A seeded text keeps its guesses: without them it would be another."""
        if self.prepared is not None and not self.active.generation.seeded:
            self.prepared = self.prepared._replace(plan=PLAIN, proposal=Proposal())
            self.part = self.active.session.ask_verify([])


class BatchRunner:
    """Runs batches on one target. Belongs to the serving thread; `lengths` may be changed by any.

    together: a block in which all rounds of a batch are made known to whoever looks after the working set.
    """

    def __init__(
        self,
        decoder: Decoder,
        lengths: Lengths,
        drafters: Drafters,
        *,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        prefill_rows: int = PREFILL_ROWS,
        prefill_alone: int = PREFILL_ALONE,
    ) -> None:
        self._decoder, self.lengths, self._drafters = decoder, lengths, drafters
        self._together = together
        self._prefill_rows, self._prefill_alone = prefill_rows, prefill_alone

    def run(self, actives: Sequence[Active], now: Situation) -> BatchRecord:
        """One turn of each; what fails one of them fails it alone, what fails the target fails those it was for."""
        begin, lengths = perf_counter(), self.lengths  # which another thread may change
        rounds = [_Turn(active) for active in actives if not active.prefilling]
        if lengths.direct and not now.queued and len(rounds) == len(actives) == 1:
            return self._alone(rounds[0], begin)
        pieces = self._pieces([active for active in actives if active.prefilling], bool(rounds))
        with ExitStack() as leases:
            rounds = self._looked(rounds, lengths.plain, leases)
            _plan(lengths, rounds, now, sum(len(turn.part.tokens) for turn in pieces if turn.part))
            others = len(rounds) + len(pieces) > 1
            jobs = [(turn.plan.draft if turn.plan else None, partial(_prepare, turn, others)) for turn in rounds]
            asked = perf_counter()
            self._drafters.run(jobs)
            guessing = perf_counter() - asked
            for turn in rounds:
                if turn.error is not None:
                    turn.active.fail(turn.error)
            turns = [turn for turn in rounds if turn.part is not None] + pieces
            rows = sum(len(turn.part.tokens) for turn in turns if turn.part)
            target, waited = self._judge(turns, leases)
        with self._together():
            for turn in rounds:
                if turn.seen is not None:
                    _attempt(turn.active, partial(turn.active.generation.learned, turn.seen))
        record = self._record(begin, turns, rows, _drafting(rounds, guessing, waited), target)
        lengths.observe(record)
        return record

    def _alone(self, turn: _Turn, begin: float) -> BatchRecord:
        """The round that `Generation.step` would make."""
        turn.seen = _attempt(turn.active, turn.active.generation.round)
        if turn.seen is None:
            return self._record(begin, [turn], 0, (0.0, 0.0), 0.0)
        with turn.active.session.leased() as resident:  # only to see what there is
            turn.resident = resident
        observation = turn.seen.observation
        drafting = observation.draft_seconds, observation.draft_seconds
        return self._record(begin, [turn], observation.width, drafting, observation.target_seconds)

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

    def _looked(self, turns: Sequence[_Turn], plain: bool, leases: ExitStack) -> list[_Turn]:
        """Lease what is resident, for the length of the batch, and see what may run; without those where that failed.

        plain: texts without a seed draft nothing, and drafts are not even looked at. All share one lease then.
        """
        resident: frozenset[str] | None = None
        for turn in turns:
            generation, session = turn.active.generation, turn.active.session
            if not plain or generation.seeded:
                turn.resident = leases.enter_context(session.leased())
                turn.looked = _attempt(turn.active, partial(generation.look, read=False))
                continue
            if resident is None:
                resident = leases.enter_context(session.leased())
            turn.resident, now = resident, perf_counter_ns()
            turn.looked = Looked(None, now, now)
        return [turn for turn in turns if turn.looked is not None]

    def close(self) -> None:
        self._drafters.close()

    # The forward, and after it

    def _judge(self, turns: Sequence[_Turn], leases: ExitStack) -> tuple[float, float]:
        """Forward, accept and commit, as many at once as the target takes.

        The seconds of the forwards, and those in which they waited since their device still made drafts' blocks.
        """
        slots, total, waited, remaining = self._decoder.batch_slots, 0, 0, iter(turns)
        while group := list(islice(remaining, slots if slots > 1 else None)):
            begin = perf_counter_ns()
            short = self._forward(group)
            if short is not None:  # memory ran out: once more, without guesses
                _make_room(turns, short, leases)
                group = [turn for turn in group if not turn.active.over]
                for turn in group:
                    _attempt(turn.active, turn.give_up_guesses)
                group = [turn for turn in group if not turn.active.over]
                begin = perf_counter_ns()
                if group:
                    self._forward(group, last=True)
            shared = shared_by([turn.output for turn in group if turn.output is not None], begin)
            if any(turn.on_device for turn in group):
                waited += shared.begin - begin
            for turn in group:
                if turn.output is not None:
                    _attempt(turn.active, partial(self._take, turn, turn.output, shared))
            total += shared.end - shared.begin if any(turn.output is not None for turn in group) else 0
        return total * TO_SECONDS, waited * TO_SECONDS

    def _forward(self, group: Sequence[_Turn], *, last: bool = False) -> MemoryError | None:
        """Give each its output; if it fails, all of these fail, or the one that it was about.

        If the target lacks memory and this is not the last try: why.
        """
        try:
            outputs = self._decoder.forward_batch([turn.part for turn in group if turn.part is not None])
            for output in outputs:
                wait_for(output.logits)
        except PartError as error:
            group[error.part].active.fail(error.error)
        except BaseException as error:
            if out_of_memory(error) and not last:
                return MemoryError(str(error))  # the error itself may hold memory
            for turn in group:
                turn.active.fail(error)
        else:
            for turn, output in zip(group, outputs, strict=True):
                turn.output = output
        rest = [turn for turn in group if turn.output is None and not turn.active.over]
        return self._forward(rest, last=last) if rest else None

    def _take(self, turn: _Turn, output: ForwardOutput, shared: Shared) -> None:
        """What the forward says about one request."""
        active, session = turn.active, turn.active.session
        session.receive(output)
        if turn.prepared is not None:
            turn.seen = active.generation.finish(turn.prepared, output.logits, turn.resident, shared)
            return
        assert turn.part is not None
        session.valid += len(turn.part.tokens)
        if session.valid == len(session.tokens):
            active.generation.first(output.logits)
            active.prefilled()

    def _record(
        self, begin: float, turns: Sequence[_Turn], rows: int, drafting: tuple[float, float], target: float
    ) -> BatchRecord:
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
            passed=tuple(sorted(frozenset().union(*(turn.passed for turn in turns)))),
            draft_seconds=drafting[0],
            draft_work=drafting[1],
            target_seconds=target,
            seconds=perf_counter() - begin,
        )


def _plan(lengths: Lengths, rounds: Sequence[_Turn], now: Situation, prefill_rows: int) -> None:
    """Which draft guesses how many tokens, for all of them at once."""
    asked = [(turn.active, turn.looked) for turn in rounds if turn.looked is not None]
    plans = lengths.plans(asked, queued=now.queued, kv_free=now.kv_free, prefill_rows=prefill_rows)
    for turn, plan in zip(rounds, plans, strict=True):
        turn.plan = plan
        turn.passed = _passed(turn, plan)


def _passed(turn: _Turn, plan: Plan) -> frozenset[str]:
    """The drafts that could have guessed for a text that is to guess nothing."""
    if turn.looked is None or plan.gamma > 0 or turn.active.generation.limit <= 0:
        return frozenset()
    if turn.looked.candidates is None:  # there is nothing to plan: drafting is off
        return turn.resident
    return frozenset(candidate.name for candidate in turn.looked.candidates)


def _prepare(turn: _Turn, others: bool) -> None:
    """Let the drafts guess; may run beside those of other texts, in another thread. Does not raise."""
    assert turn.plan is not None
    assert turn.looked is not None
    begin = perf_counter_ns()
    try:
        looked = _read_up(turn, others)
        turn.prepared = made = turn.active.generation.prepare(looked, turn.plan, perf_counter_ns())
        turn.own = looked.read - turn.looked.read + (0 if made.plan.draft is None else made.drafted - made.planned)
        turn.part = turn.active.session.ask_verify(turn.prepared.proposal.guesses)
    except BaseException as error:
        turn.error = error
    finally:
        turn.spent = perf_counter_ns() - begin


def _drafting(rounds: Sequence[_Turn], guessing: float, waited: float) -> tuple[float, float]:
    """Of the planned drafts: seconds of this batch, and those in which each worked, added up.

    guessing: seconds until all were prepared; the drafts have their share of them, of what all did at that time. The
    rest (what was guessed only to be compared, and the books) is needed whatever was planned. waited: for drafts that a
    device still made, which knows better how long they took.
    """
    own, spent = sum(turn.own for turn in rounds), sum(turn.spent for turn in rounds)
    work = own * TO_SECONDS
    for turn in rounds:
        if turn.seen is not None and turn.prepared is not None:
            host = (turn.prepared.drafted - turn.prepared.planned) * TO_SECONDS
            work += turn.seen.observation.draft_seconds - host
    return (guessing * own / spent if spent else 0.0) + waited, work


def _read_up(turn: _Turn, others: bool) -> Looked:
    """With the drafts that may guess. One that lags reads only if it was planned; else it is not even compared.

    Others keep their pace: it reads a piece of what it missed, and guesses when it has caught up. Where there are none,
    and for a seeded text, which must not depend on others, it reads all of it on the way.
    """
    looked, plan, generation = turn.looked, turn.plan, turn.active.generation
    assert looked is not None
    assert plan is not None
    if looked.candidates is None:
        return looked
    there = [c for c in looked.candidates if c.behind <= FREELY or c.name == plan.draft]
    looked = looked._replace(candidates=there)
    if others and not generation.seeded and plan.draft is not None and any(c.behind > FREELY for c in there):
        return generation.read(looked, Reading(plan.draft, PIECE))
    return looked


def _make_room(turns: Sequence[_Turn], short: MemoryError, leases: ExitStack) -> None:
    """A draft leaves for the target, as soon as no lease of this batch holds it; then the leases are had again."""
    leases.close()
    turns[0].active.session.make_room(short)
    for turn in turns:
        if turn.prepared is not None and turn.seen is None and not turn.active.over:
            turn.resident = leases.enter_context(turn.active.session.leased())


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
    except BaseException as error:
        active.fail(error)
        return None
