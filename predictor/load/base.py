"""The words of load planners: what they see before a batch, what a batch showed, and the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Running(NamedTuple):
    """A sequence before its round.

    key: the same in all its rounds. draft, rates, offered, behind: as in `predictor.planner.Forecast`. limit: tokens
    that may be drafted at most. context: positions of its cache. fixed: tokens that must be drafted, whatever the load
    (requests with a seed); None = as the planner likes.
    """

    key: int
    draft: str | None
    rates: Sequence[float]
    offered: Sequence[float]
    behind: int
    limit: int
    context: int
    fixed: int | None = None


class LoadView(NamedTuple):
    """What a load planner sees before a batch.

    running: the sequences that are past their prompts. queued: requests that wait. kv_free: share of the KV pool that
    is free. prefill_rows: prompt tokens in this batch's forward. time: seconds of any clock that only goes on.
    """

    running: Sequence[Running]
    queued: int
    kv_free: float
    prefill_rows: int
    time: float


class BatchOutcome(NamedTuple):
    """What a batch showed; the sequences in the order of `view.running`.

    lengths: tokens really drafted. accepted: of them. emitted: tokens committed, the target's own included.
    draft_seconds: of the batch, in which drafts guessed what `lengths` says (catching up included; what they guess only
    to be compared is no part of it). draft_work: the same of each sequence by itself, added up, which is more where
    drafts work side by side. target_seconds: of the one forward; seconds: of the whole batch. rows: of the forward,
    prompt tokens included.
    """

    view: LoadView
    lengths: Sequence[int]
    accepted: Sequence[int]
    emitted: Sequence[int]
    draft_seconds: float
    draft_work: float
    target_seconds: float
    seconds: float
    rows: int


class LoadPlanner(Protocol):
    """How many tokens each sequence of a batch drafts. One thread calls: `lengths`, then `observe`, every batch.

    floor: what `predictor.planner.Plan.floor` is for the drafts of the batch that `lengths` was last asked about: the
    chance below which a further token costs more than it brings (0 = none is ended for that).
    """

    name: str
    floor: float

    @property
    def plain(self) -> bool:
        """Whether it never drafts, but for lengths that are fixed: then nobody need work out what texts may expect."""

    def lengths(self, view: LoadView) -> Sequence[int]:
        """For each of `view.running`: 0 (a plain row), or tokens to draft; never above its limit or its rates."""

    def observe(self, outcome: BatchOutcome) -> None:
        """Take in what the batch showed."""


def longest(sequence: Running) -> int:
    """Tokens that may be drafted for it, at most."""
    if sequence.draft is None:
        return 0
    return max(min(sequence.limit, len(sequence.rates)), 0)


def clipped(view: LoadView, gamma: int) -> list[int]:
    """The same gamma for the whole batch, where it may be and nothing else is fixed."""
    return [_fixed(s) if s.fixed is not None else min(gamma, longest(s)) for s in view.running]


def _fixed(sequence: Running) -> int:
    return 0 if sequence.draft is None else max(min(sequence.fixed or 0, sequence.limit), 0)


def free_to_choose(view: LoadView) -> list[int]:
    """Places of the sequences whose length is not fixed and that have a draft."""
    return [i for i, s in enumerate(view.running) if s.fixed is None and longest(s) > 0]
