"""`edgespec bench`: speed, fidelity, and the traces of record."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from edgespec.bench import contenders, fidelity, prompts, record_command, report, summary
from edgespec.bench.extras import POSITION, WIDTHS, Probes, warm_start, warm_start_command
from edgespec.bench.load import command as load
from edgespec.bench.machine import command_line, describe, this_command
from edgespec.bench.model import PromptEncoder, open_decoder
from edgespec.bench.progress import no_progress, progress
from edgespec.bench.reporting import command as report_command
from edgespec.bench.simulation import command as simulate
from edgespec.bench.specbench import command as specbench
from edgespec.bench.speed import Plan, Result, Run
from edgespec.bench.workers import Worker, WorkerFailure
from edgespec.errors import ConfigError

FAILED, INTERRUPTED = 1, 130
PREFILL_TOKENS = 900
MOST_NEW_TOKENS = 1024
TABLE_WIDTH = 120  # where the output is no terminal
DEFAULT_MODEL = "smollm2-135m"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a whole number from 1 up, not '{text}'")
    return int(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `bench` with its commands."""
    help_text = "measure speed beside other engines, policies, serving under load, how close a weight format is"
    parser: argparse.ArgumentParser = subparsers.add_parser("bench", help=help_text, description=help_text)
    commands = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    _add_speed(commands)
    _add_fidelity(commands)
    recording = commands.add_parser("record", help=record_command.HELP, description=record_command.DESCRIPTION)
    record_command.add_arguments(recording, _count)
    measuring = commands.add_parser("specbench", help=specbench.HELP, description=specbench.DESCRIPTION)
    specbench.add_arguments(measuring, _count)
    reporting = commands.add_parser("report", help=report_command.HELP, description=report_command.DESCRIPTION)
    report_command.add_arguments(reporting)
    simulating = commands.add_parser("simulate", help=simulate.HELP, description=simulate.DESCRIPTION)
    simulate.add_arguments(simulating, _count)
    loading = commands.add_parser("load", help=load.HELP, description=load.DESCRIPTION)
    load.add_arguments(loading, _count)
    parser.set_defaults(run=run)
    return parser


def _add_speed(commands: Any) -> None:
    text = "prefill, decoding and memory of edgespec and its peers, interleaved in one run"
    known = ", ".join(contender.name for contender in contenders.CONTENDERS)
    parser = commands.add_parser("speed", help=text, description=f"Measure {text}.", epilog=f"contenders: {known}")
    parser.add_argument("--contenders", type=_names, metavar="A,B", help="only these contenders (see below)")
    parser.add_argument(
        "--repeats", type=_count, metavar="N", help="times that every prompt is run (5; with --quick 2)"
    )
    parser.add_argument(
        "-n", "--new-tokens", type=_count, metavar="N", help="tokens of every answer (128; with --quick 32)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: few prompts, short answers; not for publication"
    )
    parser.add_argument("--answers-only", action="store_true", help="leave out the time by width and the warm start")
    _add_common(parser, threads=2)


def _add_fidelity(commands: Any) -> None:
    text = "KL divergence, top-1 agreement and hidden-state cosine of every weight format against float32"
    parser = commands.add_parser("fidelity", help=text, description=f"Measure {text}.")
    parser.add_argument(
        "--text", action="append", metavar="FILE", help="texts to read instead of the built-in ones; may be repeated"
    )
    parser.add_argument(
        "--questions", metavar="FILE", help="questions in Spec-Bench's form (JSON lines), in the chat template"
    )
    parser.add_argument("--formats", type=_names, metavar="A,B", help=f"weight formats ({','.join(fidelity.FORMATS)})")
    parser.add_argument("--reference", choices=("torch", "onnx"), default="torch", help="who computes float32 (torch)")
    parser.add_argument("--tokens", type=_count, metavar="N", help="read no more than N tokens in all")
    _add_common(parser, threads=None)


