"""The three kinds of live runs, from checked arguments to their folders: an open load, sessions, a soak."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bench.load import document as documents
from edgespec.bench.load import output, preparing, sessions, soak, tables
from edgespec.bench.load.folder import COSTS, SOAK, Folder
from edgespec.bench.load.measuring import Measured, Measuring
from edgespec.bench.load.schedule import parse_arms
from edgespec.bench.load.system import Arm, EngineSystem
from edgespec.bench.report import write_json
from edgespec.bench.reporting.tables import Table
from edgespec.bench.reporting.terminal import shown
from edgespec.bench.reporting.terminal import text as table_text
from edgespec.bench.words import counted, were
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig

FAILED, INTERRUPTED = 1, 130
_SOAK_PROMPTS = 10
_SOAK_LOAD = 0.7  # of what a full batch does: some wait, most of the time

Progress = Callable[[int], Any]
Say = Callable[[str], None]


@contextmanager
def _opened(config: RuntimeConfig, arm: Arm, out: Path) -> Iterator[tuple[Folder, EngineSystem]]:
    """The run's folder and its engine; both are closed at the end."""
    folder = Folder(out)
    with ExitStack() as stack:
        stack.callback(folder.close)
        system = EngineSystem(config, arm)
        stack.callback(system.close)
        yield folder, system


def open_load(args: argparse.Namespace, planners: Sequence[str], progress: Progress) -> int:
    """The same arrivals with one planner after the other."""
    schedule = preparing.schedule_of(args, args.planners or planners)
    out = Path(args.out).expanduser()
    config = preparing.config_of(args, out)
    with _opened(config, schedule.arms[0], out) as (folder, system):
        pool, skipped = preparing.read_pool(args, system.engine.encode, system.context)
        with progress(schedule.stretches) as (say, advance):
            measuring = Measuring(
                system, schedule, pool, exact=args.exact, say=say, advance=advance, keep=folder.keep
            )  # fmt: skip
            measured = measuring.run(alone=not args.no_alone)
        if measured.stretches:
            _keep_costs(folder, system)
        system.close()  # its memory is for the one that measures near ties
        if not measured.stretches:
            print("interrupted; nothing was measured", file=sys.stderr)
            return INTERRUPTED
        about = preparing.about(args, config, "Serving under load", skipped)
        document = _document(args, config, measured, about)
        output.publish(document, folder)
    tell(args, document, tables.short(document))
    if measured.stuck:
        print(f"{measured.stuck}; what was measured is in {out}", file=sys.stderr)
        return FAILED
    if measured.interrupted:
        print(f"interrupted; what was measured is in {out}", file=sys.stderr)
        return INTERRUPTED
    return FAILED if document["texts"]["faults"] else 0


def _document(
    args: argparse.Namespace, config: RuntimeConfig, measured: Measured, about: dict[str, Any]
) -> dict[str, Any]:
    texts = preparing.judge(config, measured.compared, measured.differences) | {
        "alone": measured.alone, "uncompared": measured.uncompared,
    }  # fmt: skip
    document = documents.build(measured.schedule, measured.stretches, args.deadline, about | {"texts": texts})
    if measured.left_out:
        lacking = f"{counted(measured.left_out, 'stretch', 'stretches')} {were(measured.left_out)} left out"
        document["warnings"].append(f"{lacking}: --most-minutes were over.")
    if measured.capacity is not None:
        full = measured.capacity
        document["settings"]["a full batch without speculation"] = (
            f"{full.tokens_per_second:.1f} tokens/s, {full.requests_per_second:.2f} requests/s of "
            f"{full.answer_tokens:.0f} tokens"
        )
    document["headline"] = output.headline(document)
    return document


def _keep_costs(folder: Folder, system: EngineSystem) -> None:
    """The measured seconds, for simulations of this run."""
    costs = system.costs()
    if costs is not None:
        folder.write(COSTS, json.dumps(costs, indent=1) + "\n")


