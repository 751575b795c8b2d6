"""From the run's answers to what is published: rows, ratios, and whether the texts are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec.bench.contenders import RATIOS, SAME_TEXT, Ratio
from edgespec.bench.measure import Answer, first_difference, spread
from edgespec.bench.peers.base import Contender
from edgespec.bench.speed import Result

# Above these gaps (in logits, at the first different token) a difference is not a near tie but a fault.
NEAR_TIE = {"float32": 1e-3, "exact": 0.5, "int8": 0.5}
STALE_PROMPT_FACTOR = 1.25
BUSY_SHARE = 0.1
IDLE_SHARE = 0.02
GROUPS = ("domain", "copying", "prose")

GapOf = Callable[[str, list[int], int, int], dict[str, float]]  # (weight format, ids, left, right) -> margin, gap


def rows(result: Result) -> list[dict[str, Any]]:
    """One row per contender, with its status: "ok", "partial" (some prompts failed), "error" or "missing"."""
    return [_row(result, contender) for contender in result.plan.contenders]


def _row(result: Result, contender: Contender) -> dict[str, Any]:
    name = contender.name
    row: dict[str, Any] = {
        "name": name,
        "status": "ok",
        "weights": contender.weights,
        "prefill_tokens_per_second": None,
        "decode_tokens_per_second": None,
        "peak_memory_bytes": None,
    }
    reason = result.missing.get(name) or result.errors.get(name)
    if reason:
        return row | {"status": "missing" if name in result.missing else "error", "message": reason}
    failures = result.failures.get(name, [])
    answers = result.kept(name)
    groups = {prompt.name: prompt.group for prompt in result.plan.prompts}
    of_group = {group: [a for key, a in answers.items() if groups[key[0]] == group] for group in (*GROUPS, "prefill")}
    if not answers:
        message = failures[0].message if failures else "no answer of it counts, because each prompt failed somewhere"
        return row | {"status": "error", "message": message}
    row["status"] = "partial" if failures else "ok"
    row["prefill_tokens_per_second"] = _median(a.prefill_rate for a in of_group["prefill"])
    row["decode_tokens_per_second"] = _median(a.decode_rate for a in of_group["domain"])
    row["peak_memory_bytes"] = result.peak_memory.get(name)
    row["first_token_seconds"] = _median(a.first_token_s for a in of_group["domain"])
    row["decode_by_group"] = {g: _published(spread(a.decode_rate for a in of_group[g])) for g in GROUPS if of_group[g]}
    row["decode_by_prompt"] = _by_prompt(result, answers)
    row["answers"] = len(answers)
    row["failed"] = [{"prompt": f.prompt, "repeat": f.repeat + 1, "message": f.message} for f in failures]
    row["excluded"] = sorted({prompt for prompt, _ in result.excluded()})
    row.update(_engine_counters(of_group["domain"] + of_group["copying"] + of_group["prose"]))
    row["warnings"] = _warnings(result, contender, answers)
    return row


def _median(values: Any) -> float | None:
    found = spread(values)
    return found.median if found else None


def _published(found: Any) -> dict[str, float] | None:
    return None if found is None else {"median": found.median, "min": found.low, "max": found.high, "runs": found.count}


def _by_prompt(result: Result, answers: dict[tuple[str, int], Answer]) -> dict[str, float | None]:
    names = [prompt.name for prompt in result.plan.prompts if prompt.group != "prefill"]
    rates = {name: [a.decode_rate for key, a in answers.items() if key[0] == name] for name in names}
    return {name: _median(values) for name, values in rates.items() if values}


def _engine_counters(answers: list[Answer]) -> dict[str, Any]:
    """Sums over edgespec's own statistics (absent for other engines)."""
    stats = [answer.stats for answer in answers if answer.stats]
    if not stats:
        return {}
    total = {key: sum(float(s.get(key) or 0) for s in stats) for key in _SUMMED}
    forwards, decode = total["rounds"], total["decode_seconds"]
    tokens = sum(max(0, len(answer.token_ids) - 1) for answer in answers if answer.stats)
    proposed = total["proposed_tokens"]
    return {
        "tokens_per_forward": tokens / forwards if forwards else None,
        "acceptance_rate": total["accepted_tokens"] / proposed if proposed else None,
        "bookkeeping_share": total["bookkeeping_seconds"] / decode if decode else None,
        "draft_share_of_time": total["draft_seconds"] / decode if decode else None,
    }


_SUMMED = ("rounds", "decode_seconds", "accepted_tokens", "proposed_tokens", "bookkeeping_seconds", "draft_seconds")


def _warnings(result: Result, contender: Contender, answers: dict[tuple[str, int], Answer]) -> list[str]:
    found = []
    others, idle = _disturbance(result, contender.name)
    if others > BUSY_SHARE:
        found.append(f"other processes used {others:.0%} of the machine while this ran")
    if idle > IDLE_SHARE:
        found.append(f"waiting contenders used {idle:.0%} of the machine while this ran")
    limit = result.plan.new_tokens
    groups = {prompt.name: prompt.group for prompt in result.plan.prompts}
    short = sum(1 for key, a in answers.items() if groups[key[0]] != "prefill" and len(a.token_ids) < limit)
    if short:
        found.append(f"{short} answers are shorter than {limit} tokens")
    drift = _later_over_first(result, answers)
    if drift is not None and drift > STALE_PROMPT_FACTOR and others <= BUSY_SHARE:
        found.append(
            f"repeats of a prompt ran {drift:.2f} times as fast as its first run: something is kept between runs"
        )
    changed = _unstable(answers)
    if changed:
        found.append(f"the answer to {changed} prompts changed from one repeat to another")
    broken = sum(1 for a in answers.values() if _parts_exceed_total(a))
    if broken:
        found.append(f"in {broken} answers the engine's parts add up to more than the whole")
    return found


