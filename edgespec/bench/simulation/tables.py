"""Results as tables, once for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from drafts.figures import LEAST_FOR_INTERVAL
from edgespec.bench.reporting.tables import UNKNOWN, Table
from edgespec.bench.words import counted

Row = Mapping[str, Any]
SIMULATED = "Simulated: recorded acceptance, tabled seconds. No clock measured this."
NARROW = 20  # texts; the interval of fewer promises more than it knows
_NO_PLANNING = "Planning costs nothing here."
_FEW = f"Of fewer than about {NARROW} texts the 95% interval is narrower than it ought to be."
_ORACLES = (
    "Oracles are no bounds: they decide for a few rounds, or for a text, at a time, and pay for loads and catch-up; "
    "oracle-dynamic may be below oracle-static, and in one domain below plain."
)


def all_tables(document: Row) -> list[Table]:
    """Every table of a document of `bench simulate`."""
    costs = document["costs_of"]
    found = [] if document["device"] is None else [device(document["device"])]
    found += [policies(document["rows"], costs)] if document["rows"] else []
    found += [sweep(each, costs) for each in document["sweeps"]]
    found += [] if document["validation"] is None else [validation(document["validation"])]
    return found


def policies(rows: list[Row], costs: str) -> Table:
    """One row a policy. costs: whose they are."""
    domains = rows[0]["texts_by_domain"]
    heads = [f"{name} ({count})" for name, count in domains.items()]
    columns = ["policy", "x plain", "95%", *heads, "tok/round", "fallback", "loads", "switches"]
    cells = []
    for row in rows:
        interval = UNKNOWN if row["low"] is None else f"{row['low']:.2f}-{row['high']:.2f}"
        of_domains = [f"{row['by_domain'][name]:.2f}" for name in domains]
        counts = [f"{row['tokens_per_round']:.2f}", f"{row['fallback_share']:.1%}"]
        counts += [str(row["loads"]), str(row["switches"]), _share(row, "catch_up"), _share(row, "shadow")]
        cells.append([row["policy"], f"{row['speedup']:.3f}", interval, *of_domains, *counts])
    narrow = LEAST_FOR_INTERVAL <= rows[0]["texts"] < NARROW
    note = [SIMULATED, _NO_PLANNING, *[_FEW] * narrow, *_of_oracles(row["policy"] for row in rows)]
    return Table(f"Policies, at {costs}", [*columns, "catch-up", "shadows"], cells, " ".join(note))


def _of_oracles(policies: Iterable[str]) -> list[str]:
    """What to know of oracles where one is among the policies."""
    return [_ORACLES] if any(policy.startswith("oracle-") for policy in policies) else []


def _share(row: Row, what: str) -> str:
    return f"{row[f'{what}_seconds'] / row['seconds']:.1%}"


def sweep(found: Row, costs: str) -> Table:
    """One row a value of what is varied: each policy's speed-up, with its share of fallback rounds."""
    lines = list(dict.fromkeys(point["line"] for point in found["points"]))
    by_place = {(point["value"], point["line"]): point["row"] for point in found["points"]}
    cells = []
    for value in dict.fromkeys(point["value"] for point in found["points"]):
        rows = [by_place.get((value, line)) for line in lines]
        texts = [UNKNOWN if r is None else f"{r['speedup']:.2f} ({r['fallback_share']:.0%})" for r in rows]
        cells.append([str(value), *texts])
    note = ["Times plain, and in parentheses the share of fallback rounds.", f"At {costs}.", _NO_PLANNING]
    note += [found["note"]] if found["note"] else []
    note += _of_oracles(lines)
    return Table(found["title"], [found["axis"] or found["name"], *lines], cells, " ".join(note))


def validation(found: Row) -> Table:
    """One row an arm."""
    cells = []
    for row in found["rows"]:
        figures = [f"{row['measured']:.3f}", f"{row['speedup']:.3f}", f"{row['error']:+.1%}"]
        cells.append([row["arm"], *figures, "fitted" if row["fitted"] else "predicted"])
    note = f"{_verdict(found)} The seconds of steps and forwards are means of plain and of the fitted arms, which "
    note += "therefore prove nothing; those of planning are each arm's own."
    title = "Simulated against measured, at the run's own costs"
    return Table(title, ["arm", "measured", "simulated", "difference", "costs"], cells, note)


def _verdict(found: Row) -> str:
    """How many agree; of too few answers, or none that is predicted, that there is nothing to say."""
    answers, predicted, agree = counted(found["texts"], "answer"), found["predicted"], found["agree"]
    if not predicted:
        return f"None is predicted, over {answers}."
    if agree is None:
        return f"No verdict: {answers}, and of fewer than {LEAST_FOR_INTERVAL} there is none."
    verb = "agrees" if 1 in (agree, predicted) else "agree"
    ones = counted(predicted, "predicted one")
    return f"{agree} of {ones} {verb} within {found['within']:.0%}, over {answers}."


def pace(replayed: Row) -> str:
    """How fast the replay itself was; "" where no policy that drafts was replayed."""
    if not replayed["rounds"]:
        return ""
    where = counted(replayed["processes"], "process", "processes")
    return f"{counted(replayed['rounds'], 'round')} replayed in {replayed['seconds']:.1f} s ({where})."


def device(found: Row) -> Table:
    """What a device profile says of its models."""
    columns = ["ms", *(f"{width} tokens" for width in found["verify_ms"]), "draft step", "load", "read a token"]
    row = [found["target"], *(f"{ms:.1f}" for ms in found["verify_ms"].values())]
    row += [f"{found['draft_ms']:.2f}", f"{found['load_ms']:.0f}", f"{found['read_ms']:.3f}"]
    note = f"{found['name']}: a roofline of its profile, not measured. Room for {found['slots']} drafts of "
    note += f"{found['draft']} beside {found['target']}. Acceptance is that of the recorded texts' own drafts."
    return Table("The device", columns, [row], note)