def _add_common(parser: argparse.ArgumentParser, threads: int | None) -> None:
    shown = f" ({threads})" if threads else ""
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL, metavar="MODEL", help=f"the model ({DEFAULT_MODEL})")
    parser.add_argument("--threads", type=_count, default=threads, metavar="N", help=f"threads of every engine{shown}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON to FILE")
    parser.add_argument("--debug", action="store_true", help="log in detail, and show a traceback when something fails")


def run(args: argparse.Namespace) -> int:
    """Run one of them; returns the exit code (1: something in it has an error; 130: interrupted)."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding has not is an escape, and no error after hours
        sys.stdout.reconfigure(errors="backslashreplace")
    if args.bench == "record":
        return record_command.run(args, no_progress if args.quiet else progress)
    if args.bench == "report":
        return report_command.run(args)
    if args.bench == "simulate":
        return simulate.run(args, progress)
    if args.bench == "load":
        return load.run(args, progress)
    if args.bench == "specbench":
        return specbench.run(args, progress)
    try:
        return _speed(args) if args.bench == "speed" else _fidelity(args)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED


def _resolve(model: str) -> Path:
    from edgespec import catalog

    return Path(catalog.resolve(model))


def _speed(args: argparse.Namespace) -> int:
    plan = _plan(args)
    with progress(plan.steps()) as (say, advance):
        result = Run(plan, lambda c: Worker(c.name, threads=plan.threads), progress=say, step=lambda: advance(1)).run()
        document = speed_document(args, plan, result, say)
    _publish(args, document, report.speed_tables)
    faulty = any(row["status"] == "error" or row.get("equality", {}).get("faults") for row in document["rows"])
    return FAILED if faulty else 0


def _plan(args: argparse.Namespace) -> Plan:
    chosen = contenders.choose(args.contenders, quick=args.quick)
    if not chosen:
        raise ConfigError("--contenders names nobody; leave it out to run them all.")
    new_tokens = args.new_tokens or (32 if args.quick else 128)
    if new_tokens > MOST_NEW_TOKENS:
        raise ConfigError(f"--new-tokens must be at most {MOST_NEW_TOKENS}.")
    model = _resolve(args.model)
    encoder = PromptEncoder(model)
    texts = prompts.select(quick=args.quick)
    ids = encoder.all(texts)
    long_prompt = prompts.Prompt(f"prefill {PREFILL_TOKENS}", prompts.PREFILL, prompts.LONG_TEXT)
    ids[long_prompt.name] = encoder.exactly(prompts.LONG_TEXT, PREFILL_TOKENS)
    return Plan(
        model=model,
        contenders=chosen,
        prompts=[*texts, long_prompt],
        ids=ids,
        warm_up=encoder.chat(prompts.WARM_UP),
        repeats=args.repeats or (2 if args.quick else 5),
        new_tokens=new_tokens,
        threads=args.threads,
    )


def speed_document(
    args: argparse.Namespace, plan: Plan, result: Result, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The published form: machine, commands, rows, ratios. What is beside the answers is measured here."""
    rows = summary.rows(result)
    commands = [this_command()]
    probes = Probes(plan.model, plan.threads)
    try:
        say("comparing the texts")
        _add_equality(rows, result, probes)
        if not args.answers_only:
            say("time by width")
            _add_widths(rows, plan, probes)
    finally:
        probes.kill()
    if not args.answers_only and any(row["name"] == "plain" and row["status"] in ("ok", "partial") for row in rows):
        say("warm start")
        commands.append(_add_warm_start(rows, plan))
    return {"machine": describe(plan.threads), "commands": commands, "rows": rows, "ratios": summary.ratios(result)}


def _add_equality(rows: list[dict[str, Any]], result: Result, probes: Probes) -> None:
    def gap(weight_format: str, ids: list[int], left: int, right: int) -> dict[str, float]:
        try:
            return probes.gap(weight_format, ids, left, right)
        except WorkerFailure:  # unknown is not near: the difference stays a fault
            return {"margin": sys.float_info.max, "gap": sys.float_info.max}

    found = summary.equality(result, gap)
    for row in rows:
        if row["name"] in found:
            row["equality"] = found[row["name"]]


