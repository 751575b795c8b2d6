"""Hidden states of a conversation: exact under writes, crops and gaps, limited in memory, whole after an interrupt."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from drafts.states import HiddenStates

SIZE = 4


def row(position: int, version: int = 0) -> np.ndarray:
    return np.full(SIZE, position + version / 1024, np.float32)


def rows(begin: int, end: int, version: int = 0) -> np.ndarray:
    return np.array([row(position, version) for position in range(begin, end)], np.float32).reshape(-1, SIZE)


def check(states: HiddenStates, truth: dict[int, np.ndarray]) -> None:
    """What is held is right and without gaps."""
    held = states.rows(states.begin, states.end)
    assert held.shape == (len(states), SIZE)
    for place, position in enumerate(range(states.begin, states.end)):
        assert np.array_equal(held[place], truth[position]), position


@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("seed", range(8))
def test_any_history_holds_the_last_window_exactly(window: int, seed: int) -> None:
    rng = random.Random(seed)
    states, truth, end, oldest = HiddenStates(SIZE, window), {}, 0, 0
    for version in range(200):
        kind = rng.random()
        if kind < 0.25:
            end = rng.randrange(end + 1)
            states.crop(end)
        elif kind < 0.3:
            end += rng.randrange(1, 5)  # positions that nobody wrote
        start, count = end, rng.randrange(0, 5 * window if kind > 0.9 else 5)
        if start > states.end or start <= states.begin:
            oldest = start
        states.write(start, rows(start, start + count, version))
        end = start + count
        truth.update({position: row(position, version) for position in range(start, end)})
        check(states, truth)
        assert states.end == end
        # All of the last window, and the one before it, that was not dropped before by a longer text.
        oldest = max(oldest, states.begin)
        assert states.begin <= max(oldest, end - 2 * window)
        assert states._buffer.nbytes <= (3 * window + 64) * SIZE * 4


def test_a_write_into_the_past_forgets_what_followed() -> None:
    states = HiddenStates(SIZE, 8)
    states.write(0, rows(0, 6))
    states.write(3, rows(3, 4, 1))
    assert (states.begin, states.end) == (0, 4)
    assert np.array_equal(states.rows(0, 4), np.concatenate([rows(0, 3), rows(3, 4, 1)]))


def test_rows_behind_a_gap_stand_alone() -> None:
    states = HiddenStates(SIZE, 8)
    states.write(0, rows(0, 3))
    states.write(5, rows(5, 7))
    assert (states.begin, states.end) == (5, 7)
    with pytest.raises(IndexError, match=r"4\.\.7 are not held, only 5\.\.7"):
        states.rows(4, 7)


def test_what_is_written_is_copied() -> None:
    states, given = HiddenStates(SIZE, 8), rows(0, 2)
    states.write(0, given)
    given.fill(np.nan)
    assert np.array_equal(states.rows(0, 2), rows(0, 2))


def test_a_crop_into_the_past_leaves_fewer_rows_than_the_window() -> None:
    states = HiddenStates(SIZE, 4)
    for start in range(0, 200, 2):
        states.write(start, rows(start, start + 2))
    begin = states.begin
    states.crop(begin + 1)
    assert (states.begin, states.end) == (begin, begin + 1)
    states.crop(begin)
    assert len(states) == 0
    states.crop(0)
    assert (states.begin, states.end) == (0, 0)


def test_a_crop_by_a_window_leaves_a_window_whenever_it_comes() -> None:
    for length in range(60, 300):
        states = HiddenStates(SIZE, 16)
        for start in range(length):
            states.write(start, rows(start, start + 1))
        states.crop(length - 16)
        assert len(states) >= 16, length


def test_widening_keeps_what_is_there() -> None:
    states = HiddenStates(SIZE, 2)
    states.write(0, rows(0, 2))
    states.widen(100)
    states.widen(3)
    for start in range(2, 100):
        states.write(start, rows(start, start + 1))
    assert np.array_equal(states.rows(0, 100), rows(0, 100))


@pytest.mark.parametrize("shape", [(2, SIZE + 1), (SIZE,), (1, 2, SIZE)])
def test_rows_of_another_shape_are_refused_and_change_nothing(shape: tuple[int, ...]) -> None:
    states = HiddenStates(SIZE, 8)
    states.write(0, rows(0, 2))
    with pytest.raises(ValueError, match="shape"):
        states.write(2, np.zeros(shape, np.float32))
    assert (states.begin, states.end) == (0, 2)


class _Trip:
    """Raises at the n-th line that runs in `drafts.states`."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith("drafts/states.py"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace hook for itself")
def test_ctrl_c_at_any_line_leaves_only_rows_that_were_written() -> None:
    reached = 0
    for at in range(1, 400):
        states, truth = HiddenStates(SIZE, 3), {}
        sys.settrace(_Trip(at))
        try:
            for start in range(40):  # past the point where the rows are moved
                truth.update({position: row(position) for position in range(2 * start, 2 * start + 2)})
                states.write(2 * start, rows(2 * start, 2 * start + 2))
        except KeyboardInterrupt:
            reached += 1
        finally:
            sys.settrace(None)
        if states.begin <= states.end:
            check(states, truth)
        states.crop(1000)
        states.write(90, rows(90, 91))
        assert (states.begin, states.end) == (90, 91)
        assert np.array_equal(states.rows(90, 91), rows(90, 91))
    assert reached > 300
