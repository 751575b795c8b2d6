"""`memspec`: predict, prefetch, switch at scheduling points (arXiv 2608.10362, methods.md §2.3)."""

from __future__ import annotations

from collections.abc import Mapping

from predictor.holding import Holding, View
from predictor.planner import Candidate
from predictor.policies.base import Baseline
from predictor.policies.fixed import ranked


class MemSpecPolicy(Baseline):
    """The paper's algorithm: every N = 4 rounds p = prediction, W = the K drafts of highest p, and

        for w in W, neither resident nor loading:
            while the memory is full: evict the resident of lowest p outside W that is not active; none: stop
            if there is room: start loading w
        active = argmax of p over the resident drafts, till the next scheduling point

    No history, no hysteresis, no cost of a load, no cancelling. gamma is fixed (4). The prediction is the ranker's;
    without one all drafts are equal, and the first ones of the list are held. The paper loads the first draft before it
    starts to count; here the first rounds of a text run on what is there.
    """

    name = "memspec"

    def hold(self, view: View) -> Holding | None:
        p: Mapping[str, float] = view.ranking or self._ranking
        able = [name for name in ranked(self.drafts, p) if name not in view.failed]
        if not able or view.capacity < 1:
            self._active = None
            return None
        kept = self._update_cache(able, view)
        resident = [name for name in able if name in view.resident and name in kept]
        self._active = resident[0] if resident else None
        self._first = able[0]
        order = [name for name in able if name in kept]
        reason = "predicted " + ", ".join(f"{name} {p.get(name, 0.0):.2f}" for name in able[: view.capacity])
        return Holding((*order, *(name for name in able if name not in kept)), reason)

    def _update_cache(self, able: list[str], view: View) -> set[str]:
        """What the memory holds when the loads that are started now are done. able: drafts, highest p first."""
        wanted = able[: view.capacity]
        memory = (view.resident | view.loading) & set(able)
        for draft in wanted:
            if draft in memory:
                continue
            while len(memory) >= view.capacity:
                victims = [n for n in able if n in memory & view.resident and n not in wanted and n != self._active]
                if not victims:
                    break
                memory = memory - {victims[-1]}
            if len(memory) < view.capacity:
                memory = memory | {draft}
        return set(memory)

    _first: str | None = None

    def begin(self) -> None:
        super().begin()
        self._first = self._active = None

    def preferred(self) -> str | None:
        return self._first

    def _stand_in(self, able: Mapping[str, Candidate]) -> str | None:
        """The active draft was evicted or failed between two points (or the text has just begun)."""
        resident = [name for name in ranked(self.drafts, self._ranking) if name in able]
        return resident[0] if resident else None
