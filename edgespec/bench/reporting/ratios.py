"""Speed beside plain, with 95% intervals by bootstrap over questions where there are enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from drafts.figures import LEAST_FOR_INTERVAL, Bootstrap
from edgespec.bench.reporting.pairs import AskedQuestion, Comparison, Part, Sums, sums

Amount = tuple[float, float]  # tokens, seconds
Amounts = Callable[[Sums], Amount]
Both = tuple[Amount, Amount]  # the arm's, plain's
_NOTHING: Both = ((0.0, 0.0), (0.0, 0.0))


def decoding(total: Sums) -> Amount:
    """Tokens after the first emission, and the seconds they took."""
    return total.decode_tokens, total.decode_s


def whole(total: Sums) -> Amount:
    """All tokens of the answers, and the seconds from the prompt to the end."""
    return total.tokens, total.seconds


class Ratios:
    """Ratios of one part. The same questions are drawn for every arm, so that arms can be compared."""

    def __init__(self, part: Part) -> None:
        self._groups: dict[str, list[AskedQuestion]] = {"": part.questions}
        for kind in ("task", "category", "domain"):
            for name in part.names(kind):
                self._groups[f"{kind} {name}"] = [q for q in part.questions if getattr(q, kind) == name]
        self._resamples: dict[str, Bootstrap] = {}

    def of(self, comparison: Comparison, group: str = "", amounts: Amounts = decoding) -> dict[str, Any]:
        """One ratio: value, low, high, both rates, and how many questions are in it. group: "task qa", "" = all."""
        questions = self._groups[group]
        both = [_both(comparison, question, amounts) for question in questions]
        rates = [_rate([pair[side] for pair in both]) for side in (0, 1)]
        counted = sum(pair != _NOTHING for pair in both)
        value = rates[0] / rates[1] if rates[0] is not None and rates[1] else None
        low, high = (None, None) if value is None or counted < LEAST_FOR_INTERVAL else self._interval(group, both)
        return {
            "value": value,
            "low": low,
            "high": high,
            "questions": counted,
            "tokens_per_second": rates[0],
            "plain_tokens_per_second": rates[1],
        }

    def by(self, comparison: Comparison, kind: str) -> dict[str, dict[str, Any]]:
        """One ratio for each task, category or domain."""
        names = [group.removeprefix(f"{kind} ") for group in self._groups if group.startswith(f"{kind} ")]
        return {name: self.of(comparison, f"{kind} {name}") for name in names}

    def _interval(self, group: str, both: Sequence[Both]) -> tuple[float | None, float | None]:
        if group not in self._resamples:
            self._resamples[group] = Bootstrap(group, len(both), 0)
        drawn = self._resamples[group]
        mine, plain = (drawn.ratios([p[s][0] for p in both], [p[s][1] for p in both]) for s in (0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            return drawn.interval(mine / plain)


def _both(comparison: Comparison, question: AskedQuestion, amounts: Amounts) -> Both:
    """What a question adds to either arm: plain's tokens at the speed of each, so that it weighs the same in both where
    their texts differ. Nothing where it is left out, or one of them has no token to take the time of."""
    pairs = comparison.pairs.get(question.id, ())
    (tokens, seconds), plain = amounts(sums(pair.arm for pair in pairs)), amounts(sums(pair.plain for pair in pairs))
    if not tokens or not plain[0]:
        return _NOTHING
    return (plain[0], seconds * (plain[0] / tokens)), plain


def _rate(amounts: Sequence[Amount]) -> float | None:
    seconds = sum(second for _, second in amounts)
    return sum(tokens for tokens, _ in amounts) / seconds if seconds > 0 else None


def least(by_task: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The task with the smallest ratio, of those with two questions at least: one alone says nothing of its task.

    of: how many such tasks there are; None unless there are two to compare.
    """
    known = {task: r["value"] for task, r in by_task.items() if r["value"] is not None and r["questions"] > 1}
    if len(known) < 2:
        return None
    task = min(known, key=lambda name: known[name])
    return {"task": task, "value": known[task], "of": len(known)}
