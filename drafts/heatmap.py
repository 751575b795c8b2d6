"""The picture of an evaluation: drafts by domains, as a heat map in which every cell shows its number."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafts.evaluate import LOOKUP
from edgespec.errors import DraftError
from edgespec.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOW_TO_INSTALL = "the picture needs matplotlib; install it with: pip install 'edgespec[plots]'"

_WIDTH = 6.0  # inches; at 200 dots an inch still readable when a phone shows it 400 points wide
_DPI = 200
_ROW = 0.36
_SIZE = 10.0  # points, of the numbers
_COLOURS = "YlGnBu"  # from light to dark: its order is the same to readers with any colour blindness, and in grey
_DARKEST = 0.9  # of the scale that is used: what is beyond is nearly black
_CHARACTER = 0.083  # inches, about
_GAP = 0.34  # above a panel

Cell = Mapping[str, Any]


def draw(document: Mapping[str, Any], gamma: int, path: Path) -> None:
    """Write the picture of an evaluation's document (accepted tokens a round at `gamma`) as PNG.

    Raises DraftError if matplotlib is missing or there is nothing to show, OSError if the file cannot be written.
    """
    image = io.BytesIO()
    picture(document, gamma).savefig(image, format="png", dpi=_DPI, facecolor="white")
    write_bytes(path, image.getvalue())


def available() -> bool:
    """Whether pictures can be drawn here; nothing is imported."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def picture(document: Mapping[str, Any], gamma: int) -> Figure:
    """The figure: one panel for drafts alone, one with lookup in front of them, in one colour scale."""
    if not available():
        raise DraftError(HOW_TO_INSTALL)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = {(cell["draft"], cell["domain"]): cell for cell in document["cells"]}
    domains = list(dict.fromkeys(cell["domain"] for cell in document["cells"]))
    panels = _panels(list(dict.fromkeys(cell["draft"] for cell in document["cells"])))
    if not panels:
        raise DraftError("there is no draft to draw a picture of.")
    values = [_value(cell, gamma) for cell in cells.values()]
    top = max([1.0, *(value for value in values if value is not None)])
    own = {draft["name"]: own_domains(draft.get("domain")) for draft in document["drafts"]}

    rows = sum(len(names) for _, names in panels)
    top_margin = 0.66 + 0.6 * _CHARACTER * max(map(len, domains))
    height = top_margin + _GAP * len(panels) + _ROW * rows + 0.5
    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    left = _label_width([name for _, names in panels for name in names]) / _WIDTH
    at = height - top_margin
    for number, (title, names) in enumerate(panels):
        at -= _GAP + _ROW * len(names)
        box = (left, at / height, 0.98 - left, _ROW * len(names) / height)
        axes = figure.add_axes(box)
        table = [[_value(cells[(name, domain)], gamma) for domain in domains] for name in names]
        _panel(axes, table, names, domains, top, own, title, heading=number == 0)
    _captions(figure, document, gamma, height)
    return figure


def own_domains(domain: str | None) -> frozenset[str]:
    """The domains that a draft says it is for: one word, or several with commas, pluses or blanks between them."""
    return frozenset(word for word in re.split(r"[\s,;+/]+", domain or "") if word)


def _panels(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    alone = [name for name in names if not name.startswith(LOOKUP) and name != "plain"]
    hybrid = [name for name in names if name.startswith(LOOKUP)]
    return [(title, group) for title, group in (("draft alone", alone), ("lookup in front", hybrid)) if group]


def _value(cell: Cell, gamma: int) -> float | None:
    return cell["by_gamma"][str(gamma)]["accepted_per_round"]  # type: ignore[no-any-return]


def _shown(name: str) -> str:
    return "lookup only" if name == "ngram" else name.removeprefix(LOOKUP)


def _label_width(names: Sequence[str]) -> float:
    """Inches that the row names take, about."""
    return min(0.25 + _CHARACTER * max(len(_shown(name)) for name in names), 2.2)


def _panel(
    axes: Axes,
    table: Sequence[Sequence[float | None]],
    names: Sequence[str],
    domains: Sequence[str],
    top: float,
    own: Mapping[str, frozenset[str]],
    title: str,
    *,
    heading: bool,
) -> None:
    """One group of rows; the domains' names only above the first."""
    import numpy as np
    from matplotlib import colormaps

    colours = colormaps[_COLOURS]
    numbers = np.array([[np.nan if value is None else value for value in row] for row in table], float)
    axes.imshow(np.ma.masked_invalid(numbers), cmap=colours, vmin=0, vmax=top / _DARKEST, aspect="auto")
    best = [max((row[c] or 0.0 for row in table), default=0.0) for c in range(len(domains))]
    size = _SIZE if len(domains) <= 8 else max(_SIZE * 8 / len(domains), 6.0)
    for r, row in enumerate(table):
        for c, value in enumerate(row):
            if value is None:
                axes.text(c, r, "–", ha="center", va="center", fontsize=size, color="0.4")
                continue
            axes.text(
                c,
                r,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=size,
                color=_readable_on(colours(_DARKEST * value / top)[:3]),
                fontweight="bold" if value == best[c] and value > 0 else "normal",
            )
            if domains[c] in own.get(names[r], ()):
                _frame(axes, r, c)
    axes.set_yticks(range(len(names)), [_shown(name) for name in names], fontsize=_SIZE)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(domains)))
    axes.set_xticklabels(domains if heading else [], rotation=35, ha="left", rotation_mode="anchor", fontsize=_SIZE)
    axes.tick_params(length=0, pad=5)
    axes.set_xticks(np.arange(len(domains) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(names) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    axes.annotate(
        title,
        (0, 1),
        (-5, 5),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        color="0.3",
        fontsize=_SIZE,
    )


def _readable_on(colour: Sequence[float]) -> str:
    """Black or white, whichever has more contrast (as WCAG defines it; at least 4.5 to 1)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if luminance < 0.179 else "black"


def _frame(axes: Axes, row: int, column: int) -> None:
    from matplotlib.patches import Rectangle

    side = 0.92
    corner = (column - side / 2, row - side / 2)
    for colour, width in (("white", 4.0), ("black", 1.8)):  # seen on light and dark cells, without any colour
        axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=width))


def _captions(figure: Figure, document: Mapping[str, Any], gamma: int, height: float) -> None:
    target = document["target"]
    most = max(cell["prompts"] for cell in document["cells"])
    least = min(cell["prompts"] for cell in document["cells"])
    prompts = (f"{least} to {most}" if least != most else str(most)) + (" prompts" if most > 1 else " prompt")
    figure.text(
        0.02,
        1 - 0.12 / height,
        f"Draft tokens accepted a round, of {gamma} proposed",
        fontsize=_SIZE + 2,
        fontweight="bold",
        va="top",
    )
    figure.text(
        0.02,
        1 - 0.38 / height,
        f"{target['name']}, {target['weight_format']} weights; {prompts} a domain, greedy",
        fontsize=_SIZE - 1,
        color="0.3",
        va="top",
    )
    notes = "Frame: the draft's own domain. Bold: the best of its block in that domain."
    figure.text(0.02, 0.18 / height, notes, fontsize=_SIZE - 1.5, color="0.3", va="bottom")
