"""A load planner that can only cost speed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from predictor.load.base import BatchOutcome, LoadPlanner, LoadView, clipped

_log = logging.getLogger(__name__)


class GuardedLoad:
    """Another load planner. If anything in it raises, or it says what no batch can do, all further rows are plain.

    Whatever it says, lengths are whole numbers from 0 to what a sequence may draft, and fixed ones stay.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner: LoadPlanner | None = planner
        self.name = planner.name
        self.floor = 0.0
        self.reason: str | None = None  # why it was given up

    @property
    def plain(self) -> bool:
        return self._planner is None or self._planner.plain

    def lengths(self, view: LoadView) -> Sequence[int]:
        plain = clipped(view, 0)
        self.floor = 0.0
        if self._planner is None:
            return plain
        try:
            lengths = [int(length) for length in self._planner.lengths(view)]
            if len(lengths) != len(plain):
                raise ValueError(f"{len(lengths)} lengths for {len(plain)} sequences")
            floor = float(self._planner.floor)
            self.floor = floor if 0 <= floor <= 1 else 0.0
        except Exception as error:
            self._give_up(error)
            return plain
        most = clipped(view, max(lengths, default=0))
        return [
            fixed if s.fixed is not None else max(min(length, top), 0)
            for s, fixed, length, top in zip(view.running, plain, lengths, most)
        ]

    def observe(self, outcome: BatchOutcome) -> None:
        if self._planner is not None:
            try:
                self._planner.observe(outcome)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._planner = None
        self.reason = f"{type(error).__name__}: {error}"
        _log.warning("the load planner %s failed, sequences go on with plain rows: %s", self.name, self.reason)