def sessions_load(args: argparse.Namespace, planners: Sequence[str], progress: Progress) -> int:
    """So many conversations at once; 1 if a request was lost or failed."""
    preparing.check_planners(args.planners or planners)
    arms, counts = parse_arms(args.planners or planners, args.arms_elastic), args.sessions
    minutes = len(arms) * len(counts) * args.repeats * args.seconds / 60
    if minutes > args.most_minutes:
        raise ConfigError(f"This takes {minutes:.1f} minutes at least; --most-minutes allows {args.most_minutes:g}.")
    out = Path(args.out).expanduser()
    config = preparing.config_of(args, out)
    with _opened(config, arms[0], out) as (folder, system):
        pool, skipped = preparing.read_pool(args, system.engine.encode, system.context)
        with progress(len(arms) * len(counts) * args.repeats) as (say, advance):
            stretches = sessions.run(
                system, arms, counts, pool, repeats=args.repeats, seconds=args.seconds,
                warm_up=preparing.warm_up_of(args), limit_s=preparing.limit_of(args), exact=args.exact, say=say,
                advance=advance, keep=folder.keep,
            )  # fmt: skip
        document = sessions.build(stretches, preparing.about(args, config, "Sessions at once", skipped))
        document["headline"] = sessions.headline(document)
        made = [sessions.table(document)]
        output.publish(document, folder, made, sessions.pictures)
    tell(args, document, made)
    for stretch in stretches:
        if stretch.stuck:
            print(f"{stretch.stuck}; what was measured is in {out}", file=sys.stderr)
            return FAILED
    if any(stretch.interrupted for stretch in stretches):
        return INTERRUPTED
    return FAILED if any(entry["lost"] or entry["failed"] for entry in document["table"]) else 0


def soak_load(args: argparse.Namespace, say: Say) -> int:
    """A long mixed load; the exit code is the verdict's."""
    planners = args.planners or ["edgespec"]
    preparing.check_planners(planners)
    arm = parse_arms(planners, "on" if args.arms_elastic == "both" else args.arms_elastic)[0]
    out = Path(args.out).expanduser()
    config = preparing.config_of(args, out)
    tell_now: Say = (lambda text: None) if args.quiet else say
    with _opened(config, arm, out) as (folder, system):
        pool, skipped = preparing.read_pool(args, system.engine.encode, system.context)
        rate = args.rates[0] if args.rates else None
        if rate is None:
            tell_now("how much a full batch can do")
            rate = _SOAK_LOAD * Measuring(system, preparing.schedule_of(args, planners), pool).calibrate()
        system.use(arm)
        with (out / "stacks.txt").open("w") as stacks:
            made = soak.Soak(
                system, pool.each()[:_SOAK_PROMPTS], seconds=60 * args.soak, rate=rate, seed=args.seed, stacks=stacks,
                tell=tell_now,
            )  # fmt: skip
            soaked = made.run()
        system.close()
        texts = preparing.judge(config, soaked.compared, soaked.differences)
        findings = soak.verdict(soaked, texts["faults"])
        about = preparing.about(args, config, "Soak", skipped) | {"texts": texts, "rate": rate}
        document = soak.to_json(soaked, findings, about)
        folder.write(SOAK, json.dumps(document, indent=1, allow_nan=False) + "\n")
    for finding in findings:
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {shown(f'{finding.name}: {finding.detail}')}")
    word = "passed" if document["passed"] else "NOT passed"
    print(f"{word} after {soaked.seconds / 60:.1f} minutes; all of it is in {out / SOAK}")
    if not document["passed"]:
        return FAILED
    return INTERRUPTED if soaked.interrupted else 0


def tell(args: argparse.Namespace, document: dict[str, Any], made: Sequence[Table]) -> None:
    """The figures, for people or for programs."""
    if args.json:
        write_json(document, "-", sys.stdout.write)
        return
    lines = [document["conditions"], document["headline"], *(f"Mind: {text}" for text in document["warnings"])]
    blocks = [shown(line) for line in lines if line] + [table_text(table) for table in made if not table.long]
    print("\n\n".join([*blocks, f"The report is {Path(args.out) / 'report.html'}"]))
