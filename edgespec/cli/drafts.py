"""`edgespec drafts`: list, show and verify the draft sets on this machine; the other actions are modules apart."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli import options, runtime
from edgespec.cli.terminal import Output, stdout
from edgespec.errors import CatalogError, DraftError, ModelError

if TYPE_CHECKING:
    from drafts.zoo import DraftSet, Entry, TargetFacts
    from edgespec.config import RuntimeConfig

_MOST_SOURCES = 12  # of the data that a draft was trained on
HELP = "list, show, verify, pull, train, evaluate and export drafts"
WRONG, USAGE = 1, 2
LATER = {
    "pull": "fetch the drafts of a set whose drafts are models on the hub",
    "train": "make drafts for a target from its own answers",
    "evaluate": "measure every draft on prompts of every domain",
    "export": "write a draft in the format of other programs",
}


def add_parser(subparsers: Any, chosen: Sequence[str]) -> argparse.ArgumentParser:
    """chosen: the action on the command line; the flags of the modules apart are only built for themselves."""
    parser: argparse.ArgumentParser = subparsers.add_parser("drafts", help=HELP, description=HELP)
    parser.set_defaults(run=lambda args: _help(parser), parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", parser_class=type(parser))
    for name, (add, run, text) in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        add(action)
        _shared_flags(action)
        action.set_defaults(run=run, parser=action)
    for name, text in LATER.items():
        if list(chosen) == [name]:
            module = importlib.import_module(f"edgespec.cli.drafts_{name}")
            action = actions.add_parser(
                name, help=text, description=getattr(module, "DESCRIPTION", getattr(module, "HELP", text))
            )
            module.add_arguments(action)
            action.set_defaults(run=module.run, parser=action)
        else:
            actions.add_parser(name, help=text)
    return parser


def _help(parser: argparse.ArgumentParser) -> int:
    stdout().write(parser.format_help())
    return USAGE


def _no_flags(parser: argparse.ArgumentParser) -> None:
    pass


def _one_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a draft of a set, or the path of its folder")


def _some_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="drafts or paths (default: all of this model)")
    parser.add_argument("--offline", action="store_true", help="look at the files only, without loading the model")


def _shared_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", metavar="DIR", help="look at the drafts in this folder alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_engine_flags(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no warnings")
    options.add_debug_flag(parser)
    parser.set_defaults(trace=None)


def run_list(args: argparse.Namespace) -> int:
    """A line a draft; 1 if one of them is damaged."""
    config, facts, note = surroundings(args)
    found = sets_of(args, config)
    rows = [_row(entry, facts) for each in found for entry in each.entries]
    unread = [each.problem for each in found if each.problem]
    output = stdout()
    if args.json:
        output.line(json.dumps({"drafts": rows, "unreadable": unread, "target": _target(config, facts)}))
    else:
        _print_rows(output, rows)
        for line in [*unread, *([note] if note else [])]:
            output.line(line)
    return WRONG if unread or any(row["state"].startswith("damaged") for row in rows) else 0


def run_show(args: argparse.Namespace) -> int:
    """Everything that is known of one draft; 1 if it is damaged."""
    config, facts, _ = surroundings(args)
    entry, output = preferred(find(args.name, sets_of(args, config)), facts), stdout()
    row = _row(entry, facts)
    if args.json:
        from drafts.manifest import as_data

        data = None if entry.manifest is None else as_data(entry.manifest)
        output.line(json.dumps({**row, "manifest": data}))
    else:
        for line in _description(entry, row):
            output.line(line)
    return WRONG if row["state"].startswith("damaged") else 0


def run_verify(args: argparse.Namespace) -> int:
    """Check the drafts named, or all of this model (others are skipped); 1 if one of them is not as it must be."""
    from edgespec.cli import drafts_verify

    return drafts_verify.run(args)


def find(name: str, found: Sequence[DraftSet]) -> list[Entry]:
    """The drafts that a name or path means. Raises DraftError with the known names if there is none."""
    from drafts.manifest import MANIFEST
    from drafts.zoo import read_entry

    entries = [entry for each in found for entry in each.entries if name in (entry.name, entry.folder.name)]
    path = Path(name).expanduser()
    if not entries and ((path / MANIFEST).exists() or "/" in name):
        return [read_entry(path)]
    if not entries:
        from edgespec.config import nearest

        if name == "ngram":
            raise DraftError("ngram looks the next words up in the conversation itself: it has no files to show")
        known = sorted({entry.name for each in found for entry in each.entries})
        hint = nearest(name, known) if known else "no draft set is on this machine"
        raise DraftError(f"there is no draft {name!r}: {hint}")
    return entries


def preferred(entries: Sequence[Entry], facts: TargetFacts | None) -> Entry:
    """Of the drafts that share a name, the first that is for this target, else the first."""
    for entry in entries:
        made = None if entry.manifest is None else entry.manifest.target
        if facts is not None and made is not None and made.is_for(facts.fingerprint, facts.model):
            return entry
    return entries[0]


def sets_of(args: argparse.Namespace, config: RuntimeConfig) -> list[DraftSet]:
    from drafts import zoo
    from drafts.manifest import MANIFEST
    from edgespec import catalog

    if args.set is None:
        return zoo.sets(catalog.home(config.home))
    folder = Path(args.set).expanduser()
    if not folder.is_dir():
        raise DraftError(f"{folder}: is no folder; give --set the folder of a draft set")
    if (folder / MANIFEST).exists():
        return [zoo.DraftSet(folder.absolute().parent, (zoo.read_entry(folder),))]
    found = zoo.read_set(folder)
    if not found.entries and not found.problem:
        raise DraftError(f"{folder}: holds no drafts (folders with a {MANIFEST}); give --set the folder of a set")
    return [found]


def surroundings(args: argparse.Namespace) -> tuple[RuntimeConfig, TargetFacts | None, str]:
    """The settings, what drafts must fit (None if the model is not here or cannot be read), and a note about that."""
    from edgespec.loading import target_facts

    config = runtime.configured(args)
    try:
        facts = target_facts(config)
    except (ModelError, CatalogError) as error:
        if args.model is not None:
            raise
        return config, None, f"The configured model cannot be read, so drafts are not compared with it: {error}"
    note = f"{config.model} is not on this machine (edgespec pull fetches it), so drafts are not compared with it."
    return config, facts, "" if facts is not None else note


def _target(config: RuntimeConfig, facts: TargetFacts | None) -> dict[str, Any]:
    return {"model": config.model, "fingerprint": None if facts is None else facts.fingerprint}


def _row(entry: Entry, facts: TargetFacts | None) -> dict[str, Any]:
    """One draft as plain values; tokens: accepted a round in its own domain at gamma 3, None if not measured."""
    m = entry.manifest
    own = None if m is None else m.acceptance.get(m.domain)
    return {
        "name": entry.name,
        "set": entry.set_name,
        "kind": None if m is None else m.kind,
        "domain": None if m is None else m.domain,
        "bytes": None if m is None else m.nbytes,
        "tokens": None if own is None else own.tokens,
        "low": None if own is None else own.low,
        "high": None if own is None else own.high,
        "target": None if m is None else m.target.name,
        "folder": str(entry.folder),
        "state": state(entry, facts),
    }


def state(entry: Entry, facts: TargetFacts | None) -> str:
    """ "ok", "for another target: ...", or "damaged: ...", told by the manifest and the lengths of the files."""
    from drafts import zoo

    if entry.manifest is None or entry.problem:
        return f"damaged: {entry.problem}"
    try:
        entry.manifest.verify(entry.folder, hashes=False)
    except (DraftError, OSError) as error:
        return f"damaged: {error}"
    if facts is None:
        return "ok"
    try:
        zoo.check(entry.manifest, facts)
    except DraftError as error:
        return f"for another target: {error}"
    return "ok"


def _print_rows(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        output.line("There is no draft set on this machine; edgespec drafts train makes one.")
        return
    head = ("NAME", "KIND", "DOMAIN", "MB", "ACCEPTED/ROUND", "TARGET", "STATE")
    table = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head) - 1)]
    for line in table:
        output.line("  ".join([*(f"{cell:<{width}}" for cell, width in zip(line, widths)), line[-1]]))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    size = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}"
    tokens = "-" if row["tokens"] is None else f"{row['tokens']:.2f}"
    return (row["name"], row["kind"] or "-", row["domain"] or "-", size, tokens, row["target"] or "-", row["state"])


def _description(entry: Entry, row: dict[str, Any]) -> list[str]:
    m = entry.manifest
    facts = [("name", row["name"]), ("state", row["state"]), ("folder", row["folder"])]
    if m is None:
        return _aligned(facts)
    if m.description:
        facts.append(("about", m.description.strip()))
    made = m.target
    facts += [
        ("kind", f"{m.kind}, {m.dtype}"),
        ("domain", m.domain),
        ("licence", m.licence),
        ("target", f"{made.name}: hidden size {made.hidden_size}, {made.vocab_size} rows of logits"),
        ("fingerprint", f"{made.fingerprint} (graph version {made.graph_version})"),
        ("model", made.model or "not known"),
        ("tokenizer", made.tokenizer),
    ]
    facts += [("file", f"{name}: {info.bytes} bytes, sha256 {info.sha256}") for name, info in m.files.items()]
    if m.architecture:
        facts.append(("architecture", ", ".join(f"{name} {value:g}" for name, value in m.architecture.items())))
    if m.confidence is not None:
        facts.append(("confidence", f"temperature {m.confidence.temperature:g}, error {m.confidence.error:.1%}"))
    with_formats = f" with {', '.join(made.measured_with)} weights" if made.measured_with else ""
    for domain, a in m.acceptance.items():
        interval = f"{a.tokens:.2f} accepted a round at gamma 3 (95%: {a.low:.2f} to {a.high:.2f}, {a.rounds} rounds)"
        facts.append(("measured", f"{domain}{with_formats}: first token {a.first:.0%}, {interval}"))
    return _aligned(facts + _origin(entry))


def _origin(entry: Entry) -> list[tuple[str, str]]:
    assert entry.manifest is not None
    rows = []
    t = entry.manifest.training
    if t is not None:
        versions = ", ".join(f"{name} {version}" for name, version in t.versions.items())
        start = f", from {t.start}" if t.start else ""
        detail = f"{t.tokens} tokens, {t.updates} updates, {t.seconds:.0f} s, seed {t.seed}{start}"
        rows += [("trained", f"{detail} ({versions})" if versions else detail), ("command", t.command)]
    sources = sorted(entry.manifest.data, key=lambda d: -d.prompts)
    rows += [("data", f"{d.source}: {d.prompts} prompts, {d.licence}") for d in sources[:_MOST_SOURCES]]
    rest = sources[_MOST_SOURCES:]
    more = f"and {len(rest)} more sources of {sum(d.prompts for d in rest)} prompts (--json has them all)"
    return [*rows, ("data", more)] if rest else rows


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {line}" for name, text in rows for line in text.splitlines() or [""]]


_ACTIONS = {
    "list": (_no_flags, run_list, "the drafts on this machine and their state"),
    "show": (_one_name, run_show, "all that is known of one draft"),
    "verify": (_some_names, run_verify, "check files, target and vocabulary, and try every draft for a few rounds"),
}
