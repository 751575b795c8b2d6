"""Pictures of simulations, in the reports' style. Call inside `style.drawing()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from edgespec.bench.reporting import style
from edgespec.bench.reporting.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIMULATED = "Simulated from recorded texts."


def pictures(document: Mapping[str, Any]) -> Iterator[Picture]:
    """All pictures of a document of `bench simulate`."""
    if document["rows"]:
        yield Picture("policies", "Decode speed, times plain", SIMULATED, _policies(document["rows"]))
    for sweep in document["sweeps"]:
        caption = f"Decode speed, times plain, by {sweep['axis'] or 'what is left out'}. {SIMULATED}"
        yield Picture(f"sweep-{sweep['name']}", sweep["title"], caption, _sweep(sweep))
    if document["validation"] is not None:
        caption = "Each mark is a policy, an open one gave the costs; the band is 5% to either side of equal."
        yield Picture("validation", "Simulated against measured speed-up", caption, _validation(document["validation"]))


def _policies(rows: list[Mapping[str, Any]]) -> Figure:
    rows = [row for row in rows if row["policy"] != "plain"] or rows
    names = [style.shortened(row["policy"]) for row in rows]
    made = style.figure(0.6 + style.LINE * len(rows))
    axes = style.axes(made, left=0.12 + style.label_width(names), bottom=0.4)
    for place, row in enumerate(rows):
        colour = style.SERIES[0] if row["policy"].startswith("edgespec") else style.MUTED
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=1.2)
        axes.plot([row["speedup"]], [place], "o", color=colour, markersize=4)
    axes.axvline(1.0, color=style.GRID, zorder=0)
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("times plain")
    return made


def _sweep(found: Mapping[str, Any]) -> Figure:
    lines = list(dict.fromkeys(point["line"] for point in found["points"]))
    values = list(dict.fromkeys(point["value"] for point in found["points"]))
    made = style.figure(2.4)
    axes = style.axes(made, left=0.4, right=style.label_width(lines, 1.3) + 0.1, bottom=0.42)
    ends = {}
    for number, line in enumerate(lines):
        points = [(values.index(p["value"]), p["row"]["speedup"]) for p in found["points"] if p["line"] == line]
        colour = style.SERIES[number % len(style.SERIES)]
        joined = not any(isinstance(value, str) for value in values)
        axes.plot(
            *zip(*points), color=colour, linestyle=style.DASHES[number % len(style.DASHES)] if joined else "none",
            marker=style.MARKERS[number % len(style.MARKERS)], markersize=4,
        )  # fmt: skip
        ends[style.shortened(line, 18)] = (points[-1][1], colour)
    axes.set_xticks(range(len(values)), [str(value).replace(" only", "\nonly") for value in values])
    axes.grid(axis="y")
    axes.set_xlabel(found["axis"])
    style.end_labels(axes, ends, axes.get_xlim()[1])
    return made


def _validation(found: Mapping[str, Any]) -> Figure:
    rows = found["rows"]
    values = [row[key] for row in rows for key in ("measured", "speedup")]
    low, high = min(values) * 0.96, max(values) * 1.04
    made = style.figure(3.2)
    axes = style.axes(made, left=0.5, right=1.2, bottom=0.42)
    ends = [low, high]
    axes.fill_between(
        ends, [v * (1 - found["within"]) for v in ends], [v * (1 + found["within"]) for v in ends],
        color=style.FAINT, linewidth=0,
    )  # fmt: skip
    axes.plot(ends, ends, color=style.GRID, linewidth=1)
    labels = {}
    for number, row in enumerate(rows):
        colour = style.SERIES[number % len(style.SERIES)]
        # Each time round the colours meet other markers, so that more arms than colours stay apart.
        marker = style.MARKERS[(number + number // len(style.SERIES)) % len(style.MARKERS)]
        filled = "none" if row["fitted"] else colour
        axes.plot([row["measured"]], [row["speedup"]], marker, color=colour, markerfacecolor=filled)
        labels[style.shortened(row["arm"], 16)] = (row["speedup"], colour)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("measured, times plain")
    axes.set_ylabel("simulated, times plain")
    style.end_labels(axes, labels, high)
    return made
