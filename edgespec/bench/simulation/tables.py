"""Results as tables, once for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.bench.reporting.tables import UNKNOWN, Table

Row = Mapping[str, Any]
SIMULATED = "Simulated: recorded acceptance, tabled seconds. No clock measured this."


def all_tables(document: Row) -> list[Table]:
    """Every table of a document of `bench simulate`."""
    found = [] if document["device"] is None else [device(document["device"])]
    found += [policies(document["rows"])] if document["rows"] else []
    found += [sweep(each) for each in document["sweeps"]]
    found += [] if document["validation"] is None else [validation(document["validation"])]
    return found


def policies(rows: list[Row]) -> Table:
    """One row a policy."""
    domains = list(rows[0]["by_domain"])
    columns = ["policy", "x plain", "95%", *domains, "tok/round", "fallback", "loads", "switches"]
    cells = []
    for row in rows:
        interval = UNKNOWN if row["low"] is None else f"{row['low']:.2f}-{row['high']:.2f}"
        of_domains = [f"{row['by_domain'][name]:.2f}" for name in domains]
        counts = [f"{row['tokens_per_round']:.2f}", f"{row['fallback_share']:.1%}"]
        counts += [str(row["loads"]), str(row["switches"]), _share(row, "catch_up"), _share(row, "shadow")]
        cells.append([row["policy"], f"{row['speedup']:.3f}", interval, *of_domains, *counts])
    return Table("Policies", [*columns, "catch-up", "shadows"], cells, SIMULATED)


def _share(row: Row, what: str) -> str:
    return f"{row[f'{what}_seconds'] / row['seconds']:.1%}"


def sweep(found: Row) -> Table:
    """One row a value of what is varied: each policy's speed-up, with its share of fallback rounds."""
    lines = list(dict.fromkeys(point["line"] for point in found["points"]))
    by_place = {(point["value"], point["line"]): point["row"] for point in found["points"]}
    cells = []
    for value in dict.fromkeys(point["value"] for point in found["points"]):
        rows = [by_place.get((value, line)) for line in lines]
        texts = [UNKNOWN if r is None else f"{r['speedup']:.2f} ({r['fallback_share']:.0%})" for r in rows]
        cells.append([str(value), *texts])
    note = "Times plain, and in parentheses the share of fallback rounds."
    note += f" {found['note']}" if found["note"] else ""
    return Table(found["title"], [found["axis"] or found["name"], *lines], cells, note)


def validation(found: Row) -> Table:
    """One row an arm."""
    cells = []
    for row in found["rows"]:
        figures = [f"{row['measured']:.3f}", f"{row['speedup']:.3f}", f"{row['error']:+.1%}"]
        cells.append([row["arm"], *figures, "fitted" if row["fitted"] else "predicted"])
    note = f"{found['agree']} of {found['predicted']} predicted ones agree within {found['within']:.0%}, over "
    note += f"{found['texts']} answers. The seconds of steps and forwards are means of plain and of the fitted arms, "
    note += "which therefore prove nothing; those of planning are each arm's own."
    return Table("Simulated against measured", ["arm", "measured", "simulated", "difference", "costs"], cells, note)


def device(found: Row) -> Table:
    """What a device profile says of its models."""
    columns = ["ms", *(f"{width} tokens" for width in found["verify_ms"]), "draft step", "load", "read a token"]
    row = [found["target"], *(f"{ms:.1f}" for ms in found["verify_ms"].values())]
    row += [f"{found['draft_ms']:.2f}", f"{found['load_ms']:.0f}", f"{found['read_ms']:.3f}"]
    note = f"{found['name']}: a roofline of its profile, not measured. Room for {found['slots']} drafts of "
    note += f"{found['draft']} beside {found['target']}. Acceptance is that of the recorded texts' own drafts."
    return Table("The device", columns, [row], note)