def _add_widths(rows: list[dict[str, Any]], plan: Plan, probes: Probes) -> None:
    """Into the rows of plain contenders: the widths belong to a weight format, not to a draft."""
    formats = {
        c.name: c.options["weight_format"]
        for c in plan.contenders
        if "weight_format" in c.options and not c.options["draft"]
    }
    ids = (plan.warm_up * (POSITION + max(WIDTHS)))[: POSITION + max(WIDTHS)]
    for row in rows:
        if row["name"] in formats and row["status"] in ("ok", "partial"):
            try:
                row["forward_ms_by_width"] = probes.widths(formats[row["name"]], ids, 4 * plan.repeats)
            except WorkerFailure as failure:
                row["warnings"].append(f"no time by width: {failure}")


def _add_warm_start(rows: list[dict[str, Any]], plan: Plan) -> str:
    command = warm_start_command(str(plan.model), plan.threads)
    row = next(row for row in rows if row["name"] == "plain")
    try:
        row["warm_start_seconds"] = warm_start(command, plan.repeats)
    except WorkerFailure as failure:
        row["warm_start_error"] = str(failure)
    return command_line(["edgespec", *command[3:]])


def _fidelity(args: argparse.Namespace) -> int:
    formats = _formats(args)
    model = _resolve(args.model)
    sequences = _sequences(args, PromptEncoder(model))
    total = sum(map(len, sequences))
    device = "torch-cpu" if args.reference == "torch" else "cpu"
    rows = []
    with progress(total * len(formats)) as (say, advance):
        say("loading the reference")
        reference = open_decoder(model, weight_format="float32", threads=args.threads, device=device)
        try:
            for weight_format in formats:
                say(weight_format)
                decoder = open_decoder(model, weight_format=weight_format, threads=args.threads)
                try:
                    found = fidelity.compare(reference, decoder, sequences, advance)
                finally:
                    decoder.close()
                rows.append({"name": weight_format, "bytes": decoder.nbytes, **found.to_dict()})
        finally:
            reference.close()
    document = {
        "machine": describe(args.threads or 0),
        "commands": [this_command()],
        "reference": f"float32 ({args.reference})",
        "positions": total,
        "rows": rows,
    }
    _publish(args, document, report.fidelity_table)
    return 0


def _formats(args: argparse.Namespace) -> list[str]:
    formats = args.formats or [
        name for name in fidelity.FORMATS if not (name == "float32" and args.reference == "onnx")
    ]
    for name in formats:
        if name not in fidelity.FORMATS:
            raise ConfigError(f"unknown weight format {name!r}; use some of: {', '.join(fidelity.FORMATS)}")
    return list(formats)


def _sequences(args: argparse.Namespace, encoder: PromptEncoder) -> list[list[int]]:
    """Token ids to read: the given texts and questions, or the built-in texts."""
    ids = [encoder.raw(fidelity.read_text(Path(path))) for path in args.text or []]
    if args.questions:
        ids += [encoder.chat(text) for text in fidelity.read_questions(Path(args.questions))]
    if not args.text and not args.questions:
        ids = [encoder.raw(text) for text in prompts.FIDELITY_TEXTS]
        ids += [encoder.chat(prompt.text) for prompt in prompts.PROMPTS if prompt.group in ("domain", "prose")]
    windows = fidelity.windows(ids, args.tokens)
    if not windows:
        raise ConfigError("there is no text to read; give --text or --questions a file that is not empty.")
    return windows


def _publish(
    args: argparse.Namespace, document: dict[str, Any], tables: Callable[[dict[str, Any], Console], None]
) -> None:
    if args.out:
        report.write_json(document, args.out, sys.stdout.write)
    if args.json:
        report.write_json(document, "-", sys.stdout.write)
    else:
        console = Console()
        tables(document, console if console.is_terminal else Console(width=TABLE_WIDTH))
