"""Which drafts to hold: what pays, what does not, who never goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor import View
from predictor.holding import Prospect, choose_holding

ROUND, LOAD, PLAIN = 0.03, 0.08, 33.0
START = View(
    round=8,
    resident=frozenset({"general", "math"}),
    loading=frozenset(),
    failed=frozenset(),
    capacity=2,
    drafts=("general", "code", "math", "law"),
    active="general",
    ranking=None,
    rounds_left=60.0,
)


def prospects(load: float = LOAD, **speeds: float) -> dict[str, Prospect]:
    return {name: Prospect(name, speed, speed / 100, load, 0.002) for name, speed in speeds.items()}


def held(view: View, found: dict[str, Prospect]) -> tuple[set[str], str]:
    holding = choose_holding(view, found, PLAIN, ROUND)
    assert holding is not None
    assert not holding.wait
    assert len(set(holding.wanted)) == len(holding.wanted)
    return set(holding.wanted[: view.capacity]), holding.reason


def test_a_better_draft_comes_and_the_worse_of_the_others_goes_with_a_reason() -> None:
    wanted, reason = held(START, prospects(general=41, code=62, math=35, law=30))
    assert wanted == {"code", "general"}
    assert reason.startswith("code 0.62 expected against general 0.41; pays back in ")
    assert "rounds" in reason


def test_the_best_comes_first() -> None:
    holding = choose_holding(START, prospects(general=41, code=62, math=35, law=30), PLAIN, ROUND)
    assert holding is not None
    assert holding.wanted[0] == "code"
    holding = choose_holding(START, prospects(general=41, code=20, math=55, law=30), PLAIN, ROUND)
    assert holding is not None
    assert holding.wanted[:2] == ("math", "general")


def test_a_few_percent_more_are_not_worth_a_load() -> None:
    wanted, reason = held(START, prospects(general=50.0, code=51.0, math=49, law=30))
    assert wanted == {"general", "math"}
    assert "general is best expected" in reason


def test_at_the_begin_of_a_text_the_prediction_is_followed_at_once() -> None:
    wanted, _ = held(replace(START, round=0), prospects(general=50.0, code=51.0, math=40, law=30))
    assert "code" in wanted


@pytest.mark.parametrize("left", [2.0, 5.0])
def test_a_load_that_does_not_pay_before_the_end_is_not_begun(left: float) -> None:
    found = prospects(general=41, code=50, math=35, law=30)
    assert held(replace(START, rounds_left=left), found)[0] == {"general", "math"}
    assert "code" in held(replace(START, rounds_left=100.0), found)[0]
    slow = prospects(load=100.0, general=41, code=50, math=35, law=30)
    assert held(replace(START, rounds_left=100.0), slow)[0] == {"general", "math"}


def test_the_draft_that_runs_is_no_victim_unless_clearly_worse() -> None:
    close = prospects(general=41, code=62, math=43, law=30)
    assert held(START, close)[0] == {"code", "general"}
    far = prospects(general=34, code=62, math=50, law=30)
    assert held(START, far)[0] == {"code", "math"}


def test_the_last_slot_insures_only_against_much() -> None:
    assert held(START, prospects(general=60, code=41, math=40, law=30))[0] == {"general", "math"}
    wanted, reason = held(START, prospects(general=60, code=50, math=35, law=30))
    assert wanted == {"general", "code"}
    assert "next best" in reason


def test_one_that_is_hardly_better_than_the_best_is_the_natural_second() -> None:
    assert held(START, prospects(general=50.0, code=51.0, math=40, law=30))[0] == {"general", "code"}


def test_one_load_at_a_time_before_the_second_best_has_its_turn() -> None:
    view = replace(START, loading=frozenset({"law"}), resident=frozenset({"general"}))
    assert held(view, prospects(general=60, code=50, math=35, law=40))[0] == {"general", "law"}


def test_an_empty_slot_is_filled_and_failed_drafts_are_passed_over() -> None:
    view = replace(START, resident=frozenset({"general"}), failed=frozenset({"code"}))
    assert held(view, prospects(general=60, code=90, math=35, law=40))[0] == {"general", "law"}
    nothing = replace(START, resident=frozenset(), active=None, round=0)
    assert held(nothing, prospects(general=60, code=90, math=35, law=40))[0] == {"code", "general"}


def test_one_slot_counts_the_rounds_without_a_draft() -> None:
    view = replace(START, resident=frozenset({"general"}), capacity=1)
    slow = 0.6  # twenty rounds
    found = prospects(load=slow, general=60, code=66, math=30, law=30)
    assert held(replace(view, rounds_left=150.0), found)[0] == {"general"}
    assert held(replace(view, rounds_left=150.0, capacity=2), found)[0] == {"code", "general"}
    assert held(replace(view, rounds_left=2000.0), found)[0] == {"code"}


def test_no_slots_or_no_drafts_hold_nothing() -> None:
    assert choose_holding(replace(START, capacity=0), prospects(general=60), PLAIN, ROUND) is None
    assert choose_holding(START, {}, PLAIN, ROUND) is None


def test_one_that_is_worse_than_plain_steps_is_not_loaded_for_the_first_slot() -> None:
    found = prospects(general=20, code=32, math=18, law=10)
    assert held(START, found)[0] == {"general", "math"}
