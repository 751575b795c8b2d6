"""`edgespec pull`: fetch a model, so that later commands need no network."""

from __future__ import annotations

import argparse
from typing import Any

from edgespec.cli.options import add_debug_flag
from edgespec.cli.runtime import LazyProgress, configured
from edgespec.cli.terminal import stdout

HELP = "fetch a model"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser("pull", help=HELP, description=HELP)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a name of the catalogue or a hub id (default: the configured model)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="check the sha256 of a file that is there; fetch it again if it differs"
    )
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML file")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    add_debug_flag(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Fetch the model and print its path, the only line on stdout."""
    from edgespec import catalog

    config = configured(args)
    with LazyProgress(enabled=not args.quiet) as progress:
        path = catalog.pull(args.model or config.model, verify=args.verify, home=config.home, progress=progress)
    stdout().line(str(path))
    return 0
