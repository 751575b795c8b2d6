"""The report as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.bench.reporting import tables
from edgespec.bench.reporting.pictures import leading
from edgespec.bench.reporting.series import left_out
from edgespec.bench.reporting.tables import Table
from edgespec.bench.reporting.terminal import shown

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#!~&$])")


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line, and that a terminal may be shown."""
    return _SPECIAL.sub(r"\\\1", shown(" ".join(text.split())))


def markdown(document: Mapping[str, Any], title: str) -> str:
    """The whole report."""
    blocks = [f"# {escape(title)}", escape(tables.conditions(document))]
    for part in document["parts"]:
        if len(document["parts"]) > 1:
            blocks.append(f"## {escape(tables.machine(part['machine']))}")
        else:
            blocks.append(f"Measured on: {escape(tables.machine(part['machine']))}.")
        sentence = tables.headline(part, leading(part["arms"]))
        if sentence:
            blocks.append(f"**{escape(sentence)}**")
        blocks += mind(tables.warnings(part))
        blocks += [block(table) for table in tables.part_tables(part)]
        blocks += [escape(text) for text in left_out(part)]
    blocks.append("## What the figures mean")
    blocks.append(terms(document["definitions"]))
    others = (tables.settings(document), tables.runs(document), tables.skipped(document))
    blocks += [block(table) for table in others if table.rows]
    return "\n\n".join(blocks) + "\n"


def mind(warnings: Sequence[str]) -> list[str]:
    """What a reader must mind, as one block; none without warnings."""
    return ["Mind:\n\n" + "\n".join(f"- {escape(text)}" for text in warnings)] if warnings else []


def terms(definitions: Mapping[str, str]) -> str:
    """What words mean, as a list."""
    return "\n".join(f"- **{escape(name)}**: {escape(text)}" for name, text in definitions.items())


def block(table: Table, level: int = 3) -> str:
    """A table under a heading of that level; whatever stands in its cells is text."""
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    lines = ["| " + " | ".join(cell if cell == "---" else escape(cell) for cell in row) + " |" for row in rows]
    note = [f"\n{escape(table.note)}"] if table.note else []
    return "\n".join([f"{'#' * level} {escape(table.title)}\n", *lines, *note])
