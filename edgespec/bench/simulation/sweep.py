"""Many settings at once, on all cores: the papers' experiments, one value varied at a time."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from edgespec.bench.simulation.ranges import Range
from edgespec.bench.simulation.scenario import Base, Setting, baseline, row_of, simulate
from edgespec.bench.specbench.folder import PLAIN
from edgespec.errors import ConfigError
from predictor.replay import Outcome

LOAD_RATIOS = (0.5, 1.0, 2.0, 2.7, 4.0, 8.0)
DRAFT_COSTS = (0.02, 0.05, 0.1, 0.2, 0.4)
INTERVALS = (2, 4, 8, 16)
STEEPNESS = (0.0, 0.5, 1.0, 2.0, 4.0)
OWN_POLICIES = ("prefetch", "gamma")  # experiments that are about certain policies
PREFETCH_GAMMA = "@3"
_MEMSPEC_WITHOUT = (
    "MemSpec without its prediction is mab-async, which never wants more than the draft that it pulled: for it "
    "'prefetching only' is 'neither' but for the load before the first round."
)


@dataclass(frozen=True)
class Sweep:
    """An experiment. settings: (value on the axis, line's name, setting). note: what its table has to say besides."""

    name: str
    title: str
    axis: str
    settings: tuple[tuple[float | str, str, Setting], ...]
    note: str = ""


def sweep(
    name: str, policies: Sequence[str], start: Setting, drafts: int, longest: int, within: Range | None = None
) -> Sweep:
    """The experiment of that name around a setting. drafts: how many may be held; longest: tokens of an answer.

    within: its ends, and the usual values between them, instead of the usual values. Raises ConfigError.
    """
    if name not in SWEEPS:
        raise ConfigError(f"--sweep {name}: there are {', '.join(SWEEPS)}.")
    if name == "prefetch":
        return _prefetch(start)
    if name == "gamma":
        return _gamma(start)
    field, title, axis = SWEEPS[name]
    values: Sequence[float] = {
        "resident": range(1, drafts + 1),
        "load-ratio": LOAD_RATIOS,
        "draft-cost": DRAFT_COSTS,
        "interval": INTERVALS,
        "length": [n for n in (16, 32, 64, 128, 256, 512) if n < longest] + [longest],
    }[name]
    if within is not None:
        most = {"resident": drafts, "length": longest}.get(name, math.inf)
        values = within.values(f"--{field.replace('_', '-')}", values, most)
    made = []
    for value in values:
        varied: dict[str, Any] = {field: value}
        made += [(value, policy, replace(start, policy=policy, **varied)) for policy in policies]
    return Sweep(name, title, axis, tuple(made))


SWEEPS: Mapping[str, tuple[str, str, str]] = {
    "resident": ("resident", "Drafts in memory", "slots"),
    "load-ratio": ("load_ratio", "Seconds of a load", "load / plain step"),
    "draft-cost": ("draft_cost", "Seconds of a draft's step", "draft step / plain step"),
    "interval": ("interval", "Rounds between scheduling points", "rounds"),
    "length": ("new_tokens", "Length of the answers", "new tokens at most"),
    "prefetch": ("", "Prediction, prefetching, and both", ""),
    "gamma": ("", "Gamma on a device whose forwards get dearer with every token", "times the price of further tokens"),
}


def _prefetch(start: Setting) -> Sweep:
    """MemSpec's ablation, and ours: does it help to know what comes, to load it ahead, or only both?"""
    made: list[tuple[float | str, str, Setting]] = []
    for policy, alone in ((f"memspec{PREFETCH_GAMMA}", f"mab-async{PREFETCH_GAMMA}"), ("edgespec", "edgespec")):
        label = policy.split("@")[0]
        made += [
            ("neither", label, replace(start, policy=alone, ranked=False, prefetch=False)),
            ("prediction only", label, replace(start, policy=policy, prefetch=False)),
            ("prefetching only", label, replace(start, policy=alone, ranked=False)),
            ("both", label, replace(start, policy=policy)),
        ]
    _, title, axis = SWEEPS["prefetch"]
    return Sweep("prefetch", title, axis, tuple(made), _MEMSPEC_WITHOUT)


def _gamma(start: Setting) -> Sweep:
    """Nightjar's question at batch size one: what load is there, how dear further tokens are stands in for."""
    policies = ("memspec@1", "memspec@3", "memspec@5", "nightjar", "edgespec", "oracle-static")
    made = [
        (value, policy, replace(start, policy=policy, steepness=value)) for value in STEEPNESS for policy in policies
    ]
    _, title, axis = SWEEPS["gamma"]
    return Sweep("gamma", title, axis, tuple(made))


_base: Base | None = None  # of this process; handed to children by fork, not by copying


def _one(setting: Setting) -> tuple[Outcome, float]:
    """What a setting comes to, and the seconds that its replay took."""
    assert _base is not None
    begin = time.perf_counter()
    return simulate(_base, setting), time.perf_counter() - begin


@dataclass
class Ran:
    """What was replayed. rows: of `row_of`, in the order of the settings. rounds: of policies that draft, each setting
    once. seconds: wall time of all, in `jobs` processes. rates: rounds a second in one process, by policy."""

    rows: list[dict[str, Any]]
    rounds: int
    seconds: float
    jobs: int
    rates: dict[str, float]


def run_all(base: Base, settings: Sequence[Setting], advance: Callable[[int], None], jobs: int | None = None) -> Ran:
    """Replay all settings, each once, with plain decoding of the same texts beside them.

    Raises ConfigError if a process is killed. After Ctrl-C no further setting is begun.
    """
    global _base
    needed = list(dict.fromkeys([*map(baseline, settings), *settings]))
    jobs = max(min(jobs or os.cpu_count() or 1, len(needed)), 1)
    if "fork" not in multiprocessing.get_all_start_methods():
        jobs = 1
    # The slow ones first, so that no core waits for the last one long.
    needed.sort(key=_weight)
    begin = time.perf_counter()
    _base = base
    found: dict[Setting, tuple[Outcome, float]] = {}
    try:
        for setting, outcome in zip(needed, map(_one, needed) if jobs == 1 else _in_processes(needed, jobs)):
            found[setting] = outcome
            advance(1)
    except BrokenProcessPool as error:
        raise ConfigError(
            f"One of {jobs} processes was killed, as happens where memory is short: give --jobs 1, or fewer texts "
            "(--limit)."
        ) from error
    finally:
        _base = None
    seconds = time.perf_counter() - begin
    rows = [row_of(setting, found[setting][0], found[baseline(setting)][0]) for setting in settings]
    drafting = {setting: result for setting, result in found.items() if setting.policy != PLAIN}
    return Ran(rows, sum(outcome.rounds for outcome, _ in drafting.values()), seconds, jobs, _rates(drafting))


def _in_processes(settings: Sequence[Setting], jobs: int) -> Iterator[tuple[Outcome, float]]:
    """The results in order. Whoever stops asking, for Ctrl-C or an error, waits for nothing that is left."""
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=signal.signal, initargs=_DIES_AT_ONCE)
    try:
        yield from pool.map(_one, settings)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_DIES_AT_ONCE = (signal.SIGINT, signal.SIG_DFL)  # a child at Ctrl-C, which reaches it as well


def _rates(found: Mapping[Setting, tuple[Outcome, float]]) -> dict[str, float]:
    rounds: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for setting, (outcome, took) in found.items():
        rounds[setting.policy] += outcome.rounds
        seconds[setting.policy] += took
    return {policy: count / max(seconds[policy], 1e-9) for policy, count in rounds.items()}


def _weight(setting: Setting) -> int:
    name = setting.policy.split("@")[0].split(",")[0]
    return {"oracle-dynamic": 0, "edgespec": 1, "oracle-static": 2, PLAIN: 9}.get(name, 5)
