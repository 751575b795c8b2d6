"""A ranker's figures as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_COLUMNS = {
    "top1": "top-1",
    "top2": "top-2",
    "top1_within_noise": "top-1, noise allowed",
    "top2_within_noise": "top-2, noise allowed",
    "tokens": "tokens",
    "regret": "regret",
    "calibration_error": "calibration",
    "bits": "bits",
}
_PLAIN = ("tokens", "calibration_error", "bits")


def tables(document: Mapping[str, Any], console: Console) -> None:
    """Print a document of `predictor.train.figures.evaluate`."""

    def say(text: str, **style: Any) -> None:
        console.print(text, highlight=False, markup=False, **style)

    seen = document.get("texts_it_has_seen", 0)
    left_out = f", {seen} that it was made with are left out" if seen else ""
    say(f"{document['texts']} texts that the ranker has not seen{left_out}; drafts: {', '.join(document['drafts'])}")
    groups: dict[str, Mapping[str, Any]] = {
        "By domain": {**document["by_domain"], "all": document["all"]},
        "By what the ranker sees": document["inputs"],
        "Trained apart, to see only a part": document.get("trained_apart", {}),
        "Rankings without a ranker": document["others"],
    }
    for title, rows in groups.items():
        if rows:
            say(f"\n{title}", style="bold")
            console.print(_table(rows))
    rates = (f"{n} {expected:.2f}/{seen:.2f}" for n, (expected, seen) in document["expected_and_seen"].items())
    say(f"\nFirst tokens right, expected and seen: {', '.join(rates)}")
    for name, column in _COLUMNS.items():
        say(f"{column}: {document['definitions'][name]}", style="dim")


def _table(rows: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("samples", justify="right")
    shown = {name: title for name, title in _COLUMNS.items() if any(name in row for row in rows.values())}
    for title in shown.values():
        table.add_column(title, justify="right")
    for label, row in rows.items():
        cells = [_cell(name, row.get(name)) for name in shown]
        table.add_row(label, f"{row['samples']:.0f}", *cells)
    return table


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if name in _PLAIN else f"{value:.1%}"
