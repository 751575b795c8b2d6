"""`edgespec bench specbench`: the arguments, and one run from its questions to its report."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from edgespec.bench.arguments import names
from edgespec.bench.machine import command_to_resume
from edgespec.bench.progress import no_progress
from edgespec.bench.reporting.terminal import shown
from edgespec.bench.specbench import arms, fields, preparing, ray_cluster
from edgespec.bench.specbench.arms import Arm
from edgespec.bench.specbench.folder import RunFolder, RunWriter, has_run, locked, other_files, read_run
from edgespec.bench.specbench.harness import Harness, PlainFailure, Plan
from edgespec.bench.specbench.model_answers import write_answers
from edgespec.bench.specbench.questions import ORDERS
from edgespec.bench.specbench.ties import measure_ties
from edgespec.bench.words import are, counted
from edgespec.bench.workers import Worker
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig

HELP = "policies and other engines side by side on Spec-Bench's questions: speed, equality, memory"
DESCRIPTION = (
    "Run every question through every policy in turn, beside plain decoding with the same weights, and write records, "
    "answers in Spec-Bench's own form, and a report into one folder."
)
EPILOG = (
    "policies: plain (always there), ngram (lookup alone), static (the first draft at gamma 3), all-statics (each), "
    "the policies of docs/policies.md as in static:code@4 or memspec,n=8; other engines: peer:llama.cpp, "
    "peer:llama.cpp-lookup, peer:onnxruntime-genai, peer:transformers, peer:transformers-lookup, "
    "peer:transformers-assisted, peer:flashspec"
)
DEFAULT_POLICIES = "plain,ngram,static,mab-async,nightjar,memspec,edgespec"
FAILED, INTERRUPTED = 1, 130
TABLE_WIDTH = 160  # where the output is no terminal
MOST_NEW_TOKENS = 1 << 16
MOST_SHOWN = 10  # lines that are left out
MOST_NAMED = 3  # files of others in the folder

Progress = Callable[[int], Any]


def add_arguments(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """All arguments of the command. count: converts a whole number from 1 up."""
    from edgespec.cli import options

    parser.epilog = EPILOG
    add = parser.add_argument
    add("--questions", required=True, metavar="FILE", help="questions in Spec-Bench's form (its question.jsonl)")
    add("--out", required=True, metavar="DIR", help="folder of this run; made if it is not there")
    add("--policies", default=DEFAULT_POLICIES, metavar="A,B", help=f"who takes part, see below ({DEFAULT_POLICIES})")
    add("--order", choices=ORDERS, default="file", help="of the questions; interleaved = one of each domain in turn")
    add("--seed", type=_whole, default=0, metavar="N", help="of the order shuffled (0)")
    add("--categories", type=names, metavar="A,B", help="only these categories, or tasks such as mt-bench")
    add("--limit", type=count, metavar="N", help="at most N questions of each category, evenly spread")
    add("-n", "--max-new-tokens", type=count, default=1024, metavar="N", help="longest answer (1024)")
    add("--temperature", type=_temperature, default=0.0, metavar="T", help="0 = always the likeliest token (default)")
    add("--repeats", type=count, default=3, metavar="N", help="times that every question is run (3)")
    add("--shard", metavar="I/N", help="only every N-th question of each category; 'bench report' merges the folders")
    add("--resume", action="store_true", help="go on with the run in DIR; nothing is run twice")
    add("--retry-errors", action="store_true", help="with --resume: ask once more for the answers that failed")
    add("--together", type=count, metavar="N", help="arms in memory at once, plain among them (default: what fits)")
    add("--keep-memory", action="store_true", help="policies begin with what they learned before on this machine")
    add("--assistant", metavar="DIR", help="draft checkpoint for peer:transformers-assisted and peer:flashspec")
    ray_cluster.add_arguments(parser, count)
    options.add_engine_flags(parser)
    add("-q", "--quiet", action="store_true", help="no progress; the tables, and what to mind about them, all the same")
    add("--debug", action="store_true", help="log in detail, and show a traceback when something fails")


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:  # as much as every reader of JSON takes
        raise argparse.ArgumentTypeError(f"wants a whole number from 0 up, not '{text}'")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"wants a number from 0 to 100, not '{text}'")
    return value


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Measure and report; 1 if an arm has an error, 130 after Ctrl-C, with everything that was measured kept.

    progress: of a number of steps, a context manager of two functions: for a text, and for steps done.
    """
    from edgespec.cli.runtime import configured

    if args.policy is not None or args.gamma is not None:
        raise ConfigError(
            "--policy and --gamma belong to one engine: name policies with --policies, as in static:code@4."
        )
    if args.max_new_tokens > MOST_NEW_TOKENS:
        raise ConfigError(f"--max-new-tokens must be at most {MOST_NEW_TOKENS}.")
    if args.retry_errors and not args.resume:
        raise ConfigError("--retry-errors goes with --resume: it asks once more for what failed in the run in DIR.")
    args.specs = arms.split_specs(args.policies)
    if args.ray is not None:
        return ray_cluster.run(args)
    if args.shards is not None:
        raise ConfigError("--shards is for --ray; name one shard with --shard I/N.")
    found, config = preparing.asked(args), configured(args)
    out = Path(args.out).expanduser()
    _check_folder(out, resume=args.resume)
    with locked(out):
        if has_run(out) and not args.resume:
            raise ConfigError(f"There is a run in {out}: go on with it with --resume, or give --out another folder.")
        return _Run(args, config, found, out).measure(progress)


