"""The report as one HTML file that needs nothing else: its style, pictures and figures are inside."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from edgespec.bench.reporting import pictures, pictures_time, style, tables
from edgespec.bench.reporting.series import left_out

_log = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("report.html.jinja")
_DRAWN = (
    ("Speed", pictures.speedups),
    ("Drafts and domains", pictures.heat_maps),
    ("Time line", pictures_time.time_lines),
    ("Regret and memory", pictures_time.regret),
    ("Regret and memory", pictures_time.memory),
)


def html(document: Mapping[str, Any], title: str) -> str:
    """The whole report. Without matplotlib it has no pictures, and says so."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    parts = [
        {
            "machine": tables.machine(part["machine"]),
            "headline": tables.headline(part, pictures.leading(part["arms"])),
            "warnings": tables.warnings(part),
            "pictures": drawn(part, f"p{number}") if style.available() else {},
            "left_out": left_out(part),
            "tables": tables.part_tables(part),
        }
        for number, part in enumerate(document["parts"])
    ]
    others = [tables.settings(document), tables.runs(document), tables.skipped(document)]
    return template.render(
        title=title,
        conditions=tables.conditions(document),
        css=Markup(style.css()),
        parts=parts,
        definitions=document["definitions"],
        others=[table for table in others if table.rows],
        no_pictures="" if style.available() else style.HOW_TO_INSTALL,
    )


def drawn(part: Mapping[str, Any], prefix: str) -> dict[str, list[dict[str, Any]]]:
    """By heading, the pictures as SVG. One that cannot be drawn costs itself, not the report."""
    found: dict[str, list[dict[str, Any]]] = {}
    with style.drawing():
        for heading, draw in _DRAWN:
            try:
                for picture in draw(part):
                    svg = style.svg(picture.figure, f"{prefix}-{picture.name}", picture.title)
                    shown = {"title": picture.title, "caption": picture.caption, "svg": Markup(svg)}
                    found.setdefault(heading, []).append(shown)
            except (ValueError, ArithmeticError, KeyError, TypeError) as error:
                _log.warning("a picture of the report is left out: %s: %s", type(error).__name__, error)
    return found
