"""Figures along a run: regret against the best arm of every question, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.bench.reporting.pairs import AskedQuestion, Comparison, Part, Sums, sums
from edgespec.bench.specbench.folder import PLAIN


def regret(part: Part, comparisons: Mapping[str, Comparison]) -> dict[str, Any] | None:
    """Seconds of decoding that each policy lost to the best policy of each question, added up in the order of the run.

    Over the questions that all policies did which did any. Every arm is charged for plain's tokens at its own speed
    relative to the plain arm beside it, so that neither texts that differ nor another hour of the machine count. None
    where there is nothing to compare.
    """
    arms = {
        name: comparison
        for name, comparison in comparisons.items()
        if comparison.pairs and part.arms[name].info.kind == "policy" and part.arms[name].info.status == "ok"
    }
    if PLAIN not in arms or len(arms) < 2:
        return None
    questions = [q for q in part.questions if all(q.id in comparison.pairs for comparison in arms.values())]
    cost = {name: [_seconds(comparison, arms[PLAIN], q) for q in questions] for name, comparison in arms.items()}
    keep = [i for i in range(len(questions)) if all(cost[name][i] is not None for name in arms)]
    if not keep:
        return None
    best = [min(cost[name][i] or 0.0 for name in arms) for i in keep]
    return {
        "questions": [questions[i].id for i in keep],
        "plain_seconds": sum(cost[PLAIN][i] or 0.0 for i in keep),
        "arms": {name: _added(cost[name][i] - b for i, b in zip(keep, best)) for name in arms},  # type: ignore[operator]
        "best_share": {name: sum(cost[name][i] == b for i, b in zip(keep, best)) / len(keep) for name in arms},
    }


def _added(values: Any) -> list[float]:
    total, found = 0.0, []
    for value in values:
        total += value
        found.append(total)
    return found


def _seconds(comparison: Comparison, plain: Comparison, question: AskedQuestion) -> float | None:
    """Of plain's tokens at this arm's speed; None where one of the answers has no decoding."""
    pairs = comparison.pairs[question.id]
    mine, beside = sums(pair.arm for pair in pairs), sums(pair.plain for pair in pairs)
    reference = sums(pair.plain for pair in plain.pairs[question.id])
    rates = [_seconds_per_token(total) for total in (mine, beside)]
    if rates[0] is None or not rates[1]:
        return None
    return reference.decode_s * rates[0] / rates[1]


def _seconds_per_token(total: Sums) -> float | None:
    return total.decode_s / total.decode_tokens if total.decode_tokens else None


def memory(part: Part) -> dict[str, list[int]]:
    """Resident bytes of each arm's process after each question, in the order in which they were run; errors too."""
    found: dict[str, list[int]] = {}
    for name, arm in part.arms.items():
        by_question: dict[tuple[int, int, str], int] = {}
        for record in arm.records:
            if record.rss_bytes:
                key = (record.group, record.repeat, record.question_id)
                by_question[key] = max(by_question.get(key, 0), record.rss_bytes)
        if by_question:
            found[name] = list(by_question.values())
    return found


def by_question(part: Part, comparisons: Mapping[str, Comparison]) -> list[dict[str, Any]]:
    """Each question with the decoding rates of all arms that did it, for who wants to make figures of their own."""
    return [
        {
            "question": question.id,
            "category": question.category,
            "domain": question.domain,
            "task": question.task,
            "tokens_per_second": {
                name: rate
                for name, comparison in comparisons.items()
                if (rate := _rate(comparison.pairs.get(question.id, ()))) is not None
            },
        }
        for question in part.questions
    ]


def _rate(pairs: Sequence[Any]) -> float | None:
    total = sums(pair.arm for pair in pairs)
    return total.decode_tokens / total.decode_s if total.decode_s else None
