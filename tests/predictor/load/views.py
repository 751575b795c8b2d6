"""Made-up loads for the tests of load planners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predictor.costs import CostTable
from predictor.load import BatchCosts, BatchOutcome, LoadView, Running

STEP = 0.001
PLAIN = 0.020


def steep(n: int = 8) -> BatchCosts:
    """Rows are dear once several sequences run: 2 ms each, and 5 ms a sequence."""
    points = {(m, further): PLAIN + 0.005 * (m - 1) + 0.002 * further for m in (1, n) for further in (0, 8, 64)}
    return BatchCosts(points)


def flat(n: int = 8) -> BatchCosts:
    """A row takes a tenth of a millisecond, whatever runs."""
    return BatchCosts({(m, further): PLAIN + 0.0001 * further for m in (1, n) for further in (0, 8, 64)})


def drafts(step: float = STEP, read: float = 0.0001) -> CostTable:
    names = ("code", "math", "ngram")
    return CostTable(drafts=dict.fromkeys(names, step), catch_up=dict.fromkeys(names, read))


def running(key: int, rate: float = 0.6, *, positions: int = 6, **changes: Any) -> Running:
    usual: dict[str, Any] = {"draft": "code", "behind": 0, "limit": 50, "context": 256, "fixed": None}
    usual |= {"rates": [rate] * positions, "offered": [1.0] * positions}
    return Running(key=key, **(usual | changes))


def view(sequences: Sequence[Running], *, prefill_rows: int = 0, time: float = 0.0) -> LoadView:
    return LoadView(list(sequences), 0, 1.0, prefill_rows, time)


def outcome(
    seen: LoadView, lengths: Sequence[int], costs: BatchCosts, emitted: float | None = None, draft: float | None = None
) -> BatchOutcome:
    """What a batch shows if all is as the costs say, and each block brings what is expected of it (or `emitted`)."""
    drafting = STEP * sum(lengths) if draft is None else draft
    rows = len(lengths) + seen.prefill_rows + sum(lengths)
    forward = costs.seconds(len(lengths), rows, sum(s.context for s in seen.running))
    made = [expected(s, length) if emitted is None else emitted for s, length in zip(seen.running, lengths)]
    accepted = [one - 1 for one in made]
    return BatchOutcome(seen, lengths, accepted, made, drafting, drafting, forward, drafting + forward, rows)  # type: ignore[arg-type]


def expected(sequence: Running, length: int) -> float:
    """Tokens of a block of that length."""
    made = chance = 1.0
    for rate in sequence.rates[:length]:
        chance *= rate
        made += chance
    return made
