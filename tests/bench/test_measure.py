"""Rates from emissions: the true decode rate, whatever the answer looks like."""

from __future__ import annotations

import pytest

from edgespec.bench.measure import first_difference, measure, spread
from tests.bench.fakes import clocked


def run(reply: dict, limit: int = 100, **more):
    return measure(50, reply["token_ids"], reply["emissions"], limit=limit, **more)


def test_decode_rate_leaves_out_the_prefill_and_counts_tokens_not_chunks():  # B022, B172, B181
    answer = run(clocked(list(range(41)), chunk=4))
    assert answer.first_token_s == pytest.approx(0.1)
    assert answer.prefill_rate == pytest.approx(500)
    assert answer.decode_tokens == 40
    assert answer.decode_rate == pytest.approx(400)
    assert run(clocked(list(range(41)), chunk=1)).decode_rate == pytest.approx(100)


def test_a_long_prompt_changes_the_prefill_alone():  # B172
    short, long = run(clocked(list(range(9)))), run(clocked(list(range(9)), prefill=5.0))
    assert long.decode_rate == pytest.approx(short.decode_rate)
    assert long.prefill_rate == pytest.approx(10)


def test_tokens_that_come_with_the_first_emission_are_no_decoding():  # B182
    answer = measure(5, list(range(12)), [(0.1, 4), (0.12, 4), (0.14, 4)], limit=100)
    assert answer.first_token_s == pytest.approx(0.1)
    assert answer.decode_rate == pytest.approx(8 / 0.04)


def test_an_emission_without_tokens_neither_starts_nor_stops_the_clock():  # B182
    answer = measure(5, [1, 2, 3], [(0.05, 0), (0.1, 1), (0.2, 2), (9.0, 0)], limit=100)
    assert (answer.first_token_s, answer.decode_s) == (pytest.approx(0.1), pytest.approx(0.1))


def test_tokens_behind_an_end_token_inside_a_block_do_not_count():  # B022
    reply = clocked([5, 6, 7, 8, 2, 9, 9, 9, 9], chunk=4)
    answer = run(reply, eos_ids=[2])
    assert answer.token_ids == (5, 6, 7, 8, 2)
    assert (answer.decode_tokens, answer.decode_s) == (4, pytest.approx(0.01))
    cut = run(clocked([5, 6, 7, 8, 9, 2, 9, 9, 9], chunk=4), eos_ids=[2])
    assert (cut.decode_tokens, cut.decode_rate) == (5, pytest.approx(250))  # a block of 4 and 1 token of the next


def test_tokens_beyond_the_limit_do_not_count():
    answer = run(clocked(list(range(13)), chunk=4), limit=10)
    assert (len(answer.token_ids), answer.decode_tokens, answer.decode_s) == (10, 9, pytest.approx(0.03))


def test_answers_of_no_and_of_one_token_have_no_decode_rate():  # B022
    empty, single = run(clocked([])), run(clocked([4]))
    assert (empty.first_token_s, empty.prefill_rate, empty.decode_rate) == (None, None, None)
    assert single.decode_rate is None
    assert single.prefill_rate == pytest.approx(500)


@pytest.mark.parametrize(
    "emissions", [[(0.1, 1)], [(0.1, 1), (0.2, 3)], [(0.2, 1), (0.1, 1)], [(0.1, 3), (0.2, -1)]], ids=str
)
def test_a_report_that_contradicts_itself_gives_no_rate(emissions):
    with pytest.raises(ValueError, match="emissions"):
        measure(5, [1, 2], emissions, limit=10)


def test_spread_and_first_difference():
    assert spread([None, None]) is None
    found = spread([3.0, None, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, 3.0, 3)
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
