"""From arguments to what a run needs: settings, schedule, prompts, and the words about it. Checked before any load."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgespec
from edgespec.bench.load.arrivals import MAKE, POISSON, Arrival, read_trace
from edgespec.bench.load.folder import STATE
from edgespec.bench.load.prompts import QUESTIONS, Encode, Pool
from edgespec.bench.load.schedule import Schedule, parse_arms
from edgespec.bench.load.texts import Difference, Gap, judged
from edgespec.bench.machine import describe, this_command
from edgespec.bench.words import counted, were
from edgespec.config import nearest
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig
    from edgespec.evaluation.prompts import Skipped

_WARM_UP, _LIMIT = 0.2, 3.0  # of --seconds


def schedule_of(args: argparse.Namespace, planners: Sequence[str]) -> Schedule:
    """What is to be run, checked as far as that is possible without a model. Raises ConfigError."""
    check_planners(planners)
    recorded = args.arrivals not in MAKE
    made = Schedule(
        arms=parse_arms(planners, args.arms_elastic),
        rates=args.rates or (),
        repeats=args.repeats,
        seconds=args.seconds,
        warm_up=warm_up_of(args),
        limit_s=limit_of(args),
        most_s=60 * args.most_minutes,
        kind=POISSON if recorded else args.arrivals,
        seed=args.seed,
        trace=_recorded(args.arrivals) if recorded else (),
    )
    made.check()
    return made


def _recorded(name: str) -> tuple[Arrival, ...]:
    """The arrivals in a file. Raises ConfigError."""
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(f"--arrivals {name} is no file; {nearest(name, list(MAKE))}")
    return tuple(read_trace(path))


def check_planners(planners: Sequence[str]) -> None:
    """Raises ConfigError for a load planner that cannot be made."""
    from predictor.costs import CostTable
    from predictor.load.costs import BatchCosts
    from predictor.load.making import make_load_planner

    drafts = CostTable()
    for planner in planners:
        try:
            make_load_planner(planner, BatchCosts.guessed(drafts), drafts)
        except ValueError as error:
            raise ConfigError(f"--planners: {error}.") from error


def warm_up_of(args: argparse.Namespace) -> float:
    """Seconds at the beginning of every stretch that do not count."""
    return float(_WARM_UP * args.seconds if args.warm_up is None else args.warm_up)


def limit_of(args: argparse.Namespace) -> float:
    """Seconds of a stretch at most."""
    return float(_LIMIT * args.seconds if args.limit is None else args.limit)


def config_of(args: argparse.Namespace, state: Path) -> RuntimeConfig:
    """The engine's settings. What policies learn begins empty, and is kept with the run."""
    from edgespec.cli.runtime import configured

    return configured(args).replace(policy_memory=state / STATE)


def read_pool(args: argparse.Namespace, encode: Encode, context: int) -> tuple[Pool, list[Skipped]]:
    """The run's prompts. Raises PromptError."""
    files = [Path(name).expanduser() for name in args.prompts or [QUESTIONS]]
    new = args.max_new_tokens
    return Pool.read(files, encode, new=new, context=context, seed=args.seed, distinct=args.distinct)


def judge(config: RuntimeConfig, compared: int, found: Sequence[Difference]) -> dict[str, Any]:
    """The texts' differences, each measured by a decoder in another process, which starts only if there are any."""
    from edgespec import catalog, loading
    from edgespec.bench.extras import Probes
    from edgespec.bench.workers import WorkerFailure
    from edgespec.models.cpu import usable_threads

    path = Path(catalog.resolve(config.model, home=config.home))
    threads = config.threads or usable_threads()
    probes = Probes(path, threads, device=loading.device_of(config))

    def gap_of(before: list[int], left: int, right: int) -> Gap | None:
        try:
            return probes.gap(config.weight_format, before, left, right)
        except WorkerFailure:
            return None

    try:
        return judged(compared, found, config.weight_format, gap_of)
    finally:
        probes.kill()


def about(args: argparse.Namespace, config: RuntimeConfig, title: str, skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Title, machine and settings: what every kind of document begins with."""
    from edgespec.models.cpu import usable_threads

    machine = describe(config.threads or usable_threads())
    prompts = ", ".join(Path(name).name for name in args.prompts or [QUESTIONS])
    left_out = f"{counted(len(skipped), 'prompt')} {were(len(skipped))} left out"
    warnings = [f"{left_out}; the first: {skipped[0].reason}."] if skipped else []
    return {
        "title": title,
        "headline": "",
        "simulated": False,
        "conditions": f"{config.model}, {config.weight_format} weights; prompts of {prompts}, answers of at most "
        f"{args.max_new_tokens} tokens; at most {config.max_sessions} requests run at once.",
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads used; edgespec "
        f"{edgespec.__version__}",
        "described": machine,
        "command": this_command(),
        "settings": settings(args, config),
        "warnings": warnings,
        "verdicts": [],
        "texts": None,
        "validation": None,
    }


def settings(args: argparse.Namespace, config: RuntimeConfig) -> Mapping[str, Any]:
    """What the figures depend on, in words."""
    return {
        "arrivals": args.arrivals,
        "seconds": args.seconds,
        "warm-up": warm_up_of(args),
        "limit": limit_of(args),
        "repeats": args.repeats,
        "seed": args.seed,
        "exact": args.exact,
        "distinct": args.distinct,
        "new tokens": args.max_new_tokens,
        "elastic": args.arms_elastic,
        "max sessions": config.max_sessions,
        "max queue": config.max_queue,
        "kv memory": config.kv_memory,
        "memory budget": config.memory_budget,
        "drafts": config.drafts if isinstance(config.drafts, str) else ", ".join(config.drafts) or "off",
        "resident": config.resident or "what fits",
    }
