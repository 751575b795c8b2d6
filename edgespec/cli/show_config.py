"""`edgespec config`: the settings in force and where each comes from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from edgespec.cli import options, runtime
from edgespec.cli.terminal import stdout

HELP = "show the settings in force and where each comes from"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser("config", help=HELP, description=HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_engine_flags(parser)
    options.add_serving_flags(parser)
    options.add_debug_flag(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print one line a setting; wrong ones are refused as they would be when the engine starts."""
    from edgespec import catalog

    output = stdout()
    settings = runtime.configured(args).describe()
    if args.json:
        output.line(json.dumps({row.key: {"value": _plain(row.value), "source": row.source} for row in settings}))
        return 0
    width = max(len(row.key) for row in settings)
    for row in settings:
        value = str(catalog.home(row.value)) if row.key == "home" else text(row.value)
        output.line(f"{row.key:<{width}} = {value}  ({row.source})")
    return 0


def changed_rows(args: argparse.Namespace) -> list[str]:
    """The settings that are not at their defaults, as text."""
    settings = runtime.configured(args).describe()
    return [f"{row.key} = {text(row.value)} ({row.source})" for row in settings if row.source != "default"]


def text(value: Any) -> str:
    """A setting's value as a person would type it."""
    if value is None:
        return "auto"
    if isinstance(value, tuple):
        return ", ".join(value) or "off"
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
