"""The report's pictures: speed-ups with intervals, and drafts by domain. Call inside `style.drawing()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.bench.reporting import style
from edgespec.bench.reporting.draft_map import ordered
from edgespec.bench.reporting.pairs import fixed
from edgespec.bench.reporting.tables import of_questions
from edgespec.bench.specbench.folder import PLAIN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_DRAFT_MAPS = 4


class Picture(NamedTuple):
    """A figure with its words. name: of letters, digits and dashes, the only one of that name in a report."""

    name: str
    title: str
    caption: str
    figure: Figure


Arms = Mapping[str, Mapping[str, Any]]


def leading(arms: Arms) -> str | None:
    """The policy to show where there is room for one: ours, else the fastest that is not fixed."""
    known = [n for n, arm in arms.items() if arm["kind"] == "policy" and not fixed(n) and arm["speedup"]["value"]]
    if "edgespec" in known:
        return "edgespec"
    return max(known, key=lambda name: arms[name]["speedup"]["value"], default=None)


def speedups(part: Mapping[str, Any]) -> Iterator[Picture]:
    """One picture for all questions, then one a task, with one axis for all of them."""
    arms: Arms = part["arms"]
    names = [name for name, arm in arms.items() if name != PLAIN and arm["speedup"]["value"] is not None]
    names.sort(key=lambda name: -arms[name]["speedup"]["value"])
    if not names:
        return
    tasks = [task for task in part["by_task"] if len(part["by_task"]) > 1]
    ratios = [arms[name]["speedup"] for name in names]
    ratios += [arms[name]["by_task"][task] for name in names for task in tasks]
    ends = [1.0] + [r[key] for r in ratios for key in ("value", "low", "high") if r[key] is not None]
    span = (min(ends) - 0.05 * (max(ends) - min(ends)), max(ends) + 0.05 * (max(ends) - min(ends)) + 0.01)
    first = {name: arms[name]["speedup"] for name in names}
    most = max(ratio["questions"] for ratio in first.values())
    yield Picture(
        "speedup",
        f"Decode speed, times plain: {of_questions(most, part['asked'])}",
        "Dot: the ratio over these questions; line: its 95% interval, where there are enough of them. The grey "
        "vertical line is plain decoding. Filled dots are policies (grey: fixed ones), open diamonds other engines. In "
        "brackets: of how many questions, where of fewer.",
        _dots(first, span, arms, most),
    )
    for number, task in enumerate(tasks):
        of_task = {name: arms[name]["by_task"][task] for name in names}
        title = f"… in {task} ({part['by_task'][task]})"
        yield Picture(f"speedup-{number}", title, "", _dots(of_task, span, arms, part["by_task"][task]))


def _dots(ratios: Mapping[str, Mapping[str, Any]], span: tuple[float, float], arms: Arms, questions: int) -> Figure:
    """A row for each arm: dot, interval, and the number at the right. questions: of the heading."""
    labels = [_counted(name, ratio, questions) for name, ratio in ratios.items()]
    figure = style.figure(0.08 + style.LINE * len(ratios) + 0.32)
    left = style.label_width(labels)
    axes = style.axes(figure, left=left, right=0.42, top=0.08, bottom=0.32)
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    axes.set_xlim(*span)
    axes.grid(axis="x")
    axes.axvline(1.0, color=style.MUTED, linewidth=1.0)
    axes.spines["left"].set_visible(False)
    ours = leading(arms)
    for row, (name, ratio) in enumerate(ratios.items()):
        peer = arms[name]["kind"] == "peer"
        colour = style.SERIES[3] if peer else style.MUTED if fixed(name) else style.SERIES[0]
        value = ratio["value"]
        if value is not None:
            if ratio["low"] is not None:
                axes.plot([ratio["low"], ratio["high"]], [row, row], color=colour, linewidth=1.6, solid_capstyle="butt")
            face = style.PAPER if peer else colour
            axes.plot([value], [row], marker="D" if peer else "o", color=colour, markerfacecolor=face, markersize=4.5)
        text = "–" if value is None else f"{value:.2f}"
        weight = "bold" if name == ours else "normal"
        axes.annotate(
            text, (1, row), (27, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points", ha="right",
            va="center", color=style.INK, fontweight=weight, fontsize=style.SIZE,
        )  # fmt: skip
    axes.set_yticks(range(len(ratios)), labels)
    for label, name in zip(axes.get_yticklabels(), ratios):
        label.set_fontweight("bold" if name == ours else "normal")
    return figure


def _counted(name: str, ratio: Mapping[str, Any], questions: int) -> str:
    few = ratio["value"] is not None and ratio["questions"] != questions
    count = f" ({ratio['questions']})" if few else ""
    return style.shortened(name, 24 - len(count)) + count


def heat_maps(part: Mapping[str, Any]) -> Iterator[Picture]:
    """Acceptance of every draft in every domain, tokens a target step of every policy, and the drafts it used."""
    yield from _acceptance(part["draft_map"])
    arms: Arms = part["arms"]
    domains = list(part["by_domain"])
    drafted = [name for name, arm in arms.items() if arm.get("proposed_tokens")]
    table = [[arms[name]["by_domain"][domain]["tokens_per_round"] for domain in domains] for name in drafted]
    values = [value for row in table for value in row if value is not None]
    if values:
        form = "{:.2f}" if len(domains) <= 6 else "{:.1f}"
        yield Picture(
            "map-tokens-per-round",
            "Tokens a target step",
            "Rows: policies, columns: domains. What the speed by task does not tell: how much a policy's drafts were "
            "worth before their own time is taken off.",
            _map(table, drafted, domains, form, (1.0, max(values))),
        )
    learning = [name for name in drafted if not fixed(name)]
    learning.sort(key=lambda name: name != leading(arms))
    for number, name in enumerate(learning[:MOST_DRAFT_MAPS]):
        shares = {d: arms[name]["by_domain"][d]["draft_share"] for d in domains}
        drafts = ordered({draft for of_domain in shares.values() for draft in of_domain}, domains)
        if len(drafts) < 2:
            continue
        table = [[_scaled(shares[d].get(draft, 0.0 if shares[d] else None), 100) for d in domains] for draft in drafts]
        made = _map(table, drafts, domains, "{:.0f}", (0.0, 100.0))
        caption = "Rows: the draft that proposed (plain: none). Columns: domains; each adds up to 100."
        yield Picture(f"drafts-{number}", f"Drafts used by {name}, % of rounds", caption, made)


def _acceptance(found: Mapping[str, Any]) -> Iterator[Picture]:
    """First tokens, because the share of all tokens depends on how long the blocks were as well."""
    drafts, domains, least = found["drafts"], found["domains"], found["least_blocks"]
    if not drafts:
        return
    cells = [[of_draft.get(domain, {}) for domain in domains] for of_draft in drafts.values()]
    table = [[_scaled(cell.get("first_share"), 100) for cell in row] for row in cells]
    counts = [[cell.get("blocks", 0) for cell in row] for row in cells]
    yield Picture(
        "map-acceptance",
        "Acceptance by draft and domain, % of first tokens",
        "Rows: drafts, columns: domains. Bold: of 100 blocks, those whose first token the target took. Below: how many "
        f"blocks, of all policies together; without a colour, fewer than {least}. A draft has blocks where a policy "
        "chose it: the number says how it did there.",
        _map(table, list(drafts), domains, "{:.0f}", (0.0, 100.0), counts, least),
    )


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _map(
    table: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    form: str,
    bounds: tuple[float, float],
    counts: Sequence[Sequence[int]] | None = None,
    least: int = 0,
) -> Figure:
    left = style.label_width([style.shortened(row) for row in rows])
    heading = 0.1 + 0.75 * style.label_width([style.shortened(column, 14) for column in columns])
    height = heading + (0.2 if counts is None else 0.32) * len(rows) + 0.08
    figure = style.figure(height)
    # A few columns must not become doors: the cells keep their shape and the right side stays empty.
    right = max(0.3, style.WIDTH - left - 0.62 * len(columns))
    axes = style.axes(figure, left=left, right=right, top=heading, bottom=0.08)
    style.cells(axes, table, form, top=bounds[1], bottom=bounds[0], counts=counts, least=least)
    axes.set_yticks(range(len(rows)), [style.shortened(row) for row in rows])
    axes.xaxis.tick_top()
    axes.set_xticks(
        range(len(columns)), [style.shortened(column, 14) for column in columns], rotation=40, ha="left",
        rotation_mode="anchor", color=style.INK,
    )  # fmt: skip
    return figure
