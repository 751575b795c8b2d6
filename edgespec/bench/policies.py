"""`edgespec bench policies`: policies side by side on the same prompts, each in an engine of its own.

Every prompt is run by every policy in turn before the next prompt comes, in an order that rotates, so that a machine
that gets slower does so for all. Decode seconds only (prefill apart); texts unlike the plain ones are counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgespec.bench.report import write_json
from edgespec.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig
    from edgespec.engine import Engine
    from edgespec.evaluation.prompts import Item
    from edgespec.results import GenerationStats

HELP = "policies side by side on the same prompts: speed against plain decoding, fallback, loads"
DESCRIPTION = f"Measure {HELP}. Prompts as for 'bench record'."
PLAIN = "plain"
DEFAULT_POLICIES = "plain,static:general@3,mab-async,nightjar,memspec,edgespec"
INTERRUPTED = 130


@dataclass
class Arm:
    """What one policy did. Keyed by prompt: new tokens after the first, decode seconds."""

    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, key: str, ids: tuple[int, ...], stats: GenerationStats) -> None:
        self.texts.setdefault(key, ids)
        self.tokens[key] += max(stats.new_tokens - 1, 0)
        self.seconds[key] += stats.decode_seconds
        for name in (
            "rounds", "loads", "switches", "load_seconds_hidden", "load_seconds_exposed", "predictor_seconds",
            "ranker_seconds", "catch_up_seconds", "decode_seconds",
        ):  # fmt: skip
            self.totals[name] += getattr(stats, name)
        self.totals["fallback_rounds"] += stats.fallback_share * stats.rounds


def add_arguments(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """All arguments of the command. count: converts a whole number from 1 up."""
    from edgespec.cli import options

    add = parser.add_argument
    add("prompts", nargs="+", metavar="PROMPTS", help="prompt files (JSON lines)")
    add("--policies", default=DEFAULT_POLICIES, metavar="A;B", help="specs with ; or , between (docs/policies.md)")
    add("--limit", type=count, metavar="N", help="at most N prompts of each domain, evenly spread")
    add("-n", "--max-new-tokens", type=count, default=128, metavar="N", help="longest answer (128)")
    add("--repeats", type=count, default=1, metavar="N", help="times that every prompt is run (1)")
    add("--order", choices=("interleaved", "file"), default="interleaved", help="of the prompts (interleaved domains)")
    add("--out", metavar="FILE", help="also write all figures as JSON to FILE")
    options.add_engine_flags(parser)
    add("-q", "--quiet", action="store_true", help="no progress and no warnings")
    add("--debug", action="store_true", help="log in detail, and show a traceback when something fails")


def run(args: argparse.Namespace, progress: Callable[[int], Any]) -> int:
    """Measure and print; 130 after Ctrl-C, with the figures so far."""
    from edgespec.cli import runtime
    from edgespec.evaluation.prompts import limited, read_prompts

    specs = split_specs(args.policies)
    if PLAIN not in specs:
        specs.insert(0, PLAIN)
    everything, _ = read_prompts(args.prompts)
    items = limited(everything, args.limit)
    if args.order == "interleaved":
        items = interleaved(items)
    config, interrupted = runtime.configured(args), False
    arms = {spec: Arm() for spec in specs}
    with ExitStack() as stack:
        engines = {spec: stack.enter_context(engine_of(config, spec)) for spec in specs}
        with progress(len(items) * args.repeats) as (tell, advance):
            try:
                for _ in range(args.repeats):
                    for number, item in enumerate(items):
                        tell(item.domain)
                        measure(engines, arms, item, number, args.max_new_tokens)
                        advance(1)
            except KeyboardInterrupt:
                interrupted = True
        waits = sum(e.working_set.counters.waits_in_round for e in engines.values() if e.working_set is not None)
    report = {"settings": settings(config, args), "waits_in_round": waits, **figures(arms, items)}
    if args.out:
        write_json(report, args.out, sys.stdout.write)
    print("\n".join(table(report)))
    if interrupted:
        print("interrupted; these are the figures so far", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def split_specs(text: str) -> list[str]:
    """ "plain,static:code@4;memspec,n=8" -> the specs; a comma before "name=" belongs to the spec before it."""
    specs: list[str] = []
    for part in text.replace(";", ",").split(","):
        if "=" in part and specs:
            specs[-1] += f",{part.strip()}"
        elif part.strip():
            specs.append(part.strip())
    if not specs or len(set(specs)) < len(specs):
        raise ConfigError(f"--policies {text!r}: give policies, each once, with commas between")
    return specs


def engine_of(config: RuntimeConfig, spec: str) -> Engine:
    """An engine with this policy; plain decoding has no drafts at all."""
    from edgespec.engine import Engine

    if spec == PLAIN:
        return Engine.from_pretrained(config=config.replace(drafts="off"))
    return Engine.from_pretrained(config=config.replace(policy=spec, gamma="auto"))


def interleaved(items: Sequence[Item]) -> list[Item]:
    """One prompt of each domain after the other, as long as there are any."""
    queues: dict[str, list[Item]] = {}
    for item in items:
        queues.setdefault(item.domain, []).append(item)
    longest = max((len(queue) for queue in queues.values()), default=0)
    return [queue[place] for place in range(longest) for queue in queues.values() if place < len(queue)]


def measure(engines: Mapping[str, Engine], arms: Mapping[str, Arm], item: Item, number: int, limit: int) -> None:
    """Run one prompt (its first turn) through every policy."""
    from edgespec.decoding.params import SamplingParams

    names = list(engines)
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
        try:
            result = engines[name].generate(item.turns[0], SamplingParams(max_new_tokens=limit))
        except PromptError as error:
            raise ConfigError(f"{item.file}, line {item.line}: {error}") from error
        arms[name].add(f"{item.file}:{item.line}", result.token_ids, result.stats)


def figures(arms: Mapping[str, Arm], items: Iterable[Item]) -> dict[str, Any]:
    """By policy: speed over plain (tokens over seconds of all prompts that every policy ran), by domain too."""
    done = set.intersection(*(set(arm.tokens) for arm in arms.values()))
    domains: dict[str, list[str]] = {}
    for item in items:
        key = f"{item.file}:{item.line}"
        if key in done:
            domains.setdefault(item.domain, []).append(key)
    keys = [key for group in domains.values() for key in group]
    plain = arms[PLAIN]
    found = {}
    for name, arm in arms.items():
        totals, rounds = arm.totals, max(arm.totals["rounds"], 1)
        low, high = interval(arm, plain, keys)
        found[name] = {
            "speed": speed(arm, keys),
            "over_plain": ratio(arm, plain, keys),
            "interval": [low, high],
            "domains": {domain: ratio(arm, plain, group) for domain, group in domains.items()},
            "tokens_per_round": sum(arm.tokens.values()) / rounds,
            "fallback_share": totals["fallback_rounds"] / rounds,
            "loads": totals["loads"],
            "load_seconds_each": totals["load_seconds_hidden"] / totals["loads"] if totals["loads"] else 0.0,
            "exposed_seconds": totals["load_seconds_exposed"],
            "planning_share": totals["predictor_seconds"] / max(totals["decode_seconds"], 1e-9),
            "ranker_share": totals["ranker_seconds"] / max(totals["decode_seconds"], 1e-9),
            "catch_up_share": totals["catch_up_seconds"] / max(totals["decode_seconds"], 1e-9),
            "different_texts": sum(arm.texts[key] != plain.texts[key] for key in keys),
        }
    return {"prompts": {domain: len(group) for domain, group in domains.items()}, "policies": found}


def speed(arm: Arm, keys: Sequence[str]) -> float:
    """Tokens a second over these prompts, the first token of each left out."""
    return sum(arm.tokens[key] for key in keys) / max(sum(arm.seconds[key] for key in keys), 1e-9)


def ratio(arm: Arm, plain: Arm, keys: Sequence[str]) -> float:
    return speed(arm, keys) / max(speed(plain, keys), 1e-9)


def interval(arm: Arm, plain: Arm, keys: Sequence[str]) -> tuple[float | None, float | None]:
    """95% of the ratio, by bootstrap over prompts, the same resamples for all; None for fewer than two prompts."""
    from drafts.figures import Bootstrap

    if not keys:
        return None, None
    resampled = Bootstrap("", len(keys), 0)
    mine, theirs = (
        resampled.ratios([a.tokens[key] for key in keys], [a.seconds[key] for key in keys]) for a in (arm, plain)
    )
    return resampled.interval(mine / theirs)


def settings(config: RuntimeConfig, args: argparse.Namespace) -> dict[str, Any]:
    """What decided the figures."""
    from edgespec.bench.machine import describe
    from edgespec.models.cpu import usable_threads

    names = ("model", "weight_format", "resident", "load_rate", "threads")
    own = {name: getattr(config, name) for name in names}
    machine = describe(config.threads or usable_threads())
    return {**own, "new_tokens": args.max_new_tokens, "order": args.order, "machine": machine}


def table(report: Mapping[str, Any]) -> list[str]:
    """The figures as text."""
    domains = list(report["prompts"])
    head = [
        "policy",
        "x plain",
        "95%",
        *domains,
        "tok/round",
        "fallback",
        "loads",
        "s/load",
        "exposed",
        "plan",
        "differ",
    ]
    rows = [head]
    for name, f in report["policies"].items():
        low, high = f["interval"]
        rows.append(
            [
                name,
                f"{f['over_plain']:.3f}",
                "-" if low is None else f"{low:.2f}-{high:.2f}",
                *(f"{f['domains'][domain]:.2f}" for domain in domains),
                f"{f['tokens_per_round']:.2f}",
                f"{f['fallback_share']:.1%}",
                f"{f['loads']:.0f}",
                f"{f['load_seconds_each']:.3f}",
                f"{f['exposed_seconds']:.2f}",
                f"{f['planning_share']:.2%}",
                f"{f['different_texts']}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [*lines, f"rounds that waited for a load: {report['waits_in_round']}"]
