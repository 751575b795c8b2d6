"""The pictures of a load run, in the reports' style. Call inside `style.drawing()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.bench.load.compare import NONE, is_fixed
from edgespec.bench.reporting import style
from edgespec.bench.reporting.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Document = Mapping[str, Any]
PINNED = " pinned"
_RIGHT = 1.3  # inches for names at the ends of lines

_Lines = list[tuple[str, str]]  # (key of a series, label)
_Panel = tuple[Mapping[str, Any], str, _Lines]  # a series, the panel's title, what of it is drawn
_PANELS: list[tuple[str, _Lines]] = [
    ("requests", [("sequences", "running"), ("queued", "queued")]),
    ("gamma", [("gamma", "gamma")]),
    ("KV blocks free", [("kv_free", "free")]),
    ("drafts in memory", [("resident", "drafts")]),
]


def pictures(document: Document) -> Iterator[tuple[str, Picture]]:
    """(heading, picture) of all that the document has something for."""
    told = "Simulated. " if document["simulated"] else ""
    for heading, draw in _DRAWN:
        for picture in draw(document):
            yield heading, picture._replace(caption=told + picture.caption)


def leading(arms: Sequence[str]) -> str:
    """The arm to show where there is room for one: ours, else the last that is neither fixed nor plain."""
    learning = [arm for arm in arms if not is_fixed(arm) and not arm.startswith(NONE)]
    return "edgespec" if "edgespec" in learning else (learning or list(arms))[-1]


def _throughput(document: Document) -> Iterator[Picture]:
    if len(document["rates"]) > 1:
        caption = "Tokens per loaded second; bars: intervals over repeats."
        made = over_rates(document, lambda entry: entry["throughput"], "tokens/s")
        yield Picture("throughput", "Throughput by requests a second", caption, made)
    compared = document["to_none"]
    if compared is None or len(document["arms"]) < 2:
        return
    arms = [arm for arm in document["arms"] if arm != compared["reference"]]
    rates = [f"{rate:g}" for rate in document["rates"]]
    table = [[compared["arms"][arm]["by_rate"][rate]["value"] for rate in rates] for arm in arms]
    values = [value for row in table for value in row if value is not None]
    if values:
        made = _map(table, arms, rates, "{:.2f}", max(values), min(values))
        yield Picture(
            "to-none",
            "Throughput, times no speculation",
            "Columns: requests a second. Pairs of the same arrivals.",
            made,
        )


def _map(
    table: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], form: str, top: float,
    bottom: float,
) -> Figure:  # fmt: skip
    names = [style.shortened(row, 20) for row in rows]
    figure = style.figure(0.35 + 0.24 * len(rows))
    axes = style.axes(figure, left=style.label_width(names), right=0.05, top=0.05, bottom=0.3)
    style.cells(axes, table, form, top, bottom)
    axes.set_yticks(range(len(rows)), names)
    axes.set_xticks(range(len(columns)), columns)
    return figure


def _latencies(document: Document) -> Iterator[Picture]:
    top = max(document["rates"], default=0.0)
    for name, words in (("ttft", "Time to the first token"), ("tpot", "Time per token after it")):
        entries = [e for e in document["table"] if e["rate"] == top and e[name]["p50"]["value"] is not None]
        if entries:
            caption = "Dot: median, ring: 95 of 100, bar: 99 of 100 are faster; without one, too few ended in time."
            made = _spans(entries, name)
            yield Picture(f"{name}-spans", f"{words} at {top:g} requests a second", caption, made)
    if len(document["rates"]) > 1:
        made = over_rates(document, lambda entry: entry["ttft"]["p95"], "seconds", log=True)
        yield Picture("ttft", "Time to the first token, 95th percentile", "By requests a second, on a log scale.", made)
        made = over_rates(document, lambda entry: entry["goodput_share"], "share in time", top=1.03)
        limit = document["deadline"]
        caption = f"First token within {limit['ttft_s']:g} s, {limit['tpot_s']:g} s for each token after it."
        yield Picture("goodput", "Requests that kept the deadline", caption, made)


def _spans(entries: Sequence[Mapping[str, Any]], name: str) -> Figure:
    """A row for each arm, on a log scale where values lie far apart. "tpot" in milliseconds."""
    scale, unit = (1e3, "milliseconds") if name == "tpot" else (1.0, "seconds")
    labels = [style.shortened(entry["arm"], 20) for entry in entries]
    figure = style.figure(0.5 + 0.2 * len(entries))
    axes = style.axes(figure, left=style.label_width(labels), right=0.15, top=0.08, bottom=0.42)
    ours, every = leading([entry["arm"] for entry in entries]), []
    for row, entry in enumerate(entries):
        colour = style.SERIES[0] if entry["arm"] == ours else style.MUTED
        places = [entry[name][key]["value"] for key in ("p50", "p95", "p99")]
        known = [max(scale * value, 1e-3) for value in places if value is not None]
        every += known
        axes.plot(known, [row] * len(known), color=colour, linewidth=1.4)
        for value, marker, face in zip(known, "oo|", (colour, style.PAPER, colour)):
            axes.plot([value], [row], marker, color=colour, markerfacecolor=face, markersize=5 if marker == "o" else 8)
    if max(every) > 5 * min(every):
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis)
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.set_yticks(range(len(entries)), labels)
    axes.set_ylim(len(entries) - 0.5, -0.5)
    axes.set_xlabel(unit)
    axes.grid(axis="x")
    return figure


def _plain_numbers(axis: Any) -> None:
    """1, 2 and 5 of each power of ten, as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def over_rates(
    document: Document, value_of: Callable[[Mapping[str, Any]], Mapping[str, Any]], label: str, *, log: bool = False,
    top: float | None = None, axis: str = "requests a second",
) -> Figure:  # fmt: skip
    """A line for every arm over the rates, with intervals; ours thick, fixed ones thin and grey."""
    arms, rates = document["arms"], document["rates"]
    figure = style.figure(2.9)
    axes = style.axes(figure, left=0.48, right=_RIGHT, top=0.3, bottom=0.42)
    ours, coloured, ends = leading(arms), [arm for arm in arms if not is_fixed(arm)], {}
    for arm in arms:
        entries = [(e["rate"], value_of(e)) for e in document["table"] if e["arm"] == arm]
        points = [(rates.index(rate), found) for rate, found in entries if found["value"] is not None]
        if not points:
            continue
        number = coloured.index(arm) % len(style.SERIES) if arm in coloured else 0
        colour = style.SERIES[number] if arm in coloured else style.MUTED
        dash = style.DASHES[number] if arm in coloured else style.DASHES[arms.index(arm) % len(style.DASHES)]
        width = 2.2 if arm == ours else 1.3 if arm in coloured else 0.8
        axes.plot(
            [x for x, _ in points], [f["value"] for _, f in points], color=colour, linestyle=dash, linewidth=width
        )
        beside = 0.03 * (arms.index(arm) - len(arms) / 2)  # so that no bar hides another
        for x, found in points:
            if found["low"] is not None:
                axes.plot([x + beside] * 2, [found["low"], found["high"]], color=colour, linewidth=0.8)
        ends[style.shortened(arm, 16)] = (points[-1][1]["value"], colour)
    if log:
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis)
    else:
        axes.set_ylim(bottom=0, top=top)
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_xlabel(axis)
    axes.set_title(label, loc="left", color=style.MUTED)
    axes.grid(axis="y")
    axes.margins(x=0.02)
    _end_labels(axes, ends)
    return figure


