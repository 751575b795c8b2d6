"""Writes a load run's report: load.json with every figure, report.md, and report.html with pictures."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from edgespec.bench.load.folder import DOCUMENT, Folder
from edgespec.bench.load.pictures import pictures
from edgespec.bench.load.tables import SIMULATED, all_tables
from edgespec.bench.reporting import style
from edgespec.bench.reporting.html import TEMPLATE
from edgespec.bench.reporting.markdown import block, escape, mind, terms
from edgespec.bench.reporting.pictures import Picture
from edgespec.bench.reporting.tables import Table
from edgespec.bench.words import counted

_log = logging.getLogger(__name__)

FILES = (DOCUMENT, "report.md", "report.html")
LEAST_REQUESTS = 5  # of a rate and planner, over its repeats: a ratio of less is that of single answers


Draw = Callable[[Mapping[str, Any]], Iterator[tuple[str, Picture]]]


def publish(
    document: Mapping[str, Any], folder: Folder, tables: Sequence[Table] | None = None, draw: Draw = pictures
) -> None:
    """Write all files. tables, draw: instead of those of an open load. Raises ConfigError if that cannot be done."""
    made = all_tables(document) if tables is None else list(tables)
    folder.write(DOCUMENT, json.dumps(document, indent=1, allow_nan=False) + "\n")
    folder.write("report.md", markdown(document, made))
    folder.write("report.html", html(document, made, draw))


def markdown(document: Mapping[str, Any], made: Sequence[Table]) -> str:
    """The tables, and what their words mean."""
    blocks = [f"# {escape(document['title'])}", escape(document["conditions"])]
    if document["headline"]:
        blocks.append(f"**{escape(document['headline'])}**")
    blocks += mind(document["warnings"])
    blocks += [block(table, level=2) for table in made]
    blocks.append(terms(document["definitions"]))
    blocks.append("## How it was run\n\n" + "\n".join(f"- {escape(k)}: {escape(v)}" for k, v in _settings(document)))
    return "\n\n".join(blocks) + "\n"


def html(document: Mapping[str, Any], made: Sequence[Table], draw: Draw = pictures) -> str:
    """One page that needs nothing else. Without matplotlib it has no pictures, and says so."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    part = {
        "machine": document["machine"],
        "headline": document["headline"],
        "warnings": document["warnings"],
        "pictures": drawn(document, draw) if style.available() else {},
        "tables": made,
        "left_out": [],
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=document["title"],
        conditions=document["conditions"],
        css=Markup(style.css()),
        parts=[part],
        definitions=document["definitions"],
        others=[Table("Settings", ["setting", "value"], _settings(document))],
        no_pictures="" if style.available() else style.HOW_TO_INSTALL,
    )


def _settings(document: Mapping[str, Any]) -> list[list[str]]:
    return [["command", document["command"]], *([name, str(v)] for name, v in document["settings"].items())]


def drawn(document: Mapping[str, Any], draw: Draw = pictures) -> dict[str, list[dict[str, Any]]]:
    """By heading, the pictures as SVG. If one cannot be drawn, it and those after it are left out, not the report."""
    found: dict[str, list[dict[str, Any]]] = {}
    with style.drawing():
        try:
            for heading, picture in draw(document):
                svg = style.svg(picture.figure, picture.name, picture.title)
                shown = {"title": picture.title, "caption": picture.caption, "svg": Markup(svg)}
                found.setdefault(heading, []).append(shown)
        except (ValueError, ArithmeticError, KeyError, TypeError) as error:
            _log.warning("pictures of the report are left out: %s: %s", type(error).__name__, error)
    return found


def headline(document: Mapping[str, Any]) -> str:
    """The one sentence that a reader takes home; "" where nothing is compared, or next to nothing was asked."""
    rows = document["verdicts"]
    row = next((row for row in rows if row["arm"] == "edgespec"), rows[-1] if rows else None)
    fewest = min((entry["requests"]["asked"] for entry in document.get("table", ())), default=LEAST_REQUESTS)
    if row is None or row["to_none"]["value"] is None or fewest < LEAST_REQUESTS:
        return ""
    text = f"{row['arm']}: {row['to_none']['value']:.2f} times the throughput of no speculation, mean over "
    text += counted(len(row["rates"]), "rate")
    if row["to_fixed"] is not None and row["to_fixed"]["value"] is not None:
        text += f"; {row['to_fixed']['value']:.2f} times that of {row['best_fixed']}"
        if len(row["fixed"]) > 1:  # other gammas were not asked
            text += f", the best of {', '.join(row['fixed'])}"
    return f"{SIMULATED} {text}." if document["simulated"] else f"{text}."
