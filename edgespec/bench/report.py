"""How results look: JSON for programs, tables for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

UNKNOWN = "-"


def write_json(document: dict[str, Any], target: str, console_write: Any) -> None:
    """Write a document to a file, or for "-" to standard output."""
    text = json.dumps(document, indent=2, allow_nan=False)
    if target == "-":
        console_write(text + "\n")
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


def speed_tables(document: dict[str, Any], console: Console) -> None:
    """Print a speed document: contenders, ratios, equality, widths, warnings."""
    machine = document["machine"]
    console.print(f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads used", highlight=False)
    console.print(_contenders(document["rows"]))
    if document["ratios"]:
        console.print(_ratios(document["ratios"]))
    widths = {row["name"]: row["forward_ms_by_width"] for row in document["rows"] if row.get("forward_ms_by_width")}
    if widths:
        console.print(_widths(widths))
    for row in document["rows"]:
        for line in _notes(row):
            console.print(f"{row['name']}: {line}", highlight=False, markup=False)


def _contenders(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Tokens per second (medians)")
    table.add_column("contender", no_wrap=True)
    for heading in ("prefill", "domains", "copying", "prose", "first token", "peak memory"):
        table.add_column(heading, justify="right")
    table.add_column("status")
    for row in rows:
        groups = row.get("decode_by_group", {})
        seconds, memory = row.get("first_token_seconds"), row["peak_memory_bytes"]
        table.add_row(
            row["name"],
            _number(row["prefill_tokens_per_second"], 0),
            *(_number((groups.get(group) or {}).get("median"), 1) for group in ("domain", "copying", "prose")),
            f"{seconds * 1e3:.0f} ms" if seconds else UNKNOWN,
            f"{memory / 1e6:.0f} MB" if memory else UNKNOWN,
            row["status"],
        )
    return table


def _ratios(ratios: dict[str, float]) -> Table:
    table = Table(title="Ratios (median over pairs, lowest and highest pair)")
    table.add_column("ratio", no_wrap=True)
    for heading in ("median", "min", "max"):
        table.add_column(heading, justify="right")
    for name, value in ratios.items():
        if not name.endswith((" (min)", " (max)")):
            table.add_row(name, *(_number(v, 2) for v in (value, ratios[f"{name} (min)"], ratios[f"{name} (max)"])))
    return table


def _widths(widths: dict[str, dict[str, float]]) -> Table:
    table = Table(title="Milliseconds of one forward by tokens, at position 200")
    table.add_column("contender", no_wrap=True)
    columns = list(next(iter(widths.values())))
    for column in columns:
        table.add_column(column, justify="right")
    for name, by_width in widths.items():
        table.add_row(name, *(_number(by_width.get(column), 1) for column in columns))
    return table


def _notes(row: dict[str, Any]) -> list[str]:
    lines = [row["message"]] if row.get("message") else []
    lines += [f"failed: {f['prompt']} (repeat {f['repeat']}): {f['message']}" for f in row.get("failed", [])]
    if row.get("equality"):
        lines.append(_equality_line(row["equality"]))
    if row.get("bookkeeping_share") is not None:
        lines.append(f"outside the engine's own run: {row['bookkeeping_share']:.1%} of the decoding time")
    if row.get("acceptance_rate") is not None:
        per_forward = _number(row["tokens_per_forward"], 2)
        lines.append(
            f"{row['acceptance_rate']:.0%} of drafted tokens accepted, {per_forward} tokens per target forward"
        )
    if row.get("warm_start_seconds") is not None:
        lines.append(f"warm start of the whole process to its first token: {row['warm_start_seconds']:.2f} s")
    if row.get("warm_start_error"):
        lines.append(row["warm_start_error"])
    return lines + [f"warning: {warning}" for warning in row.get("warnings", [])]


def _equality_line(equality: dict[str, Any]) -> str:
    counts = ", ".join(f"{kind} {c['equal']}/{c['compared']}" for kind, c in equality["by_kind"].items())
    line = f"same tokens as {equality['reference']}: {counts}"
    if equality["near_ties"]:
        largest = max(d.get("gap", 0.0) for d in equality["differences"] if d["near_tie"])
        line += f"; {equality['near_ties']} differ at a near tie (largest gap {largest:.3g})"
    if equality["faults"]:
        line += f"; {equality['faults']} DIFFER WITHOUT A NEAR TIE"
    return line


def fidelity_table(document: dict[str, Any], console: Console) -> None:
    """Print a fidelity document."""
    table = Table(title=f"Against {document['reference']}, {document['positions']} positions")
    table.add_column("weights")
    for heading in ("KL mean", "KL max", "top-1 agreement", "cosine mean", "cosine min"):
        table.add_column(heading, justify="right")
    for row in document["rows"]:
        table.add_row(
            row["name"],
            f"{row['kl_mean']:.6f}",
            f"{row['kl_max']:.4f}",
            f"{row['top1_agreement']:.4f}",
            f"{row['cosine_mean']:.5f}",
            f"{row['cosine_min']:.4f}",
        )
    console.print(table)


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"
