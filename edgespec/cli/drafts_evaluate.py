"""`edgespec drafts evaluate`: how often every draft is right in every domain, and what that is worth here."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli import options
from edgespec.cli.runtime import LazyProgress, configured, engine_class
from edgespec.cli.terminal import stderr, stdout
from edgespec.errors import ConfigError, DraftError, PromptError

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig
    from edgespec.engine import Engine
    from edgespec.evaluation.prompts import Item
    from edgespec.evaluation.run import Evaluation
    from edgespec.evaluation.trajectories import TrajectoryStore

HELP = "measure every draft on prompts of every domain"
DESCRIPTION = (
    "Let the target answer the prompts plainly, then replay every draft on those answers: tokens accepted a round, "
    "acceptance by position, cost, and the speed that follows. Prompts: JSON lines with a 'prompt' each (the file's "
    "name is the domain), or Spec-Bench's questions (categories are domains)."
)
FAILED, INTERRUPTED = 1, 130
TABLE_WIDTH = 120  # where the output is no terminal
REFERENCE = "general"  # what others are compared with if it is there
MOST_GAMMA = 64
DOCUMENT, PICTURE = "evaluation.json", "heatmap.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of the command."""
    parser.add_argument("prompts", nargs="+", metavar="PROMPTS", help="prompt files (JSON lines)")
    parser.add_argument(
        "--drafts",
        action="append",
        metavar="NAMES",
        help="auto = all that fit the target (default), or names and paths with commas between; may be repeated",
    )
    parser.add_argument(
        "--gammas", type=_gammas, default=(1, 2, 3, 5), metavar="N,...", help="proposed tokens a round (1,2,3,5)"
    )
    parser.add_argument("-n", "--max-new-tokens", type=_count(2), default=128, metavar="N", help="longest answer (128)")
    parser.add_argument("--limit", type=_count(1), metavar="N", help="at most N prompts of each domain, evenly spread")
    parser.add_argument("--domain", metavar="NAME", help="the domain of all prompts, whatever their files say")
    parser.add_argument(
        "--turns", choices=("first", "all"), default="first", help="questions with several turns: the first, or all"
    )
    parser.add_argument("--floor", type=_chance, default=0.0, metavar="P", help="end blocks less likely than P (0)")
    parser.add_argument("--against", metavar="NAME", help=f"the draft to compare with ({REFERENCE}, if it is there)")
    parser.add_argument("--seed", type=_count(0), default=0, metavar="N", help="of the intervals (0)")
    parser.add_argument("--out", metavar="DIR", help="write evaluation.json and heatmap.png there")
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="where recorded answers are kept and reused (EDGESPEC_HOME/answers); off = nowhere",
    )
    parser.add_argument("--json", action="store_true", help="print the document instead of tables")
    group = parser.add_argument_group("engine")
    group.add_argument("-m", "--model", metavar="MODEL", help="a name of the catalogue, a folder, or a .gguf file")
    group.add_argument("--weight-format", metavar="FORMAT", help="exact (the file's own blocks), int8, or float32")
    group.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda, or torch-cpu (the float32 reference)")
    group.add_argument("--threads", type=_count(1), metavar="N", help="threads of the CPU engine")
    group.add_argument("--context", type=_count(1), metavar="N", help="longest conversation in tokens")
    group.add_argument("--memory-budget", metavar="SIZE", help="such as 1GiB or 80%%; what does not fit is refused")
    group.add_argument("--config", metavar="FILE", help="settings from a TOML file; flags go before it")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no warnings")
    options.add_debug_flag(parser)


def _count(least: int) -> Any:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"wants a whole number from {least} up, not '{text}'")
        return int(text)

    return convert


def _gammas(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_GAMMA for word in words):
        raise argparse.ArgumentTypeError(f"wants whole numbers from 1 to {MOST_GAMMA} such as 1,2,3,5, not '{text}'")
    return tuple(sorted({int(word) for word in words}))


def _chance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"wants a chance from 0 to below 1, not '{text}'")
    return value


def run(args: argparse.Namespace) -> int:
    """Evaluate and report; 1 if a draft could not be evaluated, 130 after Ctrl-C."""
    from edgespec.bench.machine import this_command
    from edgespec.evaluation.document import make_document
    from edgespec.evaluation.prompts import limited, read_prompts

    out = None if args.out is None else _output_folder(args.out)
    everything, skipped = read_prompts(args.prompts, domain=args.domain, all_turns=args.turns == "all")
    items = limited(everything, args.limit)
    config = configured_drafts(args)
    with LazyProgress(enabled=not args.quiet, message=f"loading {config.model} ...") as progress:
        engine = engine_class().from_pretrained(config=config, progress=progress)
    with engine:
        evaluation, store, failed = prepare(args, engine)
        _refuse_without_drafts(config, failed)
        against = reference(args.against, [row.name for row in evaluation.rows])
        try:
            _run_all(evaluation, items, quiet=args.quiet)
            costs = evaluation.measure() if evaluation.items else None
        except KeyboardInterrupt:
            kept = "" if store.folder is None else f"; recorded answers are kept in {store.folder} and used next time"
            stderr().line(f"interrupted after {len(evaluation.items)} of {len(items)} prompts{kept}")
            return INTERRUPTED
        if costs is None:
            raise PromptError(f"No prompt could be used. The first: {evaluation.skipped[0]}.")
        run_of = {"command": this_command(), "files": args.prompts, "turns": args.turns, "against": against}
        document = make_document(run_of, engine, evaluation, costs, store, failed, skipped)
    publish(document, args, out)
    return FAILED if any(draft["reason"] for draft in document["drafts"]) else 0