def _check_folder(out: Path, *, resume: bool) -> None:
    """ConfigError for a folder in which there is nothing to go on with, and for one of other things."""
    if has_run(out):
        return
    if resume:
        raise ConfigError(
            f"There is no run in {out} to go on with: check --out, or leave out --resume to begin one there."
        )
    strange = other_files(out)
    if strange:
        named = ", ".join(strange[:MOST_NAMED]) + (", ..." if len(strange) > MOST_NAMED else "")
        raise ConfigError(f"The folder {out} has other files ({named}): give --out a new or an empty one.")


class _Run:
    """One run in its locked folder."""

    def __init__(self, args: argparse.Namespace, config: RuntimeConfig, found: preparing.Asked, out: Path) -> None:
        self._args, self._say = args, (lambda text: None) if args.quiet else _say
        old = read_run(out) if has_run(out) else None
        setup = preparing.Setup.of(args, config if old is None else preparing.as_before(config, old))
        self._arms = {arm.name: arm for arm in setup.arms(args, out)}
        self._threads, self._path, self._device = setup.threads, setup.path, setup.device
        settings = preparing.settings(args, config, setup, found)
        run = preparing.new_run(out, settings, setup, preparing.grouped(list(self._arms.values()), args, setup))
        if old is not None:
            run = preparing.go_on(old, run, setup.device)
        self._encoder = preparing.open_encoder(setup.path)
        self._questions, too_long = preparing.fitting(found.mine, self._encoder, int(run.machine["context"]))
        skipped = [*found.skipped, *too_long]
        lines = [{"file": Path(one.file).name, "line": one.line, "reason": one.reason} for one in skipped]
        self._run = dataclasses.replace(
            run,
            arms=preparing.infos(list(self._arms.values()), run),
            skipped=fields.as_read(lines),
            questions=len(self._questions),
        )
        for one in skipped[:MOST_SHOWN]:
            self._say(f"left out: {one}")
        if len(skipped) > MOST_SHOWN:
            self._say(f"and {len(skipped) - MOST_SHOWN} more; run.json lists them")

    def measure(self, progress: Progress) -> int:
        """Run what is left, then write all that is made of the records, also after Ctrl-C."""
        for name, arm in self._arms.items():
            if arm.missing:
                self._say(f"{name} takes no part: {arm.missing}")
        plan = preparing.plan(self._run, self._arms, self._questions, self._args, self._encoder)
        self._say(_announced(plan, self._run))
        writer = RunWriter(self._run)
        try:
            with (no_progress if self._args.quiet else progress)(plan.answers()) as (tell, advance):
                Harness(
                    plan, writer, self._start, self._encoder, announce=self._say,
                    tell=lambda text: tell(shown(text)), advance=advance,
                ).run()  # fmt: skip
            return self._finish(writer)
        except KeyboardInterrupt:
            writer.save(finished=writer.run.finished)
            write_answers(writer.run, self._questions, self._encoder.text)
            kept = sum(map(len, writer.run.records.values()))
            _say(f"interrupted; {counted(kept, 'turn')} {are(kept)} kept in {self._run.path}. {_go_on()}")
            return INTERRUPTED
        except PlainFailure as failure:
            write_answers(writer.run, self._questions, self._encoder.text)
            _say(f"{failure}; what was measured is kept in {self._run.path}. {_go_on()}")
            return FAILED
        finally:
            writer.close()

    def _start(self, arm: Arm) -> Worker:
        return Worker(arm.name, threads=self._threads)

    def _finish(self, writer: RunWriter) -> int:
        failed = {name: info.message for name, info in writer.run.arms.items() if info.status == "error"}
        write_answers(writer.run, self._questions, self._encoder.text)
        if not self._args.temperature:
            self._measure_ties(writer.run)
        writer.save(finished=True)  # all that could be asked was
        self._report()
        for name, message in failed.items():
            _say(f"{name} has an error: {message}; --resume starts it again")
        errors = sum(record.error is not None for records in writer.run.records.values() for record in records)
        if errors:
            _say(f"{counted(errors, 'answer')} failed; --resume --retry-errors asks once more")
        return FAILED if failed else 0

    def _measure_ties(self, run: RunFolder) -> None:
        from edgespec.bench.extras import Probes

        probes = Probes(self._path, self._threads, device=self._device)
        try:
            measure_ties(run, self._questions, self._encoder, probes)
        finally:
            probes.kill()

    def _report(self) -> None:
        from edgespec.bench.reporting.command import publish

        console = Console()
        publish(
            [self._run.path],
            self._run.path,
            console if console.is_terminal else Console(width=TABLE_WIDTH),
        )


def _announced(plan: Plan, run: RunFolder) -> str:
    """What will be done, before the first minutes in which nothing else is seen."""
    names = {arm.name for group in plan.groups for arm in group}
    before = sum(map(len, run.records.values()))
    counts = {"question": len(plan.questions), "arm": len(names), "repeat": plan.repeats}
    asked = ", ".join(counted(count, what) for what, count in counts.items())
    text = f"{asked}: {counted(plan.answers(), 'answer')}, kept in {run.path}"
    return f"{text}; {counted(before, 'turn')} {are(before)} there already" if before else text


def _go_on() -> str:
    return f"To go on: {command_to_resume()}"


def _say(text: str) -> None:
    print(shown(text), file=sys.stderr, flush=True)
