"""Foresight in tables: the rounds that a replay then plays, and the course of fewest seconds through them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from predictor import CostTable, Holding, View
from predictor.policies.base import LOOKUP
from predictor.policies.oracle import CHECK_ONLY, PLAIN_WAY, OracleDynamic, Way
from predictor.replay import Replay, TextTrace, World
from predictor.replay_ahead import Ahead, Course, Entry, pieces
from tests.predictor.replay_texts import FLAT, NAMES, STEEP, texts, world

WAYS = (
    PLAIN_WAY, Way(None, 3, True), Way("code", 1, True), Way("general", 5, True), Way("general", 5, False),
    Way("law", 8, False), Way("chat", 4, True), Way("chat", 2, False),
)  # fmt: skip
COURSE = {"general": (Way("general", 2, True), Way("general", 4, False)), "code": (Way("code", 3, True),)}
COMMON = (Way(None, 3, True), PLAIN_WAY)


def looked(trace: TextTrace, seed: int = 5) -> TextTrace:
    """With a match of lookup at some positions, drafts that are not always sure, and one that often has nothing."""
    rng = np.random.default_rng(seed)
    columns = trace.accepts.shape[1]
    level = (rng.integers(0, 5, columns)).astype(np.uint8)
    right = np.minimum(rng.integers(0, 4, columns), np.arange(columns, 0, -1)).astype(np.uint8)
    confidences = np.full((len(NAMES), columns, 8), 200, np.uint8)
    for row in confidences.reshape(-1, 8):
        row[int(rng.integers(1, 12)) :] = 0
    confidences[2, ::3, 0] = 0
    levels = {"chat": (rng.random(columns) < 0.5).astype(np.uint8)}
    return replace(trace, lookup_level=level, lookup_accepts=right, confidences=confidences, levels=levels)


def device(**more: Any) -> World:
    """Reading takes no time, so that a round's seconds are those of its way."""
    costs = CostTable(STEEP, dict.fromkeys(NAMES, 0.001), catch_up=dict.fromkeys(NAMES, 0.0))
    return World(NAMES, costs, 4, free=frozenset({"chat"}), resident=NAMES[:4], overhead=0.001, **more)


class Follows(OracleDynamic):
    """Goes one way all the time, by the own plan of oracles."""

    def reads(self) -> str:
        return self._active or LOOKUP

    def hold(self, view: View) -> Holding | None:
        return None


def played(at: World, trace: TextTrace, way: Way) -> list[tuple[int, float]]:
    """(position, seconds) at the begin of every round, and at the end."""
    running, found = Replay(at), []
    made = Follows(at.known_costs(), at.weighted, None, 8, CHECK_ONLY)
    made._way = way
    made._active = way.draft if way.draft in at.weighted else None
    running.policy = made
    observe = made.observe

    def observed(observation):  # type: ignore[no-untyped-def]
        found.append((running.position, running._text.seconds))
        observe(observation)

    made.observe = observed  # type: ignore[method-assign]
    running.text(trace)
    return [*found, (running.position, running._text.seconds)]


@pytest.mark.parametrize("limit", [0, 200])
@pytest.mark.parametrize("rounds", [None, 0, 1, 4, 7])
def test_tables_are_what_rounds_give(rounds: int | None, limit: int) -> None:
    at, trace = device(max_new_tokens=limit), looked(texts(1, length=40)[0])
    run = Replay(at)
    ahead = Ahead(at, trace, run._verify, run._steps)
    if rounds:
        for table, column in zip(ahead.after(WAYS, rounds), ahead.tables(WAYS).after_here(rounds, 9)):
            assert (table[:, 9] == column).all()
    for number, way in enumerate(WAYS):
        steps = played(at, trace, way)
        assert (steps[0][0], steps[-1][0]) == (1, 40)
        ends, seconds = ahead.after(WAYS, rounds)
        for count, (start, begun) in enumerate(steps):
            end, ended = steps[-1 if rounds is None else min(count + rounds, len(steps) - 1)]
            assert ends[number, start] == end, (way, start)
            assert seconds[number, start] == pytest.approx(ended - begun), (way, start)


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_course_is_the_one_of_fewest_seconds(capacity: int) -> None:
    at, trace = world(FLAT, slow_down=1.5), looked(texts(1, length=40)[0])
    run = Replay(at)
    ahead = Ahead(at, trace, run._verify, run._steps)
    course = Course(ahead, COURSE, COMMON, 4, capacity)
    away = 0.5 * 0.08 if capacity < len(COURSE) else 0.0
    waits = 3 if capacity == 1 else 0  # a load of 2.7 plain steps, and one piece of the prompt

    def along(way: Way, rounds: int, start: int) -> tuple[int, float]:
        ends, seconds = ahead.after((way,), rounds)
        return int(ends[0, start]), float(seconds[0, start])

    @cache
    def run_by(draft: str | None, start: int) -> float:
        if start >= 40:
            return 0.0
        ways = (*COURSE.get(str(draft), ()), *COMMON)
        return min(taken + left(draft, end) for end, taken in (along(way, 4, start) for way in ways))

    @cache
    def left(draft: str | None, start: int) -> float:
        if start >= 40:
            return 0.0
        found = [run_by(draft, start)]
        for other in COURSE:
            price = FLAT[1] / 600 * (40 + start) + away
            for way in COMMON:
                end, taken = along(way, waits, start)
                found.append(taken + price + run_by(other, end))
        return min(found)

    for number, draft in enumerate((*COURSE, None)):
        for start in (39, 30, 17, 2, 1):
            assert course.run[start, number] == pytest.approx(run_by(draft, start))
            assert course.left[start, number] == pytest.approx(left(draft, start))


def test_a_draft_that_must_be_waited_for_is_weighed_with_what_runs_meanwhile() -> None:
    at, trace = world(FLAT), texts(1, length=60)[0]  # a code text
    run = Replay(at)
    ahead = Ahead(at, trace, run._verify, run._steps)
    own = {name: (Way(name, 4, False),) for name in ("general", "code")}
    near, far = Entry(0, 0.0, True), Entry(40, 0.1, True)
    assert ahead.foresee(own, COMMON, 4, 2, 1, {"general": near, "code": near})[0].way.draft == "code"
    first = ahead.foresee(own, COMMON, 4, 2, 1, {"general": near, "code": Entry(1, 0.01, True)})[0]
    assert (first.way, first.meanwhile) == (Way("code", 4, False), Way("general", 4, False))
    assert ahead.foresee(own, COMMON, None, 2, 1, {"general": near, "code": far})[0].way.draft == "general"
    alone = ahead.foresee(own, COMMON, 4, 1, 1, {"general": near, "code": Entry(1, 0.01, False)})[0]
    assert (alone.way.draft, alone.meanwhile.draft) == ("code", None)  # the one slot is loaded into


def test_pieces_are_counted_with_the_round_in_which_the_draft_runs() -> None:
    assert [pieces(behind) for behind in (0, 16, 17, 80, 81, 256)] == [0, 0, 1, 1, 2, 4]
