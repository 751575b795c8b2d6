"""Synthetic texts for replays: every guess of a draft is right with a chance that depends on the text's domain."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from predictor import CostTable
from predictor.policies import make_policy
from predictor.policies.base import LOOKUP
from predictor.replay import Outcome, Rankings, Replay, TextTrace, World, replay

NAMES = ("general", "code", "math", "law", "chat")
FLAT = {width: 0.030 * (1 + 0.03 * (width - 1)) for width in range(1, 12)}  # memory-bound: blocks are nearly free
STEEP = {1: 0.0155, 2: 0.0201, 3: 0.0225, 4: 0.025, 5: 0.0276, 6: 0.0307, 7: 0.0334, 8: 0.0365, 9: 0.039}
OWN, OTHER, GENERAL = 0.8, 0.15, 0.4
DOMAINS: Mapping[str, Mapping[str, float]] = {
    domain: {name: GENERAL if name == "general" else OWN if name == domain else OTHER for name in NAMES}
    for domain in ("code", "math", "law", "chat")
}
MANIFEST = {name: GENERAL if name == "general" else OWN for name in NAMES}


def accepted(rates: np.ndarray, rng: np.random.Generator, length: int, gamma: int = 8) -> np.ndarray:
    """uint8 [drafts, length - 1]: right guesses after each position; rates: [drafts] or [drafts, length]."""
    right = rng.random((len(rates), length)) < rates.reshape(len(rates), -1)
    run = np.zeros((len(rates), length + 1), np.int64)
    for at in range(length - 1, 0, -1):
        run[:, at] = np.where(right[:, at], run[:, at + 1] + 1, 0)
    return np.minimum(run[:, 1:length], gamma).astype(np.uint8)


def text(
    domain: str, rng: np.random.Generator, rates: Mapping[str, float] | np.ndarray | None = None, length: int = 128
) -> TextTrace:
    """One answer without anything to look up. rates: one each, or [drafts, length] where the text turns."""
    if not isinstance(rates, np.ndarray):
        rates = np.array([(rates or DOMAINS[domain])[name] for name in NAMES])
    nothing = np.zeros(length - 1, np.uint8)
    return TextTrace(domain, 40, accepted(rates, rng, length), nothing, nothing)


def texts(count: int, seed: int = 0, length: int = 128) -> list[TextTrace]:
    """Answers of all domains in turn."""
    rng = np.random.default_rng(seed)
    domains = list(DOMAINS)
    return [text(domains[number % len(domains)], rng, length=length) for number in range(count)]


def world(verify: Mapping[int, float] = FLAT, *, load: float = 0.08, capacity: int = 2, **more: object) -> World:
    """A device on which a draft's step takes 3% of a plain one, and a load 2.7 rounds or so."""
    seconds = dict.fromkeys(NAMES, 0.03 * verify[1]) | {"ngram": 0.0}
    costs = CostTable(verify, seconds, loads=dict.fromkeys(NAMES, load), catch_up=dict.fromkeys(NAMES, verify[1] / 600))
    return World(NAMES, costs, capacity, **{"resident": NAMES[:capacity], "prefill": verify[1] / 12} | more)  # type: ignore[arg-type]


def knows(trace: TextTrace, position: int, seen: Mapping[str, float]) -> Mapping[str, float]:
    """A ranker that is right."""
    return DOMAINS[trace.domain]


def run(
    spec: str,
    made: list[TextTrace],
    device: World,
    rankings: Rankings | None = None,
    expected: Mapping[str, float] = MANIFEST,
    seed: int = 0,
) -> Outcome:
    """Replay a policy; drafts of `edgespec` are expected to do what their manifests say."""

    def make(costs: CostTable, ahead: Replay):  # type: ignore[no-untyped-def]
        free = (*sorted(device.free), LOOKUP)
        policy = make_policy(spec, costs, device.weighted, capacity=device.capacity, trace=ahead, seed=seed, free=free)
        for name, rate in expected.items():
            if hasattr(policy, "expect"):
                policy.expect(name, rate)
        return policy

    return replay(make, made, device, rankings)
