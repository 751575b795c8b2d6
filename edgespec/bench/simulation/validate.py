"""Does a simulation say what a run measured? Speed-ups side by side, on the same questions, with the run's own costs.

The costs are taken from policies that always do the same, so that each is a mean of measured seconds and no fit: plain
steps give a forward over one token, `static:<draft>@g` one over g + 1 tokens, the draft's step, its reading, and what
a round costs besides. Policies that choose are predicted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.bench.simulation.scenario import LOOKUP_SECONDS, PLAIN, Base, Setting, figures, simulate
from edgespec.bench.simulation.texts import Corpus, shortened
from edgespec.bench.specbench.folder import Record, RunFolder
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from predictor.policies.base import LOOKUP
from predictor.replay import TextTrace

WITHIN = 0.05  # the goal: simulated and measured speed-up agree within 5%
_STATIC = re.compile(r"static:(?P<draft>[^@,]+)@(?P<gamma>\d+)(,.*)?")


@dataclass(frozen=True)
class Matched:
    """Turns of a run that were recorded, too. texts: by name, in the run's order; records: by arm and name."""

    texts: tuple[TextTrace, ...]
    records: Mapping[str, Mapping[str, Sequence[Record]]]


def matched(corpus: Corpus, run: RunFolder) -> Matched:
    """The run's turns whose prompt and answer are those of a recorded text. Raises ConfigError if there are none."""
    by_start: dict[tuple[int, tuple[int, ...]], list[TextTrace]] = defaultdict(list)
    for text in corpus.texts:
        by_start[text.prompt_length, tuple(corpus.answers[text.name][:8])].append(text)
    records: dict[str, dict[str, list[Record]]] = {arm: defaultdict(list) for arm in run.arms}
    order: dict[str, int] = {}
    cut: dict[str, int] = {}
    for arm, found in run.records.items():
        for record in found:
            if record.error is not None or record.decode_tokens < 1:
                continue
            for text in by_start.get((record.prompt_tokens, tuple(record.token_ids[:8])), ()):
                answer = corpus.answers[text.name]
                length = min(len(answer), len(record.token_ids))
                if length == len(record.token_ids) and tuple(answer[:length]) == record.token_ids:
                    records[arm][text.name].append(record)
                    order.setdefault(text.name, record.order)
                    cut[text.name] = length
    known = {text.name: text for text in corpus.texts}
    shared = [name for name in order if all(name in records[arm] for arm in records if run.arms[arm].status == "ok")]
    if not shared:
        raise ConfigError(
            f"None of the answers in {run.path} was recorded in these traces: run 'bench record' on the same "
            "questions, with the same model, weight format and --max-new-tokens (first turns only)."
        )
    shared.sort(key=lambda name: order[name])
    texts = tuple(shortened(known[name], cut[name]) for name in shared)
    return Matched(texts, records)


def run_costs(matched: Matched, corpus: Corpus, fallback: CostTable) -> tuple[CostTable, float]:
    """Costs and overhead of a round, from the run's fixed policies. Raises ConfigError without plain or any static.

    fallback: for drafts and loads of which the run says nothing.
    """
    plain = _sums(matched, PLAIN)
    if not plain.get("rounds"):
        raise ConfigError("The run has no plain answers that were recorded, too.")
    verify = {1: plain["target_seconds"] / plain["rounds"]}
    rests = [_rest(plain)]
    data: dict[str, Any] = fallback.to_json()
    widths: dict[int, list[float]] = defaultdict(list)
    drafts, reads = dict(data["drafts"]), dict(data.get("catch_up", {}))
    for arm in matched.records:
        fixed = _STATIC.fullmatch(arm)
        if fixed is None:
            continue
        name, gamma, sums = fixed["draft"], int(fixed["gamma"]), _sums(matched, arm)
        if not sums.get("rounds"):
            continue
        # Rounds at the end of an answer are narrower and some find no guess: seconds are shared out by planned width.
        one = sums["narrow"] * verify[1]
        widths[gamma + 1].append((sums["target_seconds"] - one) / max(sums["rounds"] - sums["narrow"], 1))
        rests.append(_rest(sums))
        mine = sums["share"].get(name, 0)
        if name in corpus.weighted and mine:
            drafts[name] = sums["draft_seconds"] / (mine * gamma)
            reads[name] = sums["catch_up_seconds"] / max(sums["read"], 1)
    for width, found in widths.items():
        verify[width] = sum(found) / len(found)
    if len(verify) < 2:
        raise ConfigError("The run has no static:<draft>@<gamma> with answers that were recorded, too: costs need one.")
    known = [drafts[name] for name in corpus.weighted if name in drafts]
    for name in corpus.weighted:
        drafts.setdefault(name, sum(known) / len(known) if known else 0.05 * verify[1])
    drafts |= dict.fromkeys((*corpus.free, LOOKUP), LOOKUP_SECONDS)
    loads = _loads(matched) or data.get("loads", {})
    if isinstance(loads, float):
        loads = dict.fromkeys(corpus.weighted, loads)
    return CostTable(verify, drafts, loads=loads, catch_up=reads), max(sum(rests) / len(rests), 0.0)


