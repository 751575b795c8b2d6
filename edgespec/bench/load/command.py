"""`edgespec bench load`: the arguments, and one run from its arrivals to its report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from edgespec.bench.arguments import positive
from edgespec.bench.load import running
from edgespec.bench.load.arrivals import BURSTY, POISSON, STEPS
from edgespec.bench.load.measures import Deadline
from edgespec.bench.progress import no_progress
from edgespec.errors import ConfigError

HELP = "many requests at once: throughput, latency and memory by arrival rate and planner; a soak; sessions"
DESCRIPTION = (
    "Put an open load of bounded rate on the engine, the same arrivals with one load planner after the other, and "
    "write all figures and a report into one folder. --sessions keeps so many conversations busy instead, --soak looks "
    "for leaks and wrong texts, --simulate leaves the engine out."
)
EPILOG = "load planners: none, fixed:G, nightjar, goodput, banditspec, tetris:C, edgespec (docs/policies.md)"
PLANNERS = "none,fixed:1,fixed:3,nightjar,goodput,edgespec"
DEADLINE = Deadline(2.0, 0.2)

Progress = Callable[[int], Any]


def add_arguments(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """All arguments of the command. count: converts a whole number from 1 up."""
    from edgespec.cli import options

    parser.epilog = EPILOG
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder of this run; made if it is not there")
    add("--planners", type=_names, metavar="A,B", help=f"load planners, see below ({PLANNERS})")
    add("--rates", type=_rates, metavar="A,B", help="requests a second (0.1 to 1.3 of what a full batch can do)")
    add(
        "--arrivals", default=POISSON, metavar="KIND",
        help=f"{POISSON} (default), {BURSTY}, {STEPS} (low, high, low), or a .csv or .jsonl file with time, prompt or "
        "prompt_tokens, max_new_tokens, whose times are stretched to the rates",
    )  # fmt: skip
    add("--seconds", type=positive, default=40.0, metavar="S", help="in which requests come, at each rate (40)")
    add("--warm-up", type=positive, metavar="S", help="their beginning, which does not count (a fifth)")
    add("--limit", type=positive, metavar="S", help="until all have ended; then they are cancelled (3 x --seconds)")
    add("--repeats", type=count, default=3, metavar="N", help="times that each rate is run (3)")
    add("--most-minutes", type=positive, default=120.0, metavar="M", help="longest run; longer ones are refused (120)")
    add("--deadline", type=_deadline, default=DEADLINE, metavar="TTFT,TPOT", help="seconds, for goodput (2,0.2)")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals and of the order of prompts (0)")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts", action="append", metavar="FILE",
        help="JSON lines with a prompt each, or Spec-Bench's questions; may be repeated (questions of edgespec's own)",
    )  # fmt: skip
    prompts.add_argument("-n", "--max-new-tokens", type=count, default=64, metavar="N", help="longest answer (64)")
    prompts.add_argument("--exact", action="store_true", help="every answer has N tokens, whatever the model would end")
    prompts.add_argument("--distinct", action="store_true", help="no prompt twice: each begins with a number")
    prompts.add_argument("--no-alone", action="store_true", help="compare texts between planners only, not with alone")
    serving = parser.add_argument_group("serving")
    serving.add_argument("--max-sessions", type=count, metavar="N", help="requests that run at once")
    serving.add_argument("--max-queue", type=count, metavar="N", help="requests that may wait")
    serving.add_argument("--kv-memory", metavar="SIZE", help="of the pool of keys and values, such as 64MiB")
    serving.add_argument(
        "--elastic", dest="arms_elastic", choices=("on", "off", "both"), default="on",
        help="whether the drafts' memory may become KV blocks; both = each planner with and without",
    )  # fmt: skip
    other = parser.add_argument_group("instead of an open load")
    which = other.add_mutually_exclusive_group()
    which.add_argument("--sessions", type=_counts, metavar="N,M", help="so many conversations at once, without a pause")
    which.add_argument("--soak", type=positive, metavar="MINUTES", help="mixed and faulty requests, with a verdict")
    which.add_argument("--simulate", action="store_true", help="the same arrivals in a simulated world; no model runs")
    other.add_argument(
        "--validate", metavar="RUNDIR",
        help="with --simulate: the arrivals, texts and costs of a measured run, and its throughput beside it",
    )  # fmt: skip
    other.add_argument("--costs", metavar="FILE", help="with --simulate: measured seconds, as a run's costs.json")
    other.add_argument(
        "--acceptance", type=_share, default=0.6, metavar="P",
        help="with --simulate and no run: chance that a guess is right where those before were (0.6)",
    )  # fmt: skip
    options.add_engine_flags(parser)
    add("--json", action="store_true", help="print all figures as JSON")
    add("-q", "--quiet", action="store_true", help="no progress")
    add("--debug", action="store_true", help="log in detail, and show a traceback when something fails")


def _names(text: str) -> list[str]:
    """Names with commas between; a comma in front of KEY=VALUE belongs to the name before it."""
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if "=" in part and names and ":" in names[-1]:
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    if not names:
        raise argparse.ArgumentTypeError("wants names with commas between")
    return names


def _share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"wants a number from 0 to 1, not '{text}'")
    return value


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(positive(part) for part in text.split(","))
    if len(set(rates)) < len(rates):
        raise argparse.ArgumentTypeError(f"has a rate twice: '{text}'")
    return tuple(sorted(rates))


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 10_000 for part in parts):
        raise argparse.ArgumentTypeError(f"wants whole numbers from 1 to 10,000 with commas between, not '{text}'")
    return tuple(sorted({int(part) for part in parts}))


def _deadline(text: str) -> Deadline:
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"wants two numbers of seconds, as in 2,0.2, not '{text}'")
    return Deadline(*map(positive, parts))


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Measure or simulate, and report; 1 if a text is wrong, a request was lost, or a soak did not pass; 130 after
    Ctrl-C, with everything that was measured kept.

    progress: of a number of steps, a context manager of two functions: for a text, and for steps done.
    """
    if args.policy is not None or args.gamma is not None:
        raise ConfigError(
            "--policy and --gamma belong to one conversation: name load planners with --planners, as in fixed:3."
        )
    if not args.simulate and (args.validate or args.costs):
        raise ConfigError("--validate and --costs go with --simulate.")
    show: Progress = no_progress if args.quiet else progress
    if args.simulate:
        from edgespec.bench.load import simulated

        return simulated.run(args, PLANNERS.split(","), show)
    if args.soak is not None:
        return running.soak_load(args, _say)
    if args.sessions is not None:
        return running.sessions_load(args, ["none", "edgespec"], show)
    return running.open_load(args, PLANNERS.split(","), show)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
