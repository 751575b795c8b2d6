"""How pictures look: as wide as a phone shows, colours that everybody tells apart, and the same in light and dark.

A picture is a matplotlib figure made inside `drawing()`. `svg` turns it into one piece of HTML whose colours are the
page's (`css`), so that a reader's dark mode needs no second picture; `png` is for looking at it. Colour is never the
only sign: lines also differ in dashes and have their name at the end, cells show their number.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOW_TO_INSTALL = "pictures need matplotlib; install it with: pip install 'edgespec[plots]'"

WIDTH = 4.0  # inches: at 400 points wide a point of type is 1.4 points high, which a phone shows readably
SIZE, SMALL, SMALLEST = 8.5, 7.5, 6.5  # points of type
LINE = 0.17  # inches from one row of type to the next
CHARACTER = 0.065  # inches of one character of SIZE, about

# Name -> (on light, on dark). The light ones also stand in the figures, each only once, and are replaced by the page's.
COLOURS = {
    "ink": ("#1b1f24", "#e6e8eb"),
    "muted": ("#5c6570", "#a4adb8"),
    "grid": ("#dce0e5", "#383f47"),
    "faint": ("#eef1f5", "#262c33"),
    "paper": ("#fefefe", "#14181d"),
    "blue": ("#0072b2", "#56a8e0"),
    "vermilion": ("#d55e00", "#f0803c"),
    "green": ("#00805d", "#2fbf94"),
    "purple": ("#a8528b", "#d896bd"),
    "orange": ("#b87f00", "#e9ae2b"),
    "sky": ("#3d94c7", "#8accf2"),
}
INK, MUTED, GRID, FAINT, PAPER = (COLOURS[name][0] for name in ("ink", "muted", "grid", "faint", "paper"))
# Okabe and Ito's colours, in light darkened where theirs are too pale for thin lines on white.
SERIES = tuple(COLOURS[name][0] for name in ("blue", "vermilion", "green", "purple", "orange", "sky"))
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
MARKERS = "osD^vP"

_CELLS = "YlGnBu"  # from light to dark: its order is the same to readers with any colour blindness, and in grey
_DARKEST = 0.9  # of the scale that is used: what is beyond is nearly black
_WHITE_FROM = 0.68  # of the scale: from here on white type has more contrast than black

_SETTINGS: Any = {
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": SIZE,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": SIZE,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": SIZE,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "svg.fonttype": "path",  # as drawn everywhere, whatever fonts a reader has
    "svg.hashsalt": "edgespec",  # the same picture is the same file
    "text.color": INK,
    "text.parse_math": False,  # a name with a $ in it is a name
    "text.usetex": False,
    "xtick.color": MUTED,
    "xtick.labelsize": SIZE,
    "xtick.major.size": 0,
    "ytick.color": INK,
    "ytick.labelsize": SIZE,
    "ytick.major.size": 0,
}


def available() -> bool:
    """Whether pictures can be drawn here; nothing is imported."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


@contextmanager
def drawing() -> Iterator[None]:
    """Everything about a picture, also its writing, happens in here. Raises ConfigError without matplotlib."""
    if not available():
        raise ConfigError(HOW_TO_INSTALL)
    from matplotlib import rc_context

    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        yield


def figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure of that many inches, without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height))
    FigureCanvasAgg(made)
    return made


def axes(figure: Figure, *, left: float = 0.1, right: float = 0.1, top: float = 0.1, bottom: float = 0.4) -> Axes:
    """The one pair of axes of a figure, with margins in inches."""
    width, height = figure.get_size_inches()
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure.add_axes(box)


def size(axes: Axes) -> tuple[float, float]:
    """Width and height of a pair of axes, in inches."""
    dpi = axes.figure.dpi
    return float(axes.bbox.width / dpi), float(axes.bbox.height / dpi)


