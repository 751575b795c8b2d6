"""All figures of a run as one JSON document: what tables, pictures and files are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drafts.figures import LEAST_FOR_INTERVAL
from edgespec.bench.load import compare
from edgespec.bench.load.measures import Deadline, figures
from edgespec.bench.load.records import Stretch
from edgespec.bench.load.schedule import Schedule
from edgespec.bench.load.series import series
from edgespec.bench.words import counted

BUSY_SHARE = 0.1  # other processes' share of the processors from which a run is worth less
LATE_S = 0.1  # a request handed over later than that says that the client itself was late

DEFINITIONS = {
    "throughput": "tokens over the loaded seconds: those of the window in which at least one request was there. At low "
    "rates this is the speed of one conversation, at high ones that of a full batch; prefill is in it",
    "window": "from the end of the warm-up to the end of the arrivals; what came before and after does not count",
    "TTFT": "seconds from the time at which a request was to come to its first token, waiting and prefill included",
    "TPOT": "seconds a token after the first piece, of each request",
    "latency": "seconds from the time at which a request was to come to its last token",
    "percentiles": "nearest rank, over the requests of a stretch's window, then the median over repeats. Refused and "
    "failed requests have no times. What had not come when time was up counts as longer than all: '–' is a percentile "
    "among those, and means count what they had waited by then (marked ≥)",
    "goodput": "whole answers that kept both deadlines, of all requests of the window: refused, failed and unfinished "
    "ones did not",
    "interval": f"95% by bootstrap over repeats; of fewer than {LEAST_FOR_INTERVAL} repeats the least and the most",
    "pairs": "ratios are of the same arrivals with the same prompts, run one after the other, another arm first each "
    "time",
    "running, queued, gamma, KV": "means over the time of batches; gamma is the mean of the running sequences' plans",
    "pinned": "the drafts' memory stays theirs; else it may become KV blocks while gamma is 0 and blocks are short",
}


def build(
    schedule: Schedule, stretches: Sequence[Stretch], deadline: Deadline, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The document. about: simulated, title, conditions, command, machine, settings, texts, validation, warnings."""
    rows = [stretch.head() | {"figures": figures(stretch, deadline)} for stretch in stretches]
    names = {arm.name for arm in schedule.arms}
    arms = [arm.name for arm in schedule.arms if any(row["arm"] == arm.name for row in rows)]
    rates = [rate for rate in schedule.rates if any(row["rate"] == rate for row in rows)]
    return {
        **about,
        "arms": arms,
        "rates": rates,
        "deadline": {"ttft_s": deadline.ttft, "tpot_s": deadline.tpot},
        "warnings": [*about["warnings"], *warnings(rows)],
        "table": compare.table(rows, rates, arms),
        "to_none": compare.ratios(rows, rates, arms, compare.NONE) if compare.NONE in names & set(arms) else None,
        "verdicts": compare.verdicts(rows, rates, arms),
        "series": chosen_series(stretches, arms, rates),
        "parts": of_parts(schedule, stretches, deadline, rates, arms),
        "stretches": rows,
        "definitions": DEFINITIONS,
    }


def of_parts(
    schedule: Schedule, stretches: Sequence[Stretch], deadline: Deadline, rates: Sequence[float], arms: Sequence[str]
) -> list[dict[str, Any]]:
    """Under a load that changes: the figures of each part of it alone, as those of a whole stretch are made."""
    found = []
    for part in schedule.parts():
        cut = [replace(stretch, warm_up=part.begin, seconds=part.end) for stretch in stretches]
        rows = [stretch.head() | {"figures": figures(stretch, deadline)} for stretch in cut]
        ratios = compare.ratios(rows, rates, arms, compare.NONE) if compare.NONE in arms else None
        found.append({**part._asdict(), "table": compare.table(rows, rates, arms), "to_none": ratios})
    return found


def warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes the figures worth less."""
    found = []
    busy = [row for row in rows if row["busy"] > BUSY_SHARE]
    if busy:
        found.append(
            f"Other processes took up to {max(row['busy'] for row in busy):.0%} of the processors in {len(busy)} of "
            f"{counted(len(rows), 'stretch', 'stretches')}."
        )
    late = max((row["figures"]["latest_submission_s"] for row in rows), default=0.0)
    if late > LATE_S:
        found.append(f"A request was handed over {late:.2f} s late; latencies count from when it was to come.")
    failed = sum(row["figures"]["requests"]["failed"] for row in rows)
    if failed:
        found.append(f"{counted(failed, 'request')} failed, and missed the deadline; what failed has no times.")
    few = min((row["figures"]["requests"]["asked"] for row in rows), default=0)
    if rows and few < 20:
        found.append(
            f"A stretch had only {counted(few, 'request')} in its window: high percentiles of few are single requests, "
            "and their throughput is that of single answers. Longer --seconds help."
        )
    found += [f"The run ended early: {row['stuck']}." for row in rows if row["stuck"]]
    if any(row["interrupted"] and not row["stuck"] for row in rows):
        found.append("The run was interrupted; its last stretch counts as far as it came.")
    return found


def chosen_series(stretches: Sequence[Stretch], arms: Sequence[str], rates: Sequence[float]) -> list[dict[str, Any]]:
    """The first repeat of every arm, at the highest rate: there most happens."""
    if not rates:
        return []
    top = max(rates)
    first = {s.arm: s for s in reversed(stretches) if s.rate == top and s.samples}
    return [series(first[arm]) for arm in arms if arm in first]
