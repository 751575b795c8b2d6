"""Tables and texts of files for a terminal, which must not obey what is in them."""

from __future__ import annotations

from edgespec.bench.reporting.tables import Table


def shown(text: str) -> str:
    """The text with a question mark for whatever is not printed: escape sequences, line ends, bells."""
    return "".join(character if character.isprintable() else "?" for character in text)


def text(table: Table) -> str:
    """For a terminal of any width: columns under each other, the first to the left."""
    rows = [[shown(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    lines = [shown(table.title)]
    for row in rows:
        cells = [cell.ljust(w) if not place else cell.rjust(w) for place, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, shown(table.note)] if table.note else lines)