def _end_labels(axes: Axes, ends: Mapping[str, tuple[float, str]]) -> None:
    """As `style.end_labels`, also beside a log scale: places are found in shares of the axes' height."""
    _, inches = style.size(axes)
    to_share = axes.transData + axes.transAxes.inverted()
    x, low = axes.get_xlim()[0], axes.get_ylim()[0]
    heights = [float(to_share.transform((x, max(y, low)))[1]) for y, _ in ends.values()]
    for (name, (_, colour)), y in zip(ends.items(), style.apart(heights, 0.145 / inches, 0.0, 1.0)):
        axes.annotate(
            name, (1.0, y), (4, 0), xycoords="axes fraction", textcoords="offset points", color=colour, va="center",
            fontsize=style.SMALL, annotation_clip=False,
        )  # fmt: skip


def _over_time(document: Document) -> Iterator[Picture]:
    known = {found["arm"]: found for found in document["series"]}
    if not known:
        return
    name = leading(list(known))
    found = known[name]
    yield Picture(
        "over-time",
        f"{name} at {found['rate']:g} requests a second, over time",
        "Means of short pieces of time; gaps are idle. Grey: the warm-up, and what came after the last arrival. "
        "Triangles: drafts' memory becomes KV blocks (up) or drafts return (down).",
        _panels([(found, title, lines) for title, lines in _PANELS]),
    )
    choosing = [arm for arm in known if not is_fixed(arm) and not arm.startswith(NONE)]
    if document["parts"] and len(choosing) > 1:
        load = (found, f"requests with {name}", _PANELS[0][1])
        gammas: list[_Panel] = [(known[arm], f"gamma of {arm}", [("gamma", "gamma")]) for arm in choosing]
        top = max((gamma for arm in choosing for gamma in known[arm]["gamma"] if gamma is not None), default=1.0)
        yield Picture(
            "gammas",
            f"Gamma of the planners at {found['rate']:g} requests a second on average, over time",
            "The load is low, high, and low again. Means of short pieces of time; gaps are idle.",
            _panels([load, *gammas], 1.08 * top or 1.0),
        )


