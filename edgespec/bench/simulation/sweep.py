"""Many settings at once, on all cores: the papers' experiments, one value varied at a time."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from edgespec.bench.simulation.scenario import PLAIN, Base, Setting, baseline, figures, simulate
from edgespec.errors import ConfigError
from predictor.replay import Outcome

LOAD_RATIOS = (0.5, 1.0, 2.0, 2.7, 4.0, 8.0)
INTERVALS = (2, 4, 8, 16)
STEEPNESS = (0.0, 0.5, 1.0, 2.0, 4.0)
PREFETCH_GAMMA = "@3"


@dataclass(frozen=True)
class Sweep:
    """An experiment. settings: (value on the axis, line's name, setting)."""

    name: str
    title: str
    axis: str
    settings: tuple[tuple[float | str, str, Setting], ...]


def sweep(name: str, policies: Sequence[str], start: Setting, drafts: int, longest: int) -> Sweep:
    """The experiment of that name around a setting. drafts: how many have weights; longest: tokens of an answer."""
    if name not in SWEEPS:
        raise ConfigError(f"--sweep {name}: there are {', '.join(SWEEPS)}.")
    values: Sequence[Any]
    if name == "prefetch":
        return _prefetch(start)
    if name == "gamma":
        return _gamma(start)
    field, title, axis = SWEEPS[name]
    values = {
        "resident": range(1, drafts + 1),
        "load-ratio": LOAD_RATIOS,
        "interval": INTERVALS,
        "length": [n for n in (16, 32, 64, 128, 256, 512) if n < longest] + [longest],
    }[name]
    made = []
    for value in values:
        varied: dict[str, Any] = {field: value}
        made += [(value, policy, replace(start, policy=policy, **varied)) for policy in policies]
    return Sweep(name, title, axis, tuple(made))


SWEEPS: Mapping[str, tuple[str, str, str]] = {
    "resident": ("resident", "Drafts in memory", "slots"),
    "load-ratio": ("load_ratio", "Seconds of a load", "load / plain step"),
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
    return Sweep("prefetch", title, axis, tuple(made))


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
    assert _base is not None
    begin = time.perf_counter()
    return simulate(_base, setting), time.perf_counter() - begin


@dataclass
class Ran:
    """What was replayed. rows: figures, in the order of the settings. seconds: that it took, all cores together in wall
    time. rounds: that were replayed, plain ones included."""

    rows: list[dict[str, Any]]
    rounds: int
    seconds: float
    jobs: int


def run_all(base: Base, settings: Sequence[Setting], advance: Callable[[int], None], jobs: int | None = None) -> Ran:
    """Replay all settings, each once, with plain decoding of the same texts beside them."""
    global _base
    needed = list(dict.fromkeys([*map(baseline, settings), *settings]))
    jobs = max(min(jobs or os.cpu_count() or 1, len(needed)), 1)
    # The slow ones first, so that no core waits for the last one long.
    needed.sort(key=_weight)
    begin = time.perf_counter()
    _base = base
    found: dict[Setting, Outcome] = {}
    try:
        if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
            jobs = 1
            for setting in needed:
                found[setting], _ = _one(setting)
                advance(1)
        else:
            with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
                for setting, (outcome, _) in zip(needed, pool.map(_one, needed)):
                    found[setting] = outcome
                    advance(1)
    finally:
        _base = None
    seconds = time.perf_counter() - begin
    rows = [figures(setting, found[setting], found[baseline(setting)]) for setting in settings]
    return Ran(rows, sum(outcome.rounds for outcome in found.values()), seconds, jobs)


def _weight(setting: Setting) -> int:
    name = setting.policy.split("@")[0].split(",")[0]
    return {"oracle-dynamic": 0, "edgespec": 1, "oracle-static": 2, PLAIN: 9}.get(name, 5)