def label_width(names: Sequence[str], most: float = 1.7) -> float:
    """Inches that these names take beside an axis, at most `most`."""
    return min(0.14 + CHARACTER * max(map(len, names), default=0), most)


def shortened(name: str, most: int = 24) -> str:
    """A name that fits: its middle goes, because the ends of policy specs tell them apart."""
    if len(name) <= most:
        return name
    tail = most // 3
    return f"{name[: most - tail - 1]}…{name[len(name) - tail :]}"


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels: near to where they belong, at least `gap` apart, within [low, high] if possible."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    found = list(places)
    for before, here in zip([None, *order], order):
        floor = low if before is None else found[before] + gap
        found[here] = max(found[here], floor)
    ceiling = high
    for here in reversed(order):
        found[here] = min(found[here], ceiling)
        ceiling = found[here] - gap
    return found


def end_labels(axes: Axes, ends: Mapping[str, tuple[float, str]], x: float) -> None:
    """Names at the right end of lines, none over another. ends: name -> (height of the line there, colour)."""
    low, high = axes.get_ylim()
    _, inches = size(axes)
    places = apart([y for y, _ in ends.values()], 0.145 / inches * (high - low), low, high)
    for (name, (_, colour)), y in zip(ends.items(), places):
        axes.annotate(
            name, (x, y), (4, 0), textcoords="offset points", color=colour, va="center", fontsize=SMALL,
            annotation_clip=False,
        )  # fmt: skip


def cells(
    axes: Axes,
    table: Sequence[Sequence[float | None]],
    form: str,
    top: float,
    bottom: float = 0.0,
    counts: Sequence[Sequence[int]] | None = None,
    least: int = 0,
) -> None:
    """A heat map in which every cell shows its number.

    form: how, as in "{:.0%}". top, bottom: the values of the darkest and of the lightest colour. counts: of how many
    each number is, which stands below it; a cell of fewer than `least` has no colour.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours = colormaps[_CELLS]
    for row, values in enumerate(table):
        for column, value in enumerate(values):
            count = None if counts is None else counts[row][column]
            level = None
            if value is not None and (count is None or count >= least):
                level = _DARKEST * min(max((value - bottom) / ((top - bottom) or 1.0), 0.0), 1.0)
            face = FAINT if level is None else colours(level)
            axes.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=face, linewidth=0))
            ink = MUTED if level is None else "white" if level >= _WHITE_FROM else "black"
            centred: Any = {"ha": "center", "va": "center", "color": ink}
            text = "–" if value is None else form.format(value)
            weight = "bold" if count else "normal"
            axes.text(column, row - (0.17 if count else 0.0), text, fontsize=SMALL, fontweight=weight, **centred)
            if count:
                axes.text(column, row + 0.24, thousands(count), fontsize=SMALLEST, **centred)
    axes.set_xlim(-0.5, max(map(len, table), default=1) - 0.5)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.spines[:].set_visible(False)


def thousands(count: float) -> str:
    """A count in at most four characters, from 0 to 999,499: "7", "950", "1.2k", "87k"."""
    if count < 999.5:
        return f"{count:.0f}"
    return f"{count / 1e3:.1f}k" if count < 9950 else f"{count / 1e3:.0f}k"


def png(figure: Figure, pixels: int = 400) -> bytes:
    """The picture on white, that many pixels wide."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=pixels / figure.get_size_inches()[0], facecolor="white")
    return image.getvalue()


def svg(figure: Figure, name: str, title: str) -> str:
    """The picture as an <svg> element for a page with `css`. name: makes its ids the only ones on the page."""
    image = io.StringIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    text = image.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)  # the texts that are drawn, once more
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', text)
    for colour, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{colour})")
    head, rest = text.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(title, quote=True)}">{rest}'.strip()


def css() -> str:
    """The colours as the page's variables, for light and for dark."""
    light, dark = ("".join(f"--{name}:{pair[side]};" for name, pair in COLOURS.items()) for side in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
