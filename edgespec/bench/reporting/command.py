"""`edgespec bench report`: from run folders to report.md, report.html and report.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgespec.bench.reporting import tables
from edgespec.bench.reporting.document import build
from edgespec.bench.reporting.html import html
from edgespec.bench.reporting.markdown import markdown
from edgespec.bench.reporting.pictures import leading
from edgespec.bench.reporting.terminal import shown
from edgespec.bench.specbench.folder import read_run
from edgespec.errors import ConfigError
from edgespec.files import write_text

HELP = "tables, pictures and all figures of one or several runs of 'bench specbench'"
DESCRIPTION = (
    "Write report.html (one file with everything in it), report.md and report.json (every figure). Folders of several "
    "shards are merged; folders of several machines with the same questions are shown beside each other."
)
FILES = ("report.html", "report.md", "report.json")
TABLE_WIDTH = 160  # where the output is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of the command."""
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folder of a run, or of each of its shards")
    parser.add_argument("--out", metavar="DIR", help="where the report goes (into DIR, if it is one)")
    parser.add_argument("--debug", action="store_true", help="log in detail, and show a traceback when something fails")


def run(args: argparse.Namespace) -> int:
    """Write the report and print the short table. 0, also for a run that is not finished."""
    if args.out is None and len(args.folders) > 1:
        raise ConfigError("These are several folders: say with --out where their report goes.")
    console = Console()
    publish(args.folders, args.out or args.folders[0], console if console.is_terminal else Console(width=TABLE_WIDTH))
    return 0


def publish(folders: Sequence[str | Path], out: str | Path, console: Console) -> dict[str, Any]:
    """Write the report of these runs into `out`, print its short table, and return its document.

    Raises ConfigError for damaged folders, folders that do not belong together, or an `out` that cannot be written.
    """
    document = build([read_run(folder) for folder in folders])
    name = str(document["settings"].get("model") or "a model")
    title = f"{name}: speculative decoding measured"
    whole = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    texts = dict(zip(FILES, (html(document, title), markdown(document, title), whole)))
    target = Path(out).expanduser()
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            write_text(target / file, text)
    except OSError as error:
        raise ConfigError(
            f"The report cannot be written to {target} ({error.strerror}): give --out another folder."
        ) from error
    show(document, console)
    console.print(Text(shown(f"{target / FILES[0]} has pictures and all tables, {FILES[2]} every figure.")))
    return document


def show(document: Mapping[str, Any], console: Console) -> None:
    """The short table of every part, with what a reader must mind."""

    def say(text: str) -> None:
        console.print(Text(shown(text)))

    say(tables.conditions(document))
    for part in document["parts"]:
        say(tables.machine(part["machine"]))
        summary = tables.summary(part)
        if summary.rows:
            table = Table(title=summary.title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
            for column in summary.columns:
                arm = column == "arm"  # whose names stay whole
                table.add_column(shown(column), justify="left" if arm else "right", overflow="fold", no_wrap=arm)
            for row in summary.rows:
                table.add_row(*(Text(shown(cell)) for cell in row))
            console.print(table)
            if summary.note:
                say(summary.note)
        for name, status, why in tables.absent(part).rows:
            say(f"{name}: {status}, {why}")
        for warning in tables.warnings(part):
            say(f"mind: {warning}")
        sentence = tables.headline(part, leading(part["arms"]))
        if sentence:
            say(sentence)
