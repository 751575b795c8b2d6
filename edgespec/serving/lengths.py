"""How many tokens each request of a batch guesses: a planner of loads chooses from what each text may expect."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgespec.decoding.halves import Looked
from edgespec.serving.active import Active
from edgespec.serving.records import BatchRecord
from predictor.load import BatchOutcome, LoadPlanner, LoadView, Running
from predictor.planner import PLAIN, Plan

OURS = "edgespec"


class Lengths:
    """One load planner, and what it saw before the batch that runs.

    direct: a single request that runs while nobody waits plans for itself, as it does without a serving loop. So it is
    under our planner, which would decide the same; the published ones decide for one request as for several.
    """

    def __init__(self, planner: LoadPlanner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.planner, self._clock = planner, clock
        self.direct = planner.name.partition(":")[0] == OURS
        self._view: LoadView | None = None

    @property
    def name(self) -> str:
        return self.planner.name

    @property
    def reason(self) -> str | None:
        """Why the planner was given up, and drafts nothing any more; None if it was not."""
        return getattr(self.planner, "reason", None)

    @property
    def plain(self) -> bool:
        """Whether texts draft nothing, but for those with a seed: then nothing is asked of drafts and of the policy."""
        return self.planner.plain

    def plans(
        self, asked: Sequence[tuple[Active, Looked]], *, queued: int, kv_free: float, prefill_rows: int
    ) -> list[Plan]:
        """One plan for each, in order."""
        forecasts = [active.generation.forecast(looked) for active, looked in asked]
        running = [
            Running(
                key=active.key,
                draft=forecast.draft,
                rates=forecast.rates,
                offered=forecast.offered,
                behind=forecast.behind,
                limit=max(active.generation.limit, 0),
                context=len(active.session.tokens),
                fixed=forecast.fixed,
            )
            for (active, _), forecast in zip(asked, forecasts)
        ]
        self._view = LoadView(running, queued, kv_free, prefill_rows, self._clock())
        if not running:
            return []
        lengths, floor = self.planner.lengths(self._view), self.planner.floor
        return [
            # What must be the same on every run knows no floor, which follows from clocks.
            Plan(one.draft, length, floor if one.fixed is None else 0.0) if one.draft and length > 0 else PLAIN
            for one, length in zip(running, lengths, strict=True)
        ]

    def observe(self, record: BatchRecord) -> None:
        """Take in what came of the last plans."""
        view, self._view = self._view, None
        if view is None or not view.running or len(record.requests) != len(view.running):
            return  # one of them failed on the way
        self.planner.observe(
            BatchOutcome(
                view,
                record.drafted,
                record.accepted,
                record.emitted,
                record.draft_seconds,
                record.draft_work,
                record.target_seconds,
                record.seconds,
                record.rows,
            )
        )