def _disturbance(result: Result, name: str) -> tuple[float, float]:
    shares = result.disturbance.get(name) or [(0.0, 0.0)]
    others, idle = spread(s[0] for s in shares), spread(s[1] for s in shares)
    return (others.median if others else 0.0), (idle.median if idle else 0.0)


def _later_over_first(result: Result, answers: dict[tuple[str, int], Answer]) -> float | None:
    """Median over prompts of last repeat's rate / first repeat's, for prefill and for decode; the larger of the two."""
    last = result.plan.repeats - 1
    if last < 1:
        return None
    found = []
    for metric in ("decode_rate", "prefill_rate"):
        pairs = []
        for (prompt, repeat), answer in answers.items():
            first = answers.get((prompt, 0))
            if repeat == last and first is not None and getattr(first, metric) and getattr(answer, metric):
                pairs.append(getattr(answer, metric) / getattr(first, metric))
        median = _median(pairs)
        if median is not None:
            found.append(median)
    return max(found, default=None)


def _unstable(answers: dict[tuple[str, int], Answer]) -> int:
    texts: dict[str, set[tuple[int, ...]]] = {}
    for (prompt, _), answer in answers.items():
        texts.setdefault(prompt, set()).add(answer.token_ids)
    return sum(1 for variants in texts.values() if len(variants) > 1)


def _parts_exceed_total(answer: Answer) -> bool:
    stats = answer.stats
    if not stats or answer.first_token_s is None:
        return False
    parts = sum(float(stats.get(key) or 0.0) for key in ("draft_seconds", "target_seconds", "bookkeeping_seconds"))
    return parts > (answer.first_token_s + answer.decode_s) * 1.02 + 0.005


def ratios(result: Result) -> dict[str, float]:
    """Name -> median over pairs (same prompt, same repeat), with "(min)" and "(max)" of the same beside it.

    A ratio whose contenders did not both run is not there at all.
    """
    published: dict[str, float] = {}
    for ratio in RATIOS:
        found = spread(_pairs(result, ratio))
        if found is not None:
            published[ratio.name] = found.median
            published[f"{ratio.name} (min)"] = found.low
            published[f"{ratio.name} (max)"] = found.high
    return published


def _pairs(result: Result, ratio: Ratio) -> list[float]:
    groups = {prompt.name: prompt.group for prompt in result.plan.prompts}
    over, under = result.kept(ratio.over), result.kept(ratio.under)
    metric = f"{ratio.metric}_rate"
    found = []
    for key in over.keys() & under.keys():
        if groups[key[0]] in ratio.groups:
            a, b = getattr(over[key], metric), getattr(under[key], metric)
            if a and b:
                found.append(a / b)
    return found


def equality(result: Result, gap_of: GapOf | None = None) -> dict[str, dict[str, Any]]:
    """For each pair that must write the same tokens: equal answers by group, and every difference with its logit gap.

    gap_of: measures a difference by teacher forcing; without it, differences are shown without a gap and not excused.
    """
    prompts = {prompt.name: prompt for prompt in result.plan.prompts}
    formats = {contender.name: str(contender.options.get("weight_format", "")) for contender in result.plan.contenders}
    published = {}
    for name, reference in SAME_TEXT:
        left, right = result.kept(name), result.kept(reference)
        keys = sorted(key for key in left.keys() & right.keys() if prompts[key[0]].group != "prefill")
        if not keys:
            continue
        report: dict[str, Any] = {"reference": reference, "by_kind": {}, "near_ties": 0, "faults": 0, "differences": []}
        for key in keys:
            count = report["by_kind"].setdefault(prompts[key[0]].kind, {"equal": 0, "compared": 0})
            count["compared"] += 1
            at = first_difference(left[key].token_ids, right[key].token_ids)
            if at is None:
                count["equal"] += 1
                continue
            pair = (left[key].token_ids, right[key].token_ids)
            difference = _difference(result.plan.ids[key[0]], pair, at, formats[name], gap_of)
            report["near_ties" if difference["near_tie"] else "faults"] += 1
            report["differences"].append({"prompt": key[0], "repeat": key[1] + 1, **difference})
        published[name] = report
    return published


def _difference(
    prompt: list[int],
    answers: tuple[tuple[int, ...], tuple[int, ...]],
    at: int,
    weight_format: str,
    gap_of: GapOf | None,
) -> dict[str, Any]:
    left, right = answers
    if at >= min(len(left), len(right)) or gap_of is None:
        return {"position": at, "near_tie": False}
    measured = gap_of(weight_format, prompt + list(left[:at]), left[at], right[at])
    # Both the two written tokens and the two best ones must be close: otherwise one of them was never a candidate.
    near = max(measured["gap"], measured["margin"]) <= NEAR_TIE.get(weight_format, 0.0)
    return {"position": at, "near_tie": near, **measured}