def configured_drafts(args: argparse.Namespace) -> RuntimeConfig:
    """The settings in force. Lookup is always among the drafts: it is a row, and goes in front of the others.

    There are no slots: who judges drafts loads all of them.
    """
    config = configured(args)
    names = _draft_names(args.drafts or ["auto"])
    return config.replace(
        drafts=names if names == "auto" else tuple(dict.fromkeys(("ngram", *names))), gamma=0, resident=0
    )


def _draft_names(values: Sequence[str]) -> str | list[str]:
    names: list[str] = []
    for value in values:
        names += [value] if Path(value).exists() else [word.strip() for word in value.split(",") if word.strip()]
    if not names or (("auto" in names or "off" in names) and len(names) > 1):
        raise ConfigError("--drafts wants auto alone, or names and paths of drafts.")
    if names == ["off"]:
        return []
    return "auto" if names == ["auto"] else names


def reference(wanted: str | None, rows: Sequence[str]) -> str | None:
    """The draft that others are compared with. ConfigError for one that is not evaluated."""
    if wanted is None:
        return REFERENCE if REFERENCE in rows else None
    if wanted not in rows:
        raise ConfigError(f"--against {wanted} is not among what is evaluated: {', '.join(rows)}.")
    return wanted


def _output_folder(name: str) -> Path:
    """The folder, made and seen to be writable before hours of work go into it."""
    from drafts.heatmap import HOW_TO_INSTALL, available

    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out {name} cannot be written: {error.strerror or error}.") from error
    if not available():
        stderr().line(f"There will be no heatmap.png: {HOW_TO_INSTALL}.")
    return folder


def prepare(args: argparse.Namespace, engine: Engine) -> tuple[Evaluation, TrajectoryStore, list[dict[str, Any]]]:
    """The evaluation of the drafts that loaded, where answers are kept, and the drafts that did not load."""
    from drafts.base import Loadable
    from drafts.load_now import load_now
    from drafts.recording import WINDOW
    from edgespec import catalog
    from edgespec.evaluation.document import answer_key, draft_entry
    from edgespec.evaluation.run import Evaluation, Settings
    from edgespec.evaluation.trajectories import TrajectoryStore

    session = engine.session()
    for status in session.statuses.values():
        if status.active and isinstance(status.draft, Loadable):
            try:
                load_now(status.draft)  # all at once, however few the configuration holds
            except Exception as error:
                status.failed(error)
                status.reason = status.reason or str(error)
    drafts = [status.draft for status in session.statuses.values() if status.active]
    domains = {info.name: info.domain for info in engine.draft_infos()}
    failed = [draft_entry(s.draft, domains[s.name], {}, s.reason) for s in session.statuses.values() if not s.active]
    windows = [status.window for status in session.statuses.values() if status.active]
    settings = Settings(
        gammas=args.gammas,
        max_new_tokens=args.max_new_tokens,
        floor=args.floor,
        seed=args.seed,
        window=max([WINDOW, *windows]),
    )
    folder = catalog.home(engine.config.home) / "answers" if args.cache is None else Path(args.cache).expanduser()
    store = TrajectoryStore(None if args.cache == "off" else folder, answer_key(engine, session, settings))
    return Evaluation(session, engine.encode, drafts, settings, store, domains=domains), store, failed


def _refuse_without_drafts(config: RuntimeConfig, failed: Sequence[dict[str, Any]]) -> None:
    """Minutes of answers are of no use if not one of the drafts that were named can be judged on them."""
    named = () if config.drafts == "auto" else tuple(name for name in config.drafts if name != "ngram")
    if named and len(failed) >= len(named):
        raise DraftError("; ".join(f"{draft['name']}: {draft['reason']}" for draft in failed))


def _run_all(evaluation: Evaluation, items: Sequence[Item], *, quiet: bool) -> None:
    """Every prompt, with a bar and the time that is left on a terminal, and a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from edgespec.bench.progress import Lines

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("{task.description}", markup=False),
    )
    if quiet or not console.is_terminal:
        lines = Lines(len(items), None if quiet else sys.stderr)
        for item in items:
            lines.say(f"{item.domain} {item.name}")
            evaluation.add(item)
            lines.advance(1)
        return
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=f"{item.domain} {item.name}"[:40])
            evaluation.add(item)
            bar.advance(task)


def publish(document: dict[str, Any], args: argparse.Namespace, out: Path | None) -> None:
    """Write the files and print the tables (or the document)."""
    from rich.console import Console

    from edgespec.evaluation.report import tables

    text = json.dumps(document, indent=1, allow_nan=False)
    written = [] if out is None else _write_files(document, text, out)
    if args.json:
        stdout().line(text)
    elif sys.stdout is not None:
        console = Console()
        tables(document, console if console.is_terminal else Console(width=TABLE_WIDTH))
    if written and not args.quiet:
        stderr().line(f"{out} has {' and '.join(written)}")


def _write_files(document: dict[str, Any], text: str, out: Path) -> list[str]:
    """Their names. Raises ConfigError."""
    from drafts.heatmap import available, draw
    from edgespec.evaluation.report import shown_gamma
    from edgespec.files import write_text

    try:
        write_text(out / DOCUMENT, text + "\n")
        if not available() or all(cell["draft"] == "plain" for cell in document["cells"]):
            return [DOCUMENT]
        draw(document, shown_gamma(document["parameters"]["gammas"]), out / PICTURE)
        return [DOCUMENT, PICTURE]
    except OSError as error:
        raise ConfigError(f"The results cannot be written to {out}: {error.strerror or error}.") from error
