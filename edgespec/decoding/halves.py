"""What passes between the halves of a round, before and after the target's forward."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import NamedTuple

from drafts.base import Proposal
from drafts.device_proposal import DeviceProposal
from edgespec.decoding.counts import TO_SECONDS, Stamps
from edgespec.decoding.drafting import Shadow, arrived
from edgespec.decoding.sampling import LogitsPipeline
from edgespec.decoding.session import Session
from edgespec.models.base import FloatArray, ForwardOutput
from edgespec.models.batching import wait_for
from edgespec.telemetry.trace import NullTracer, Tracer
from predictor.planner import PLAIN, Candidate, Observation, Plan


class Looked(NamedTuple):
    """What a round found when it began: the drafts that may run, None if there is nothing to plan.

    begin, read: when the round began and when drafts had read up, as `perf_counter_ns()`.
    """

    candidates: Sequence[Candidate] | None
    begin: int
    read: int


class Prepared(NamedTuple):
    """A round before its forward: what was planned and guessed. unread: tokens that the draft had not seen before.

    preferred: the draft that was wanted most when the plan was made. Times as `perf_counter_ns()`.
    """

    looked: Looked
    plan: Plan
    level: int
    proposal: Proposal
    shadows: list[Shadow]
    unread: int
    preferred: str | None
    asked: int
    planned: int
    drafted: int


class Shared(NamedTuple):
    """A forward that several requests shared: its begin and end, as `perf_counter_ns()`, and how many they were."""

    begin: int
    end: int
    sequences: int


def settled(
    prepared: Prepared, logits: FloatArray, session: Session, pipeline: LogitsPipeline
) -> tuple[Prepared, FloatArray]:
    """The round when its forward is over, with its guesses on the host, and the rows of logits that judge them.

    A device is waited for here, once. Where guesses stayed on it, it knows how long the draft took.
    """
    wait_for(logits)
    raw = prepared.proposal
    if not isinstance(raw, DeviceProposal):
        return prepared, logits
    count = len(raw)
    proposal = arrived(session, prepared.plan, raw, pipeline)
    if len(proposal) < count:  # damaged rows: what came of them was not worth judging
        logits = logits[: len(proposal) + 1]
    drafted = max(prepared.drafted, prepared.planned + int((raw.seconds or 0.0) / TO_SECONDS))
    return prepared._replace(proposal=proposal, drafted=drafted), logits


def shared_by(outputs: Sequence[ForwardOutput], begin: int) -> Shared:
    """A forward that is over now. If its device was still busy with drafts when it was launched, it began later."""
    steps = {wait_for(output.logits) for output in outputs} - {None}
    known = [seconds for step in steps if (seconds := getattr(step, "seconds", None)) is not None]
    end = perf_counter_ns()
    if known and len(known) == len(steps):
        begin = max(begin, end - int(sum(known) / TO_SECONDS))
    return Shared(begin, end, len(outputs))


class Seen(NamedTuple):
    """What a round showed, and the tokens that it added."""

    observation: Observation
    emitted: list[int]


def clipped(plan: Plan, candidates: Sequence[Candidate], limit: int) -> tuple[Plan, int]:
    """The plan as far as it can be carried out, and the level of its draft."""
    gamma = min(plan.gamma, limit)
    if plan.draft is not None and gamma > 0:
        for candidate in candidates:
            if candidate.name == plan.draft:
                return Plan(plan.draft, gamma, plan.floor), candidate.level
    return PLAIN, 0


def observed(
    prepared: Prepared, judged: int, stood: int, emitted: int, target_seconds: float, shared: Shared | None
) -> Observation:
    """What a round shows to whoever plans. judged, stood: of its guesses. emitted: tokens that it added."""
    plan, proposal = prepared.plan, prepared.proposal
    if plan.draft is not None and not proposal.tokens:
        judged = 1  # asked and nothing usable came: as good as a wrong guess
    return Observation(
        draft=plan.draft,
        level=prepared.level,
        drafted=len(proposal),
        proposed=judged,
        accepted=stood,
        width=len(proposal) + 1,
        draft_seconds=(prepared.drafted - prepared.planned) * TO_SECONDS,
        target_seconds=target_seconds,
        caught_up=prepared.unread,
        asked=plan.gamma if plan.draft is not None else 0,
        emitted=emitted,
        batch=1 if shared is None else shared.sequences,
    )


def trace_round(tracer: Tracer | NullTracer, plan: Plan, draft: str | None, seen: Observation, at: Stamps) -> None:
    """The parts of a round, as events of a trace."""
    event = tracer.event
    event("round", at.begin, at.end, draft=draft, gamma=plan.gamma, accepted=seen.accepted)
    event("plan", at.asked, at.planned)
    event("draft", at.planned, at.drafted, draft=plan.draft, tokens=seen.drafted)
    event("verify", at.sent, at.verified, width=seen.width)
    event("accept", at.taken, at.accepted)
    event("commit", at.accepted, at.committed)
    event("learn", at.committed, at.end)
