"""Foresight in tables: the same rounds that playing them one by one gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.policies.base import LOOKUP, LOOKUP_LEVEL
from predictor.replay import Replay, TextTrace, World
from predictor.replay_ahead import Ahead
from tests.predictor.replay_texts import NAMES, texts, world


def looked(trace: TextTrace) -> TextTrace:
    """With a match of lookup at some positions."""
    rng = np.random.default_rng(5)
    columns = trace.accepts.shape[1]
    level = (rng.integers(0, 5, columns)).astype(np.uint8)
    right = np.minimum(rng.integers(0, 4, columns), np.arange(columns, 0, -1)).astype(np.uint8)
    return replace(trace, lookup_level=level, lookup_accepts=right)


def one_by_one(
    at: World, trace: TextTrace, draft: str | None, gamma: int, rounds: int | None, start: int, lookup: bool
) -> tuple[int, float]:
    end, seconds = trace.accepts.shape[1] + 1, 0.0
    while start < end and rounds != 0:
        block = min(gamma, end - start - 1)
        if lookup and block and trace.lookup_level[start - 1] >= LOOKUP_LEVEL:
            name, right = LOOKUP, int(trace.lookup_accepts[start - 1])
        elif draft is None:
            name, right, block = LOOKUP, 0, 0
        else:
            name, right = draft, int(trace.accepts[NAMES.index(draft), start - 1])
        seconds += at.costs.verify(block + 1) + block * at.costs.draft(name) + at.overhead
        start += min(right, block) + 1
        rounds = None if rounds is None else rounds - 1
    return start, seconds


@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize("rounds", [None, 1, 4, 7])
def test_tables_are_what_rounds_give(rounds: int | None, lookup: bool) -> None:
    at, trace = world(overhead=0.001), looked(texts(1, length=30)[0])
    run = Replay(at)
    ahead = Ahead(at, trace, run._verify, run._steps)
    for choice in ((None, 0), (None, 3), ("code", 1), ("general", 5), ("law", 8)):
        for start in (1, 2, 13, 28, 29, 30):
            found = ahead.stretch(choice, rounds, start, lookup)
            end, seconds = one_by_one(at, trace, *choice, rounds, start, lookup)
            assert (found.end, found.tokens) == (end, end - start)
            assert found.seconds == pytest.approx(seconds)


def test_the_best_is_the_first_of_the_fastest() -> None:
    at, trace = world(), looked(texts(1, length=30)[0])
    run = Replay(at)
    ahead = Ahead(at, trace, run._verify, run._steps)
    choices = tuple((name, gamma) for name in NAMES for gamma in (1, 3, 5)) + ((None, 0), (None, 0))
    for start in range(1, 31):
        found, stretch = ahead.best(choices, 4, start, True)
        speeds = []
        for choice in choices:
            end, seconds = one_by_one(at, trace, *choice, 4, start, True)
            speeds.append((end - start) / seconds if seconds else 0.0)
        assert max(speeds) == pytest.approx(stretch.tokens / stretch.seconds if stretch.seconds else 0.0)
        assert speeds[choices.index(found)] == pytest.approx(max(speeds))
