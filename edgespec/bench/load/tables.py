"""A run's figures as tables, once for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.bench.reporting.tables import UNKNOWN, Table

Row = Mapping[str, Any]
SIMULATED = "Simulated: no clock measured this."


def all_tables(document: Row) -> list[Table]:
    """Every table of a document, those without rows left out."""
    note = SIMULATED if document["simulated"] else ""
    found = [verdicts(document["verdicts"], note), throughput(document, note), parts(document, note)]
    found += [latencies(document, note), goodput(document, note), loop(document, note)]
    found += [texts(document["texts"]), differences(document["texts"]), validation(document["validation"])]
    return [table for table in found if table.rows]


def short(document: Row) -> list[Table]:
    """Those that a terminal shows: the report has the others."""
    note = SIMULATED if document["simulated"] else ""
    found = [throughput(document, note), parts(document, note), verdicts(document["verdicts"], note)]
    found += [texts(document["texts"]), validation(document["validation"])]
    return [table for table in found if table.rows]


def verdicts(rows: Sequence[Row], note: str = "") -> Table:
    """Each planner beside no speculation, and beside the best fixed gamma."""
    cells = [
        [
            row["arm"], ratio(row["to_none"]), interval(row["to_none"]), row["best_fixed"] or UNKNOWN,
            ratio(row["to_fixed"]), interval(row["to_fixed"]), _at_rate(row["worst"]), _at_rate(row["worst_by_rate"]),
        ]
        for row in rows
    ]  # fmt: skip
    ran = ", ".join(rows[0]["fixed"]) if rows else ""
    text = f"Throughput, mean over rates. The best fixed gamma is one for all rates, of those that ran ({ran or '-'}), "
    text += "known only afterwards; the worst rate is beside the better of it and none there. By rate: beside none "
    text += "and whichever fixed gamma is best at that rate."
    columns = ["planner", "x none", "interval", "best fixed", "x best fixed", "interval"]
    columns += ["worst rate", "worst rate, by rate"]
    return Table("Planners beside no speculation and the best fixed gamma", columns, cells, f"{text} {note}".strip())


def _at_rate(worst: Row | None) -> str:
    return UNKNOWN if worst is None else f"{worst['value']:.3f} at {worst['rate']:g}/s"


def throughput(document: Row, note: str = "") -> Table:
    """One row a rate: tokens a second of every arm, and times none."""
    cells = []
    for rate in document["rates"]:
        row = [f"{rate:g}", _came(document, rate)]
        for arm in document["arms"]:
            entry = place(document, rate, arm)
            text = UNKNOWN if entry is None else number(entry["throughput"]["value"], 1)
            compared = document["to_none"]
            if compared is not None and arm in compared["arms"] and arm != compared["reference"]:
                text += f" ({ratio(compared['arms'][arm]['by_rate'][f'{rate:g}'])})"
            row.append(text)
        cells.append(row)
    text = "Medians over repeats of tokens per loaded second; in parentheses: times none on the same arrivals. Came: "
    text += "requests a second that did come, which bursts make differ from the rate; of several repeats the median."
    columns = ["rate", "came", *document["arms"]]
    return Table("Throughput by requests a second", columns, cells, f"{text} {note}".strip())


def parts(document: Row, note: str = "") -> Table:
    """Under a load that changes: one row a rate, part of the load, and arm."""
    cells = []
    for rate in document["rates"]:
        for part in document["parts"]:
            for entry in (e for e in part["table"] if e["rate"] == rate):
                compared = None if part["to_none"] is None else part["to_none"]["arms"][entry["arm"]]
                values = {name: entry[f"mean_{name}"]["value"] for name in ("gamma", "sequences", "queued")}
                cells.append(
                    [
                        f"{rate:g}", f"{part['name']} ({rate * part['times']:.2g}/s)", entry["arm"],
                        number(entry["throughput"]["value"], 1),
                        ratio(None if compared is None else compared["by_rate"][f"{rate:g}"]),
                        *(number(value, 2) for value in values.values()),
                        number(entry["ttft"]["p50"]["value"], 2), number(entry["tpot"]["p50"]["value"], 3),
                    ]
                )  # fmt: skip
    columns = ["rate", "part", "planner", "tokens/s", "x none", "gamma (mean)", "running (mean)", "queued (mean)"]
    columns += ["TTFT p50 s", "TPOT p50 s"]
    text = "What was made within each part, and the latencies of what came within it: what the high part leaves queued "
    text += "is worked off in the next."
    return Table("By part of the load", columns, cells, f"{text} {note}".strip())


def _came(document: Row, rate: float) -> str:
    """Requests a second that came at a rate: the same for all arms, as far as they ran."""
    entries = [entry for entry in document["table"] if entry["rate"] == rate]
    most = max(entries, key=lambda entry: entry["repeats"], default=None)  # of one that was cut off, least is known
    return UNKNOWN if most is None else number(most["offered"]["value"], 2)


def latencies(document: Row, note: str = "") -> Table:
    """One row a rate and arm."""
    cells = []
    for entry in document["table"]:
        row = [f"{entry['rate']:g}", entry["arm"]]
        for name, digits in (("ttft", 2), ("tpot", 3), ("latency", 2)):
            row += [number(entry[name][key]["value"], digits) for key in ("p50", "p95", "p99")]
        mean = number(entry["ttft"]["mean"]["value"], 2)
        cells.append([*row, f"≥ {mean}" if entry["ttft"]["at_least"] else mean])
    heads = [f"{name} {key}" for name in ("TTFT", "TPOT", "latency") for key in ("p50", "p95", "p99")]
    text = "Seconds, medians over repeats."
    return Table("Latencies", ["rate", "planner", *heads, "TTFT mean"], cells, f"{text} {note}".strip())


def goodput(document: Row, note: str = "") -> Table:
    """What kept the deadline, and what became of all requests."""
    cells = []
    for entry in document["table"]:
        counts = entry["requests"]
        cells.append(
            [
                f"{entry['rate']:g}", entry["arm"], percent(entry["goodput_share"]["value"]),
                number(entry["goodput"]["value"], 2),
                *(str(counts[kind]) for kind in ("asked", "finished", "unfinished", "refused", "failed")),
            ]
        )  # fmt: skip
    limit = document["deadline"]
    text = f"Deadline: first token within {limit['ttft_s']:g} s, {limit['tpot_s']:g} s for each token after it. "
    text += "Requests are those of all repeats."
    columns = ["rate", "planner", "in time", "in time/s", "asked", "finished", "unfinished", "refused", "failed"]
    return Table("Goodput", columns, cells, f"{text} {note}".strip())


def loop(document: Row, note: str = "") -> Table:
    """What the loop did at each place."""
    cells = []
    for entry in document["table"]:
        values = {name: entry[f"mean_{name}"]["value"] for name in ("sequences", "queued", "gamma", "resident")}
        cells.append(
            [
                f"{entry['rate']:g}", entry["arm"], number(values["sequences"], 2), number(values["queued"], 2),
                number(values["gamma"], 2), percent(entry["mean_acceptance"]["value"]),
                percent(entry["least_kv_free"]["value"]), number(values["resident"], 1), str(entry["elastic_events"]),
            ]
        )  # fmt: skip
    columns = ["rate", "planner", "running", "queued", "gamma", "accepted", "least KV free", "drafts", "elastic events"]
    text = "Means over the time of batches."
    return Table("The loop", columns, cells, f"{text} {note}".strip())


def texts(found: Row | None) -> Table:
    """Whether every text is what the target writes alone."""
    columns = ["compared", "equal", "near ties", "faults", "not compared"]
    if found is None:
        return Table("Texts", columns, [])
    cells = [[str(found[key]) for key in ("compared", "equal", "near_ties", "faults", "uncompared")]]
    text = f"{found['alone']} different requests were made again alone, without drafts; others are compared between "
    text += "planners. A fault is a difference that is no near tie. Not compared: nothing was there to compare with."
    return Table("Texts beside those of the target alone", columns, cells, text)


def differences(found: Row | None) -> Table:
    """Each difference, as far as they are listed."""
    cells = []
    for each in found["differences"] if found else ():
        kind = "near tie" if each["near_tie"] else "fault"
        where = [f"{each['rate']:g}", str(each["repeat"] + 1), str(each["number"]), each["prompt"]]
        cells.append([each["arm"], *where, str(each["position"]), kind, number(each["gap"], 4)])
    columns = ["planner", "rate", "repeat", "request", "prompt", "token", "kind", "gap"]
    return Table("Differences", columns, cells, long=True)


def validation(found: Row | None) -> Table:
    """Simulated beside measured throughput."""
    columns = ["rate", "planner", "measured", "simulated", "difference"]
    if found is None:
        return Table("Simulated against measured", columns, [])
    cells = [
        [f"{r['rate']:g}", r["arm"], number(r["measured"], 1), number(r["simulated"], 1), f"{r['error']:+.1%}"]
        for r in found["rows"]
    ]
    text = f"Tokens per loaded second. {found['agree']} of {len(found['rows'])} agree within {found['within']:.0%}; "
    text += f"mean difference {found['mean_error']:+.1%}."
    return Table("Simulated against measured", columns, cells, text)


def place(document: Row, rate: float, arm: str) -> Row | None:
    """The entry of one rate and arm."""
    return next((e for e in document["table"] if e["rate"] == rate and e["arm"] == arm), None)


def number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def ratio(found: Row | None) -> str:
    return UNKNOWN if found is None or found["value"] is None else f"{found['value']:.3f}"


def interval(found: Row | None) -> str:
    return UNKNOWN if found is None or found["low"] is None else f"{found['low']:.3f}-{found['high']:.3f}"
