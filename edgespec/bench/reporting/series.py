"""Figures along a run: regret against the best fixed arm, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from edgespec.bench.reporting.pairs import AskedQuestion, Comparison, Part, Sums, fixed, sums
from edgespec.bench.reporting.terminal import shown
from edgespec.bench.specbench.folder import PLAIN
from edgespec.bench.words import counted, do


def regret(part: Part, comparisons: Mapping[str, Comparison]) -> dict[str, Any] | None:
    """Seconds of decoding that each policy took beyond the best fixed arm, added up in the order of the run.

    The best fixed arm is known in hindsight only: of those that do not choose among drafts, the one that took the
    fewest seconds over all questions that every policy answered. Every arm is charged for plain's tokens at its own
    speed relative to the plain arm beside it, so that neither texts that differ nor another hour of the machine count.
    tokens: plain's, added up in the same way. None where there is nothing to compare.
    """
    arms = {
        name: comparison
        for name, comparison in comparisons.items()
        if comparison.pairs and part.arms[name].info.kind == "policy" and part.arms[name].info.status == "ok"
    }
    if PLAIN not in arms or len(arms) < 2:
        return None
    everyone = [q for q in part.questions if all(q.id in comparison.pairs for comparison in arms.values())]
    costs = [(q, {name: _seconds(comparison, arms[PLAIN], q) for name, comparison in arms.items()}) for q in everyone]
    kept = [(q, known) for q, cost in costs if len(known := _known(cost)) == len(arms)]
    if not kept:
        return None
    seconds = {name: [cost[name] for _, cost in kept] for name in arms}
    best = min((name for name in arms if fixed(name)), key=lambda name: sum(seconds[name]))
    return {
        "questions": [q.id for q, _ in kept],
        "tokens": [round(total) for total in accumulate(_plain(arms[PLAIN], q).decode_tokens for q, _ in kept)],
        "plain_seconds": sum(seconds[PLAIN]),
        "best_fixed": best,
        "arms": {name: list(accumulate(a - b for a, b in zip(seconds[name], seconds[best]))) for name in arms},
    }


def _known(cost: Mapping[str, float | None]) -> dict[str, float]:
    return {name: seconds for name, seconds in cost.items() if seconds is not None}


def _seconds(comparison: Comparison, plain: Comparison, question: AskedQuestion) -> float | None:
    """Of plain's tokens at this arm's speed; None where one of the answers has no decoding."""
    pairs = comparison.pairs[question.id]
    mine, beside = sums(pair.arm for pair in pairs), sums(pair.plain for pair in pairs)
    rates = [_seconds_per_token(total) for total in (mine, beside)]
    if rates[0] is None or not rates[1]:
        return None
    return _plain(plain, question).decode_s * rates[0] / rates[1]


def _plain(plain: Comparison, question: AskedQuestion) -> Sums:
    return sums(pair.plain for pair in plain.pairs[question.id])


def _seconds_per_token(total: Sums) -> float | None:
    return total.decode_s / total.decode_tokens if total.decode_tokens else None


def memory(part: Part) -> dict[str, Any]:
    """By arm, (seconds of the run, resident bytes of its process) after each of its turns.

    All arms of a run share its clock. What passed between its sessions (a --resume lies there) is cut out, and shards
    come one after the other; begins: where each of these begins. left_out: why there is none, if the records do not
    tell.
    """
    found: dict[str, list[tuple[float, int]]] = {}
    begins: list[float] = []
    begun = 0.0
    for run in part.runs:
        turns = [(name, r) for name, records in run.records.items() for r in records if r.rss_bytes]
        timed = [(r.session, r.at, r.seconds, name, r.rss_bytes) for name, r in turns if r.at is not None]
        if len(timed) < len(turns):
            silent = len(turns) - len(timed)
            when = "when it was" if silent == 1 else "when they were"
            untold = f"{counted(silent, 'turn')} of {shown(run.path.name)}, of an earlier version, {do(silent)} not say"
            return {"arms": {}, "begins": [], "left_out": f"{untold} {when} measured"}
        for session in sorted({turn[0] for turn in timed}):
            here = sorted(turn[1:] for turn in timed if turn[0] == session)
            first = min(at - seconds for at, seconds, _, _ in here)
            begins.append(round(begun, 3))
            for at, _, name, size in here:
                found.setdefault(name, []).append((round(begun + at - first, 3), size))
            begun += here[-1][0] - first
    return {"arms": found, "begins": begins, "left_out": None}


def left_out(part: Mapping[str, Any]) -> list[str]:
    """Which pictures of a part's figures are not there, and why."""
    titles = {"draft_map": "Acceptance by draft and domain", "memory": "Memory over time"}
    return [f"{title} is left out: {part[key]['left_out']}." for key, title in titles.items() if part[key]["left_out"]]


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
