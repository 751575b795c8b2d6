"""What drafts do in a round: read up, guess what is judged, and guess what is only compared.

Whatever a draft raises or returns, the round goes on: with fewer guesses, or with none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from time import perf_counter_ns
from typing import NamedTuple

from drafts.base import Choose, FloatArray, Proposal
from drafts.device_proposal import DeviceProposal
from edgespec.decoding.counts import TO_SECONDS
from edgespec.decoding.sampling import LogitsPipeline
from edgespec.decoding.session import Session
from edgespec.decoding.watching import Steering
from predictor.catch_up import CatchUp, Reading
from predictor.planner import Candidate, Plan


class Shadow(NamedTuple):
    """A guess that is only compared, what it took, and how many tokens the draft had to read up on."""

    candidate: Candidate
    tokens: list[int]
    seconds: float
    unread: int

    def judged(self, emitted: list[int]) -> tuple[int, int]:
        """How many of its tokens can be compared with what was emitted, up to the first wrong one, and are right."""
        comparable = min(len(self.tokens), len(emitted))
        right = next((i for i in range(comparable) if self.tokens[i] != emitted[i]), comparable)
        return min(right + 1, comparable), right


class Guessed(NamedTuple):
    """What drafts did in a round. unread: tokens that the planned one had not seen before.

    planned, drafted: `perf_counter_ns()` before the planned draft guessed, and after it had.
    """

    proposal: Proposal
    shadows: list[Shadow]
    unread: int
    planned: int
    drafted: int


def guess(
    session: Session, plan: Plan, compared: Sequence[Candidate], choose: Choose, pipeline: LogitsPipeline
) -> Guessed:
    """Let the planned draft guess, and those that are only compared.

    These come first, but for lookup beside a block that a device makes: the host has nothing else to do until then.
    """
    beside: list[Candidate] = []
    if plan.draft is not None and getattr(session.statuses[plan.draft].draft, "on_device", False):
        beside = [candidate for candidate in compared if candidate.free]
    shadows = guess_shadows(session, [candidate for candidate in compared if candidate not in beside], choose)
    planned = perf_counter_ns()
    unread, proposal = 0, Proposal()
    if plan.draft is not None:
        unread = session.unread(plan.draft)
        proposal = propose(session, plan, choose, pipeline)
    drafted = perf_counter_ns()
    return Guessed(proposal, shadows + guess_shadows(session, beside, choose), unread, planned, drafted)


def propose(session: Session, plan: Plan, choose: Choose, pipeline: LogitsPipeline) -> Proposal:
    """The planned draft's guesses, cleaned; nothing if it fails. What the target takes from the device stays there."""
    name = plan.draft
    assert name is not None
    try:
        raw = session.draft(name).propose(session.tokens, plan.gamma, choose, floor=plan.floor)
    except Exception as error:
        session.draft_failed(name, error)
        return Proposal()
    takes = getattr(session.target, "takes", None)
    if isinstance(raw, DeviceProposal) and takes is not None and takes(raw.guesses):
        return raw
    return arrived(session, plan, raw, pipeline)


def arrived(session: Session, plan: Plan, raw: Proposal, pipeline: LogitsPipeline) -> Proposal:
    """A draft's guesses on the host, cleaned; nothing if they cannot be used."""
    name = plan.draft
    assert name is not None
    try:
        proposal = clean(raw, plan.gamma, pipeline)
    except Exception as error:
        session.draft_failed(name, error)
        return Proposal()
    session.statuses[name].worked(session)
    return proposal


def guess_shadows(session: Session, candidates: Sequence[Candidate], choose: Choose) -> list[Shadow]:
    """Guesses of drafts that do not run in this round, made before anything is judged."""
    guessed = []
    for candidate in candidates:
        begin = perf_counter_ns()
        try:
            unread = session.unread(candidate.name)
            tokens = session.draft(candidate.name).propose(session.tokens, candidate.shadow, choose).tokens
        except Exception as error:
            session.draft_failed(candidate.name, error)
        else:
            guessed.append(Shadow(candidate, tokens, (perf_counter_ns() - begin) * TO_SECONDS, unread))
    return guessed


def read_piece(
    session: Session,
    candidates: Sequence[Candidate],
    reading: Reading,
    catch_up: CatchUp,
    steering: Steering | None,
    cancelled: Callable[[], bool],
) -> list[Candidate]:
    """Let a draft read a piece of what it missed; the candidates after that, without it if it failed."""
    begin = perf_counter_ns()
    before = next(c.behind for c in candidates if c.name == reading.draft)
    left = _read(session, reading, before, cancelled)
    end = perf_counter_ns()
    if left is None:
        return [candidate for candidate in candidates if candidate.name != reading.draft]
    catch_up.took(before - left, (end - begin) * TO_SECONDS)
    if steering is not None:
        steering.read_up(reading.draft, before - left, (end - begin) * TO_SECONDS)
    session.tracer.event("catch-up", begin, end, draft=reading.draft, tokens=before - left, left=left)
    return [c._replace(behind=left) if c.name == reading.draft else c for c in candidates]


def _read(session: Session, reading: Reading, behind: int, cancelled: Callable[[], bool]) -> int | None:
    """How many tokens are left, None if the draft failed. One call may read less than what it may."""
    goal, left = max(behind - reading.limit, 0), behind
    while True:
        before, rest = left, session.catch_up(reading.draft, left - goal)
        if rest is None or rest <= goal or rest >= before or cancelled():
            return rest
        left = rest


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
