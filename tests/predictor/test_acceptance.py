"""Acceptance: the long run, an expectation for one text, further positions, what lasts from run to run."""

from __future__ import annotations

import pytest

from predictor.acceptance import Acceptance


def after(arm: Acceptance, blocks: int, proposed: int, accepted: int) -> Acceptance:
    for _ in range(blocks):
        arm.update(proposed, accepted)
    return arm


def test_an_expectation_takes_the_place_of_the_long_run_and_some_tries_outweigh_it() -> None:
    arm = after(Acceptance(0.5, 4), 200, 1, 0)
    arm.expect(0.5)
    arm.age()  # a text with a ranking is followed by another
    before = arm.rates()[0]
    arm.expect(0.8)
    assert before < 0.1
    assert arm.rates()[0] > 0.65
    after(arm, 20, 1, 0)
    assert arm.rates()[0] < 0.48  # half way or more to what is seen
    arm.age()
    assert arm.rates()[0] < 0.1  # it was for that text only


def test_without_tries_the_expectation_is_the_rate() -> None:
    arm = Acceptance(0.5, 4)
    arm.expect(0.3)
    assert arm.rates()[0] == pytest.approx(0.3)
    arm.expect(None)
    assert arm.rates()[0] == pytest.approx(0.5)


def test_in_a_text_that_the_draft_does_badly_in_further_tokens_are_worse_too() -> None:
    arm = after(Acceptance(0.5, 4), 200, 4, 4)
    arm.expect(0.9)
    arm.age()
    good = arm.rates()
    arm.expect(0.2)
    bad = arm.rates()
    assert min(good[:4]) > 0.8
    assert bad[0] < 0.35
    assert bad[1] < 0.5 < good[1]


def test_usual_is_the_long_run_whatever_is_expected() -> None:
    arm = after(Acceptance(0.5, 2), 100, 1, 1)
    usual = arm.usual()
    arm.expect(0.1)
    assert arm.usual() == usual > 0.9


def test_what_an_earlier_run_learned_weighs_a_few_tries_only() -> None:
    old = after(Acceptance(0.5, 4), 300, 4, 0)
    new = Acceptance(0.5, 2)
    new.recall(*old.history(), 8.0)
    assert new.rates()[0] < 0.25
    assert new.history()[0][0][1] == pytest.approx(8.0)
    after(new, 30, 2, 2)
    assert new.rates()[0] > 0.75


def test_promised_tokens_follow_the_rates_up_to_a_hopeless_one() -> None:
    arm = after(Acceptance(0.9, 4), 10, 4, 4)
    first, second, *_ = arm.rates()
    assert len(arm.tokens()) == 4
    assert arm.tokens()[:2] == [1 + first, 1 + first + first * second]
    hopeful = arm.tokens()
    arm.expect(0.1)
    assert arm.tokens()[0] == 1 + arm.rates()[0] < hopeful[0]
    arm.expect(None)
    assert arm.tokens() == hopeful
    after(arm, 200, 1, 0)
    assert len(arm.tokens()) < 4


def test_what_was_not_judged_changes_nothing() -> None:
    arm = after(Acceptance(0.5, 4), 5, 3, 2)
    rates = arm.rates()
    arm.update(0, 0)
    assert arm.rates() is rates