def _panels(panels: Sequence[_Panel], top_gamma: float | None = None) -> Figure:
    """Those with something in them, one under the other, on one time axis. top_gamma: of all panels with gammas."""
    panels = [panel for panel in panels if any(_known(panel[0][key]) for key, _ in panel[2])]
    longest = max((max(found["time"]) for found, _, _ in panels), default=1.0)
    each, gap, bottom = 0.85, 0.3, 0.42
    figure = style.figure(bottom + (each + gap) * len(panels))
    width, height = figure.get_size_inches()
    for number, (found, title, lines) in enumerate(panels):
        floor = height - (number + 1) * (each + gap)
        axes = figure.add_axes((0.42 / width, floor / height, (width - 0.42 - 0.75) / width, each / height))
        _panel(axes, found, title, lines, longest)
        if top_gamma is not None and lines[0][0] == "gamma":
            axes.set_ylim(0, top_gamma)
        if number < len(panels) - 1:
            axes.set_xticklabels([])
        else:
            axes.set_xlabel("seconds")
    return figure


def _known(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def _panel(axes: Axes, found: Mapping[str, Any], title: str, lines: _Lines, longest: float) -> None:
    """longest: seconds of the axis."""
    times, ends = found["time"], {}
    for number, (key, label) in enumerate(lines):
        values = [float("nan") if value is None else value for value in found[key]]
        colour = style.SERIES[number]
        axes.plot(times, values, color=colour, linestyle=style.DASHES[number], linewidth=1.2)
        known = [value for value in found[key] if value is not None]
        ends[label] = (known[-1], colour)
    axes.set_xlim(0, longest)
    top = max((v for key, _ in lines for v in found[key] if v is not None), default=1.0)
    axes.set_ylim(0, 1.05 if "kv_free" in dict(lines) else 1.08 * top or 1.0)
    begin, end = found["window"]
    for span in ((0.0, begin), (end, longest)):
        axes.axvspan(*span, color=style.FAINT, linewidth=0, zorder=0)
    if {"kv_free", "resident"} & set(dict(lines)):
        _events(axes, found["elastic"])
    axes.set_title(title, loc="left", color=style.MUTED, pad=3)
    axes.grid(axis="y")
    axes.locator_params(axis="y", nbins=3)
    _end_labels(axes, ends if len(lines) > 1 else {})


def _events(axes: Axes, events: Sequence[Sequence[Any]]) -> None:
    low, high = axes.get_ylim()
    for time, kind in events:
        returns = kind in ("return", "shrink")
        axes.plot([time], [low + 0.9 * (high - low)], "v" if returns else "^", color=style.SERIES[1], markersize=4)


def _elastic(document: Document) -> Iterator[Picture]:
    """Mean TTFT of arms that ran with drafts pinned, and without."""
    pairs = [arm for arm in document["arms"] if arm + PINNED in document["arms"]]
    if not pairs:
        return
    kept = {"table": document["table"], "rates": document["rates"]}
    arms = [name for arm in pairs[-3:] for name in (arm, arm + PINNED)]
    made = over_rates(kept | {"arms": arms}, lambda entry: entry["ttft"]["mean"], "seconds", log=True)
    caption = "Mean over requests; those still waiting count with what they had waited. By requests a second."
    yield Picture("elastic", "Time to the first token, elastic memory on and off", caption, made)


def _validation(document: Document) -> Iterator[Picture]:
    found = document["validation"]
    if found is None or not found["rows"]:
        return
    values = [row[key] for row in found["rows"] for key in ("measured", "simulated")]
    low, high = 0.95 * min(values), 1.05 * max(values)
    figure = style.figure(3.2)
    axes = style.axes(figure, left=0.5, right=_RIGHT, bottom=0.42)
    below, above = ([v * (1 + side * found["within"]) for v in (low, high)] for side in (-1, 1))
    axes.fill_between([low, high], below, above, color=style.FAINT, linewidth=0)
    axes.plot([low, high], [low, high], color=style.GRID, linewidth=1)
    arms, ends = list(dict.fromkeys(row["arm"] for row in found["rows"])), {}
    for number, arm in enumerate(arms):
        mine = [row for row in found["rows"] if row["arm"] == arm]
        colour = style.SERIES[number % len(style.SERIES)]
        marker = style.MARKERS[(number + number // len(style.SERIES)) % len(style.MARKERS)]
        axes.plot([r["measured"] for r in mine], [r["simulated"] for r in mine], marker, color=colour, markersize=4)
        ends[style.shortened(arm, 16)] = (max(r["simulated"] for r in mine), colour)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("measured, tokens/s")
    axes.set_ylabel("simulated, tokens/s")
    _end_labels(axes, ends)
    caption = f"Each mark is a planner at one rate; the band is {found['within']:.0%} to either side of equal."
    yield Picture("validation", "Simulated against measured throughput", caption, figure)


_DRAWN = (
    ("Throughput", _throughput),
    ("Latency", _latencies),
    ("Over time", _over_time),
    ("Elastic memory", _elastic),
    ("Validation", _validation),
)
