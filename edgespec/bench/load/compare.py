"""Arms side by side over the same arrivals: medians over repeats with intervals, and paired ratios."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drafts.figures import LEAST_FOR_INTERVAL

NONE = "none"
_RESAMPLES, _LEVELS = 4000, (2.5, 97.5)

Row = Mapping[str, Any]


def median(values: Sequence[float | None]) -> dict[str, Any]:
    """Median of the known values with their interval, see `_interval`."""
    known = [value for value in values if value is not None]
    low, high = _interval([known])
    return {"value": statistics.median(known) if known else None, "low": low, "high": high, "n": len(known)}


def _interval(groups: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Of the mean over groups of each group's median: 95%, by values drawn anew within each group. Of fewer than five
    values that would be no such thing: then the least and the most."""
    if not groups or any(len(group) < 2 for group in groups):
        return None, None
    if any(len(group) < LEAST_FOR_INTERVAL for group in groups):
        return statistics.fmean(min(group) for group in groups), statistics.fmean(max(group) for group in groups)
    rng = np.random.default_rng(zlib.crc32(repr(list(map(len, groups))).encode()))
    drawn = [np.median(rng.choice(np.asarray(group), (_RESAMPLES, len(group))), axis=1) for group in groups]
    low, high = np.percentile(np.mean(drawn, axis=0), _LEVELS)
    return float(low), float(high)


def table(rows: Sequence[Row], rates: Sequence[float], arms: Sequence[str]) -> list[dict[str, Any]]:
    """One entry for every rate and arm that ran: medians over its repeats."""
    found = []
    for rate in rates:
        for arm in arms:
            of_place = [row["figures"] for row in rows if row["rate"] == rate and row["arm"] == arm]
            if of_place:
                found.append({"rate": rate, "arm": arm, **_place(of_place)})
    return found


def _place(figures: Sequence[Row]) -> dict[str, Any]:
    counts = {kind: sum(f["requests"][kind] for f in figures) for kind in figures[0]["requests"]}
    latencies = {
        name: {
            **{key: median([f[name][key] for f in figures]) for key in ("p50", "p95", "p99", "mean")},
            "at_least": any(f[name]["at_least"] for f in figures),
        }
        for name in ("ttft", "tpot", "latency")
    }
    loop = {
        name: median([f["loop"][name] for f in figures])
        for name in ("sequences", "queued", "gamma", "acceptance", "least_kv_free", "resident")
    }
    return {
        "offered": median([f["offered"] for f in figures]),
        "throughput": median([f["throughput"] for f in figures]),
        "tokens_per_second": median([f["tokens_per_second"] for f in figures]),
        "goodput_share": median([f["goodput"]["share"] for f in figures]),
        "goodput": median([f["goodput"]["requests_per_second"] for f in figures]),
        "requests": counts,
        "repeats": len(figures),
        "elastic_events": sum(len(f["loop"]["elastic"]) for f in figures),
        **latencies,
        **{f"mean_{name}" if name != "least_kv_free" else name: value for name, value in loop.items()},
    }


def ratios(rows: Sequence[Row], rates: Sequence[float], arms: Sequence[str], reference: str) -> dict[str, Any]:
    """Throughput of each arm over that of `reference`, pairs of the same arrivals: by rate, and the mean over rates.

    A rate counts in the mean only if every arm has it, so that all means are over the same rates.
    """
    pairs = {arm: {rate: _pairs(rows, rate, arm, reference) for rate in rates} for arm in arms}
    common = [rate for rate in rates if all(pairs[arm][rate] for arm in arms)]
    found = {}
    for arm in arms:
        groups = [pairs[arm][rate] for rate in common]
        low, high = _interval(groups) if arm != reference else (None, None)
        found[arm] = {
            "by_rate": {f"{rate:g}": median(pairs[arm][rate]) for rate in rates},
            "value": statistics.fmean(map(statistics.median, groups)) if groups else None,
            "low": low,
            "high": high,
        }
    return {"reference": reference, "rates": common, "arms": found}


def _pairs(rows: Sequence[Row], rate: float, arm: str, reference: str) -> list[float]:
    by_repeat: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["rate"] == rate and row["figures"]["throughput"]:
            by_repeat.setdefault(row["repeat"], {})[row["arm"]] = row["figures"]["throughput"]
    return [both[arm] / both[reference] for both in by_repeat.values() if arm in both and reference in both]


def is_fixed(arm: str) -> bool:
    """Whether an arm always drafts so many tokens."""
    return arm.startswith("fixed:")


def best_fixed(compared: Row) -> str | None:
    """The fixed gamma that is fastest over all rates; None without any."""
    means = {arm: found["value"] for arm, found in compared["arms"].items() if is_fixed(arm) and found["value"]}
    return max(means, key=lambda arm: means[arm], default=None)


def verdicts(rows: Sequence[Row], rates: Sequence[float], arms: Sequence[str]) -> list[dict[str, Any]]:
    """For each arm that is neither: beside no speculation, beside the best fixed gamma, and its worst rate beside the
    better of the two. The best fixed gamma is one for all rates, of those that ran, known only afterwards.

    worst_by_rate: beside the better of none and the fixed gamma that is best at that rate, which may be another one at
    each: harder than anything that one could choose beforehand."""
    if NONE not in arms:
        return []
    to_none = ratios(rows, rates, arms, NONE)
    fixed = best_fixed(to_none)
    every = {each: ratios(rows, rates, arms, each) for each in arms if is_fixed(each)}
    to_fixed = None if fixed is None else every[fixed]
    found = []
    for arm in arms:
        if arm == NONE or is_fixed(arm):
            continue
        found.append(
            {
                "arm": arm,
                "best_fixed": fixed,
                "fixed": list(every),
                "rates": to_none["rates"],
                "to_none": {key: to_none["arms"][arm][key] for key in ("value", "low", "high")},
                "to_fixed": None
                if to_fixed is None
                else {key: to_fixed["arms"][arm][key] for key in ("value", "low", "high")},
                "worst": _worst(arm, rates, [to_none] if to_fixed is None else [to_none, to_fixed]),
                "worst_by_rate": _worst(arm, rates, [to_none, *every.values()]),
            }
        )
    return found


def _worst(arm: str, rates: Sequence[float], compared: Sequence[Row]) -> dict[str, Any] | None:
    """The rate at which an arm falls furthest behind the better of the references."""
    found = []
    for rate in rates:
        values = [each["arms"][arm]["by_rate"][f"{rate:g}"]["value"] for each in compared]
        if None not in values:
            found.append((min(values), rate))
    return None if not found else {"rate": min(found)[1], "value": min(found)[0]}
