"""The report's pictures along a run: a time line, regret, memory. Call inside `style.drawing()`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.bench.reporting import style
from edgespec.bench.reporting.pairs import fixed
from edgespec.bench.reporting.pictures import Picture, leading
from edgespec.bench.specbench.folder import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELLED = len(style.SERIES)  # lines with a colour and a name of their own
_ROW = 0.27  # inches of a draft on the time line
_OFF = 2.5  # plain's regret is left out of the picture where it is so many times the next one


def time_lines(part: Mapping[str, Any]) -> Iterator[Picture]:
    """The stretch of the leading policy, or of the first that has one."""
    known = part["time_lines"]
    name = leading(part["arms"])
    if name not in known:
        name = next(iter(known), None)
    if name is None:
        return
    stretch = known[name]
    rows = _rows(stretch)
    height = 0.22 + _ROW * len(rows) + 0.4
    figure = style.figure(height)
    axes = style.axes(figure, left=style.label_width([_shown(row) for row in rows]), right=0.08, top=0.22, bottom=0.4)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, stretch["seconds"] or 1.0)
    axes.set_yticks(range(len(rows)), [_shown(row) for row in rows])
    axes.set_xlabel("seconds")
    axes.spines[:].set_visible(False)
    _answers(axes, stretch, len(rows))
    _working_set(axes, stretch, rows)
    _rounds(axes, stretch, rows)
    yield Picture(
        "time-line",
        f"A stretch of {name}: which draft ran, what was in memory, what was loaded",
        "Light bar: the draft is in memory; hatched: it is being loaded, beside the rounds. Blue: a round in which "
        "some of its tokens were accepted; orange: none were; grey: no draft proposed. Numbers: answers, with their "
        "domains; their first, empty part is the reading of the prompt. What passed between answers is cut out.",
        figure,
    )


def _rows(stretch: Mapping[str, Any]) -> list[str]:
    """Drafts with weights as they come, then ngram, then plain."""
    spans = stretch["resident"]
    drafts = [load[3] for load in stretch["loads"] if load[2] == "load"] + [r[2] for r in stretch["rounds"] if r[2]]
    names = sorted((n for n in spans if spans[n] and n != "ngram"), key=lambda n: spans[n][0][0])
    names = list(dict.fromkeys([*names, *(draft for draft in drafts if draft != "ngram")]))
    free = [name for name in ("ngram",) if name in drafts]
    return [*names, *free, PLAIN]


def _shown(row: str) -> str:
    return style.shortened(row, 16)


def _answers(axes: Axes, stretch: Mapping[str, Any], rows: int) -> None:
    inches, _ = style.size(axes)
    for number, (begin, end, label) in enumerate(stretch["answers"]):
        axes.axvline(begin, color=style.GRID, linewidth=1.0, zorder=0)
        room = int((end - begin) / (stretch["seconds"] or 1.0) * inches / style.CHARACTER) - 3
        text = (
            f"{number + 1} {style.shortened(label, room)}" if label and room >= min(4, len(label)) else f"{number + 1}"
        )
        axes.annotate(text, (begin, -0.5), (2, 3), textcoords="offset points", fontsize=style.SMALL, color=style.MUTED)


def _working_set(axes: Axes, stretch: Mapping[str, Any], rows: Sequence[str]) -> None:
    for draft, spans in stretch["resident"].items():
        if draft in rows and draft != "ngram":
            for begin, end in spans:
                axes.broken_barh(
                    [(begin, end - begin)], (rows.index(draft) - 0.42, 0.84), color=style.GRID, linewidth=0
                )
    for begin, end, kind, draft, _ in stretch["loads"]:
        if kind == "load" and draft in rows:
            axes.broken_barh(
                [(begin, end - begin)], (rows.index(draft) - 0.42, 0.84), facecolor="none", hatch="//////",
                edgecolor=style.SERIES[1], linewidth=0.8,
            )  # fmt: skip


def _rounds(axes: Axes, stretch: Mapping[str, Any], rows: Sequence[str]) -> None:
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for begin, end, draft, _, accepted in stretch["rounds"]:
        colour = style.MUTED if draft is None else style.SERIES[0] if accepted else style.SERIES[4]
        bars.setdefault((draft or PLAIN, colour), []).append((begin, end - begin))
    for (row, colour), spans in bars.items():
        axes.broken_barh(spans, (rows.index(row) - 0.26, 0.52), color=colour, linewidth=0)


def regret(part: Mapping[str, Any]) -> Iterator[Picture]:
    """One line a policy, level with the best fixed arm or below it; plain only where it does not flatten the others."""
    found = part["regret"]
    if found is None or len(found["questions"]) < 2:
        return
    arms, best = dict(found["arms"]), found["best_fixed"]
    plain = arms.pop(PLAIN)
    off = plain[-1] > _OFF * max(abs(seconds) for line in arms.values() for seconds in line)
    if not off:
        arms[PLAIN] = plain
    taken = found["plain_seconds"] - plain[-1]
    caption = (
        f"Seconds of decoding beyond those of {best}, the best fixed arm in hindsight (the level line, {taken:.3g} s "
        "in all), added up question by question; lower is better, below 0 is faster. Along plain's tokens, one a "
        f"round, in the {len(found['questions'])} questions that all policies answered"
    )
    caption += f". Plain lost {plain[-1]:.3g} s, beyond the picture." if off else "."
    axes = _axes(figure := style.figure(2.8))
    lines = {name: list(zip([0, *found["tokens"]], [0.0, *line])) for name, line in arms.items()}
    _lines(axes, lines, part, _signed, keep=(best,))
    axes.xaxis.set_major_formatter(lambda tokens, place: style.thousands(tokens))
    axes.set_xlabel("tokens")
    axes.set_title("seconds", loc="left", color=style.MUTED)
    yield Picture("regret", "Regret over the tokens", caption, figure)


def _signed(seconds: float) -> str:
    digits = 2 if abs(seconds) < 1 else 1 if abs(seconds) < 100 else 0
    return f"{seconds:+.{digits}f} s".replace("-", "\N{MINUS SIGN}") if seconds else "0 s"


def memory(part: Mapping[str, Any]) -> Iterator[Picture]:
    """One line an arm, along the clock of the run."""
    lines = {
        name: [(seconds, size / 2**20) for seconds, size in points]
        for name, points in part["memory"]["arms"].items()
        if len(points) > 1
    }
    if not lines:
        return
    axes = _axes(figure := style.figure(2.8))
    _lines(axes, lines, part, "{:.0f}".format)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of the run")
    axes.set_title("MiB", loc="left", color=style.MUTED)
    caption = "Resident memory of each arm's own process after each of its turns. The axis does not begin at 0."
    for begin in part["memory"]["begins"][1:]:
        axes.axvline(begin, color=style.MUTED, linewidth=0.7, zorder=0)
    if len(part["memory"]["begins"]) > 1:
        caption += " At a vertical line all processes were started anew: a --resume, or another shard."
    yield Picture("memory", "Memory over time", caption, figure)


def _axes(figure: Figure) -> Axes:
    """For lines with their names at the right; as few ticks as have room on a phone."""
    axes = style.axes(figure, left=0.4, right=1.45, top=0.27, bottom=0.4)
    axes.locator_params(axis="x", nbins=4)
    return axes


def _lines(
    axes: Axes,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    part: Mapping[str, Any],
    form: Callable[[float], str],
    keep: Collection[str] = (),
) -> None:
    """Lines with their names and last values at the right; the least interesting ones thin, grey and nameless.

    form: how the last value is shown. keep: lines that have a name, whatever else there is.
    """
    arms = part["arms"]

    def dull(name: str) -> tuple[bool, bool, bool, bool, float]:
        peer = arms[name]["kind"] == "peer"
        return name != leading(arms), name not in keep, fixed(name), peer, lines[name][-1][1]

    named = sorted(sorted(lines, key=dull)[:_LABELLED], key=lambda name: _place(name, arms))
    ends: dict[str, tuple[float, str]] = {}
    for name in sorted(lines, key=lambda name: name in named):
        xs, ys = zip(*lines[name])
        if name not in named:
            axes.plot(xs, ys, color=style.MUTED, linewidth=0.7, alpha=0.6)
            continue
        place = named.index(name)
        colour = style.SERIES[place]
        dash = style.DASHES[place]
        axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=2.0 if place == 0 else 1.4)
        ends[name] = ys[-1], colour
    axes.grid(axis="y")
    axes.margins(x=0)
    labels = {f"{style.shortened(name, 17)} {form(y)}": (y, colour) for name, (y, colour) in ends.items()}
    style.end_labels(axes, labels, axes.get_xlim()[1])


def _place(name: str, arms: Mapping[str, Any]) -> tuple[bool, bool, bool, int]:
    """So that an arm has the same colour in every picture, whether or not plain and other engines are in it."""
    return name != leading(arms), arms[name]["kind"] == "peer", name == PLAIN, list(arms).index(name)
