"""`edgespec drafts pull`: fetch the drafts of a set whose drafts are models on the Hugging Face hub."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.options import add_debug_flag
from edgespec.cli.report import size
from edgespec.cli.runtime import LazyProgress, configured
from edgespec.cli.terminal import stderr, stdout
from edgespec.errors import CatalogError

if TYPE_CHECKING:
    from drafts.hub_sets import Build, HubModel, HubSet
    from edgespec.config import RuntimeConfig

DESCRIPTION = """Fetch the drafts of a set whose drafts are models on the hub, so that --drafts auto finds them when
its target runs. Without SET, list the sets."""
FAILED = 1
_FREE_AFTER = 1 << 30  # of the disk, that a download leaves to everything else
_FREE_LICENCES = ("Apache-2.0", "MIT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("set", nargs="?", metavar="SET", help="the name of a set, or of its target")
    parser.add_argument("drafts", nargs="*", metavar="DRAFT", help="drafts of the set (default: all but optional ones)")
    parser.add_argument("--target", action="store_true", help="fetch the set's target too")
    parser.add_argument("--build", metavar="NAME", help="q4_0 or bf16 (default: q4_0 where there is one)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be fetched, and fetch nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML file")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no notes")
    add_debug_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Fetch, and print a line a model; 1 if one of them could not be fetched (the others are)."""
    from drafts import hub_sets
    from edgespec.config import nearest

    if args.set is None:
        return _list(hub_sets.hub_sets(), configured(args), as_json=args.json)
    found = hub_sets.find(args.set)
    if found is None:
        known = nearest(args.set.lower(), [each.name for each in hub_sets.hub_sets()])
        raise CatalogError(f"there is no set {args.set!r} on the hub: {known} (edgespec drafts pull lists them)")
    wanted = _wanted(found, args)
    config = configured(args)
    if not args.quiet:
        _say_terms(wanted)
    if not args.dry_run:
        _check_disk(wanted, config)
    rows = [_fetch(model, build, config, args) for model, build in wanted]
    if args.json:
        stdout().line(json.dumps({"set": found.name, "models": rows}))
    return FAILED if any(row["error"] for row in rows) else 0


def _wanted(found: HubSet, args: argparse.Namespace) -> list[tuple[HubModel, Build]]:
    models = [*([found.target] if args.target else []), *found.chosen(args.drafts)]
    return [(model, _build(model, args.build)) for model in models]


def _build(model: HubModel, name: str | None) -> Build:
    """A build that is asked for must be there, except where the model has only one."""
    return model.build(None if len(model.builds) == 1 else name)


def _say_terms(wanted: Sequence[tuple[HubModel, Build]]) -> None:
    for model, build in wanted:
        if model.licence not in _FREE_LICENCES:
            stderr().line(f"{build.model}: licence {model.licence}; see {model.source}")
        if build.gated:
            stderr().line(f"{build.model}: accept its terms on its page on the hub, and set HF_TOKEN")


def _check_disk(wanted: Sequence[tuple[HubModel, Build]], config: RuntimeConfig) -> None:
    """Refuse a download that the disk cannot hold, before the first byte. What is here already counts as nothing."""
    from edgespec import catalog

    missing = [build for _, build in wanted if catalog.located(build.model, home=config.home) is None]
    need = sum(build.bytes for build in missing)
    folder = _hub_cache()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if need and need + _FREE_AFTER > free:
        raise CatalogError(
            f"{size(need)} would be fetched into {_hub_cache()}, whose disk has {size(free)} free; free some space, "
            "name fewer drafts, or set HF_HOME to a folder on another disk"
        )


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _fetch(model: HubModel, build: Build, config: RuntimeConfig, args: argparse.Namespace) -> dict[str, Any]:
    from edgespec import catalog

    row: dict[str, Any] = {"name": model.name, "model": build.model, "bytes": build.bytes, "path": None, "error": None}
    try:
        if args.dry_run:
            path = catalog.located(build.model, home=config.home)
        else:
            with LazyProgress(enabled=not args.quiet, message=f"fetching {build.model} ...") as progress:
                path = catalog.pull(build.model, home=config.home, progress=progress)
        row["path"] = None if path is None else str(path)
    except CatalogError as error:
        row["error"] = str(error)
        stderr().line(f"error: {error}")
    if not args.json and row["error"] is None:
        state = row["path"] or f"would be fetched ({size(build.bytes)})"
        stdout().line(f"{model.name}  {build.model}  {state}")
    return row


def _list(found: Sequence[HubSet], config: RuntimeConfig, *, as_json: bool) -> int:
    """All sets, and whether each fits what is free on this machine now."""
    from edgespec.cli.doctor_memory import set_fits

    fits = {fit.name: fit for fit in set_fits(config)}
    if as_json:
        rows = [{**_summary(each), "fits": fits[each.name].fits, "fit": fits[each.name].text} for each in found]
        stdout().line(json.dumps({"sets": rows}))
        return 0
    for each in found:
        stdout().line(f"{each.name}: {each.description}")
        stdout().line(f"  now {fits[each.name].text.partition(': ')[2]}")
        for row in _summary(each)["models"]:
            extra = ", optional" if row["optional"] else ""
            builds = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in row["builds"].items())
            stdout().line(f"  {row['name']:<{_width(each)}}  {builds}  ({row['licence']}{extra})")
    return 0


def _width(each: HubSet) -> int:
    return max(len(model.name) for model in (each.target, *each.drafts))


def _summary(each: HubSet) -> dict[str, Any]:
    models = [
        {
            "name": model.name,
            "domain": model.domain or None,
            "licence": model.licence,
            "optional": model.optional,
            "source": model.source,
            "builds": {build.name: build.bytes for build in model.builds.values()},
        }
        for model in (each.target, *each.drafts)
    ]
    return {"name": each.name, "description": each.description, "models": models}
