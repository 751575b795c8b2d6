"""`oracle-dynamic` is above everything that chooses at the same scheduling points, also where texts turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predictor.replay import TextTrace, World
from tests.predictor.replay_texts import DOMAINS, FLAT, NAMES, STEEP, run, text, world

LENGTH = 160


def turning(seed: int, *domains: str, prompt: int = 300) -> TextTrace:
    """A text that turns from one domain to the next, behind a prompt that takes drafts several rounds to read."""
    each = LENGTH // len(domains)
    rates = [np.tile(np.array([DOMAINS[d][name] for name in NAMES])[:, None], each) for d in domains]
    made = text("code", np.random.default_rng(seed), np.concatenate(rates, axis=1), each * len(domains))
    return replace(made, prompt_length=prompt, name=",".join(domains))


TURNING = [
    turning(1, "code", "law"), turning(2, "math", "chat"), turning(3, "law", "code", "math", "law"),
    turning(4, "chat", "math", "chat", "math", "chat"), turning(5, "code", "code"),
    turning(6, "law", "math", prompt=20),
]  # fmt: skip


def knows(trace: TextTrace, position: int, seen: Mapping[str, float]) -> Mapping[str, float]:
    """A ranker that is right wherever the text is."""
    domains = trace.name.split(",")
    return DOMAINS[domains[min(position * len(domains) // LENGTH, len(domains) - 1)]]


@pytest.mark.parametrize("capacity", [1, 2, 5])
@pytest.mark.parametrize(("verify", "load"), [(FLAT, 0.08), (STEEP, 0.04), (FLAT, 0.24)])
def test_above_every_static_and_memspec_on_texts_that_turn(
    verify: Mapping[int, float], load: float, capacity: int
) -> None:
    at = world(verify, load=load, capacity=capacity, slow_down=1.1)
    oracle = run("oracle-dynamic", TURNING, at, knows)
    for spec in ("oracle-static", "plain", *(f"{kind}@{g}" for kind in ("memspec", "mab-async") for g in (2, 4, 6))):
        assert oracle.seconds <= run(spec, TURNING, at, knows).seconds, spec
    for name in NAMES:
        for gamma in (2, 4, 6, 8):
            assert oracle.seconds <= run(f"static:{name}@{gamma}", TURNING, at, knows).seconds, (name, gamma)


@pytest.mark.parametrize("gamma", [3, 6])
def test_above_them_with_the_same_gamma(gamma: int) -> None:
    at = world(capacity=2, slow_down=1.1)
    oracle = run(f"oracle-dynamic@{gamma}", TURNING, at, knows)
    assert oracle.seconds <= run(f"memspec@{gamma}", TURNING, at, knows).seconds
    for name in NAMES:
        assert oracle.seconds <= run(f"static:{name}@{gamma}", TURNING, at, knows).seconds


def certain(*rows: tuple[float, float], length: int = 120, prompt: int = 300) -> TextTrace:
    """Each draft is right at every position or at none: from the begin, and from the middle on."""
    half = length // 2
    rates = np.array([[first] * half + [second] * (length - half) for first, second in rows])
    rates = np.concatenate([rates, np.zeros((len(NAMES) - len(rows), length))])
    return replace(text("code", np.random.default_rng(0), rates, length), prompt_length=prompt)


def test_the_next_draft_reads_while_another_one_runs() -> None:
    trace = certain((1.0, 0.0), (0.0, 1.0))
    outcome = run("oracle-dynamic@8", [trace], world(capacity=2, resident=NAMES[:2]))
    assert outcome.texts[0].rounds <= 119 // 9 + 4  # nearly all blocks whole, before the turn and behind it
    assert set(outcome.share) <= {"general", "code", "plain"}
    assert outcome.share["plain"] <= 1
    assert outcome.fallback_share == 0.0


def test_with_one_slot_it_leaves_a_draft_that_is_good_for_one_that_is_better() -> None:
    rng = np.random.default_rng(7)
    rates = dict(zip(NAMES, (0.3, 0.95, 0.0, 0.0, 0.0)))
    trace = replace(text("code", rng, rates, 200), prompt_length=20)
    outcome = run("oracle-dynamic", [trace], world(capacity=1, resident=("general",)))
    assert outcome.loads == 1
    assert outcome.share["code"] > 0.6 * outcome.rounds


def test_lookup_that_will_be_wrong_is_left_alone_and_phrases_that_are_right_are_run() -> None:
    length = 100
    columns = {"lookup_level": np.full(length - 1, 3, np.uint8), "lookup_accepts": np.zeros(length - 1, np.uint8)}
    wrong: Any = replace(certain((0.0, 0.0), length=length), **columns)
    at: World = world(STEEP, capacity=1, free=frozenset({"chat"}))
    oracle, plain = run("oracle-dynamic", [wrong], at), run("plain", [wrong], at)
    assert oracle.seconds == pytest.approx(plain.seconds)
    chatty = certain(*[(0.0, 0.0)] * 4, (1.0, 1.0), length=length)
    spoken = run("oracle-dynamic", [chatty], at)
    assert spoken.share["chat"] > 0.9 * spoken.rounds