def _sums(matched: Matched, arm: str) -> dict[str, Any]:
    """Counters of an arm over the matched turns."""
    total: dict[str, Any] = defaultdict(float)
    share: dict[str, int] = defaultdict(int)
    for name in (text.name for text in matched.texts):
        for record in matched.records.get(arm, {}).get(name, ()):
            stats = record.stats
            for key in ("rounds", "target_seconds", "draft_seconds", "catch_up_seconds"):
                total[key] += stats.get(key, 0)
            total["decode_s"] += record.decode_s
            total["narrow"] += stats.get("gamma_histogram", {}).get("0", 0)
            total["read"] += min(record.prompt_tokens, 256)
            for draft, rounds in stats.get("draft_share", {}).items():
                share[draft] += rounds
    return {**total, "share": share}


def _rest(sums: Mapping[str, Any]) -> float:
    """Seconds of a round that neither drafts nor the target took."""
    named = sums["target_seconds"] + sums["draft_seconds"] + sums["catch_up_seconds"]
    return float(sums["decode_s"] - named) / float(sums["rounds"])


def _loads(matched: Matched) -> float | None:
    """Seconds of a load, mean of all that were completed."""
    count = seconds = 0.0
    for by_text in matched.records.values():
        for records in by_text.values():
            for record in records:
                count += record.stats.get("loads", 0)
                seconds += record.stats.get("load_seconds_hidden", 0.0) + record.stats.get("load_seconds_exposed", 0.0)
    return seconds / count if count else None


def validated(base: Base, run: RunFolder) -> dict[str, Any]:
    """Every policy arm of the run that can be replayed: measured and simulated speed-up over plain."""
    corpus = base.corpus
    found = matched(corpus, run)
    costs, overhead = run_costs(found, corpus, base.costs)
    resident = int(run.settings.get("resident") or len(corpus.weighted))
    mine = replace(base, corpus=replace(corpus, texts=found.texts), costs=costs, overhead=overhead, limit=None)
    start = Setting(resident=resident, order="file")
    plain = simulate(mine, start)
    seconds = {arm: _seconds(found, arm) for arm in run.arms}
    rows = []
    for arm, info in run.arms.items():
        if arm == PLAIN or info.kind != "policy" or info.status != "ok":
            continue
        setting = replace(start, policy=arm)
        row = figures(setting, simulate(mine, setting), plain)
        measured = seconds[PLAIN] / seconds[arm]
        row |= {"arm": arm, "measured": measured, "error": row["speedup"] / measured - 1}
        rows.append(row)
    return {
        "run": str(run.path),
        "texts": len(found.texts),
        "resident": resident,
        "costs": costs.to_json(),
        "overhead_seconds": overhead,
        "within": WITHIN,
        "agree": sum(abs(row["error"]) <= WITHIN for row in rows),
        "rows": rows,
    }


def _seconds(found: Matched, arm: str) -> float:
    """Decode seconds of an arm over the matched texts, the mean of repeats of each."""
    total = 0.0
    for text in found.texts:
        records = found.records.get(arm, {}).get(text.name, ())
        total += sum(record.decode_s for record in records) / max(len(records), 1)
    return total or float("nan")
