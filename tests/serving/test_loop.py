"""The serving loop on a toy decoder: texts, order, pieces of prompts, cancelling, faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from drafts.ngram import NgramDraft
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.errors import EdgespecError
from edgespec.serving.request import Request
from predictor import AutoPlanner, FixedPlanner
from predictor.catch_up import FREELY, PIECE
from tests.serving.stage import WAIT, Stage
from tests.support.scripted import (
    PROMPT,
    ScriptedDraft,
    ToyDecoder,
    anti,
    drafter,
    mixed,
    oracle,
    plain_greedy,
    self_draft,
    session,
)

PROMPTS = [[5, 6, 7, 8], [9], [3, 4] * 20, [30, 31, 32], [5, 6, 7, 9], [40] * 70, [11, 12, 11, 12, 11], [50, 2]]
LONG = [7 + i % 40 for i in range(160)]


def text(prompt: list[int], count: int) -> list[int]:
    return plain_greedy(ToyDecoder(), prompt, count)


def alone(prompt: list[int], drafts: list[Any] = (), **params: Any) -> Any:  # type: ignore[assignment]
    generation = Generation(session(None, drafts), prompt, SamplingParams(**params))
    list(generation.deltas())
    return generation.result


# Texts


@pytest.mark.parametrize("slots", [1, 4, 8])
@pytest.mark.parametrize("load", ["edgespec", "none", "fixed:2", "nightjar", "tetris:6"])
@pytest.mark.parametrize("planner", [None, AutoPlanner])
def test_eight_texts_at_once_are_those_that_each_has_alone(slots: int, load: str, planner: Any) -> None:
    target = ToyDecoder()
    target.batch_slots = slots
    drafts = [NgramDraft(), self_draft(ToyDecoder()), mixed([*PROMPT, *text(PROMPT, 40)], lambda at: at % 3 == 0)]
    kwargs = {} if planner is None else {"planner": planner}
    stage = Stage(target, drafts, load=load, prefill_rows=16, **kwargs)
    requests = [stage.submit(prompt, max_new_tokens=10 + 3 * i) for i, prompt in enumerate(PROMPTS)]
    for i, result in enumerate(stage.ran(*requests)):
        assert list(result.token_ids) == text(PROMPTS[i], 10 + 3 * i), i
        assert result.stats.new_tokens == 10 + 3 * i
        assert result.stats.accepted_tokens <= result.stats.proposed_tokens
    assert max(record.sequences for record in stage.records) == 8
    assert {request.status for request in requests} == {"finished"}


@pytest.mark.parametrize("kind", ["self", "oracle", "anti", "mixed", "empty", "short", "ngram"])
def test_every_draft_is_used_in_batches_as_alone(kind: str) -> None:
    whole = [*PROMPT, *text(PROMPT, 40)]
    stage = Stage(None, [drafter(kind, ToyDecoder(), whole)])
    requests = [stage.submit(PROMPT, max_new_tokens=40) for _ in range(4)]
    expected = alone(PROMPT, [drafter(kind, ToyDecoder(), whole)], max_new_tokens=40)
    for result in stage.ran(*requests):
        assert result.token_ids == expected.token_ids == tuple(whole[4:])
        assert result.drafts == expected.drafts
        assert result.stats.rounds == expected.stats.rounds
        assert result.stats.acceptance_by_position == expected.stats.acceptance_by_position


def test_everything_about_the_answer_is_as_alone() -> None:
    """Stop strings, end tokens, log probabilities, limits, penalties, none at all."""
    whole = [*PROMPT, *text(PROMPT, 40)]
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 40, "logprobs": 2},
        {"max_new_tokens": 40, "stop": ("ab", "!")},
        {"max_new_tokens": 40, "stop_token_ids": (whole[9],)},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1},
        {"max_new_tokens": 30, "repetition_penalty": 1.5},
        {"max_new_tokens": 30, "temperature": 0.8, "seed": 7},
        {"max_new_tokens": 30, "temperature": 1.2, "seed": 8, "top_k": 5},
    ]
    stage = Stage(None, [oracle(whole)])
    requests = [stage.submit(PROMPT, **params) for params in asked]
    for params, result in zip(asked, stage.ran(*requests), strict=True):
        expected = alone(PROMPT, [oracle(whole)], **params)
        for field in ("text", "token_ids", "finish_reason", "drafts", "logprobs"):
            assert getattr(result, field) == getattr(expected, field), (params, field)


@pytest.mark.parametrize("stop", [(), ("ab",), ("!",)])
def test_each_piece_has_the_log_probabilities_of_its_tokens(stop: tuple[str, ...]) -> None:
    whole = [*PROMPT, *text(PROMPT, 40)]
    stage = Stage(None, [mixed(whole, lambda at: at % 3 > 0)])
    plain = stage.submit(PROMPT, max_new_tokens=3)
    requests = [stage.submit(PROMPT, max_new_tokens=40, logprobs=1, stop=stop) for _ in range(2)]
    for request, result in zip([plain, *requests], stage.ran(plain, *requests)):
        if request is plain:
            assert all(piece.logprobs is None for piece in plain)
            continue
        pieces = list(request)
        for piece in pieces:
            assert [each.token_id for each in piece.logprobs or ()] == list(piece.token_ids)
        assert tuple(each for piece in pieces for each in piece.logprobs or ()) == result.logprobs
        assert len(pieces) > 1


@pytest.mark.parametrize("beside", [0, 1, 3, 7])
def test_a_seeded_text_does_not_depend_on_its_neighbours(beside: int) -> None:
    params = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}
    whole = [*PROMPT, *text(PROMPT, 40)]
    stage = Stage(None, [mixed(whole, lambda at: at % 2 == 0)], planner=AutoPlanner, load="nightjar")
    first = stage.submit(PROMPT, **params)
    for prompt in PROMPTS[:beside]:
        stage.submit(prompt, max_new_tokens=50, temperature=0.9)
    (result,) = stage.ran(first)
    assert result.token_ids == alone(PROMPT, [mixed(whole, lambda at: at % 2 == 0)], **params).token_ids


def test_the_pieces_are_the_result() -> None:
    stage = Stage(None, [NgramDraft()])
    requests = [stage.submit(prompt, max_new_tokens=25) for prompt in PROMPTS]
    with stage.serving():
        for request in requests:
            pieces = list(request)
            result = request.result(WAIT)
            assert "".join(piece.text for piece in pieces) == result.text
            assert tuple(token for piece in pieces for token in piece.token_ids) == result.token_ids
            assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
            assert list(request) == pieces  # again, from the first one on


def test_one_that_runs_alone_has_the_very_rounds_of_a_session() -> None:
    whole = [*PROMPT, *text(PROMPT, 40)]
    stage = Stage(None, [mixed(whole, lambda at: at % 4 == 0)])
    (result,) = stage.ran(stage.submit(PROMPT, max_new_tokens=40))
    expected = alone(PROMPT, [mixed(whole, lambda at: at % 4 == 0)], max_new_tokens=40)
    assert result.stats.round_tokens == expected.stats.round_tokens
    assert result.stats.gamma_histogram == expected.stats.gamma_histogram
    rounds = [record for record in stage.records if record.requests]
    assert [sum(record.emitted) for record in rounds] == expected.stats.round_tokens
    assert all(record.sequences == 1 for record in stage.records)
    assert {record.resident for record in rounds} == {("mixed",)}


# Order and pace


def test_first_come_first_served_and_everybody_has_a_round_in_every_batch() -> None:
    stage = Stage(most=4)
    requests = [stage.submit([5 + i, 6], max_new_tokens=6 + 5 * (i % 3)) for i in range(20)]
    stage.ran(*requests)
    assert stage.admitted == [request.id for request in requests]
    assert max(len(record.requests) for record in stage.records) == 4
    for request in requests:
        own = [at for at, record in enumerate(stage.records) if request.id in record.requests]
        assert own == list(range(own[0], own[-1] + 1)), "it was left out of a batch"


def test_a_long_prompt_does_not_hold_up_those_that_run() -> None:
    """It comes in pieces, and each batch that has one has a round of everybody else."""
    stage, late = Stage(prefill_rows=16), list[Request]()
    running = [stage.submit(prompt, max_new_tokens=60) for prompt in PROMPTS[:3]]
    stage.before_batch[6] = lambda: late.append(stage.submit(LONG, max_new_tokens=5))
    stage.ran(*running)
    assert list(late[0].result(WAIT).token_ids) == text(LONG, 5)
    pieces = [record for record in stage.records[7:] if record.prefill_rows]
    assert [record.prefill_rows for record in pieces] == [16] * 10
    assert all(len(record.requests) == 3 for record in pieces)
    assert all(min(record.emitted) >= 1 for record in pieces)


def test_short_prompts_share_a_piece_and_the_older_one_goes_first() -> None:
    stage, late = Stage(prefill_rows=16), list[Request]()
    running = stage.submit([9], max_new_tokens=30)
    stage.before_batch[2] = lambda: late.extend(stage.submit([10 + i] * 7, max_new_tokens=20) for i in range(3))
    stage.ran(running)
    pieces = [(record.prefill_rows, len(record.requests)) for record in stage.records if record.prefill_rows]
    assert pieces == [(1, 0), (16, 1), (5, 3)]  # 7 + 7 + 2, then the rest
    for i, request in enumerate(late):
        assert list(request.result(WAIT).token_ids) == text([10 + i] * 7, 20)


def test_two_hundred_requests_and_none_is_lost() -> None:
    stage = Stage(most=8)
    requests = [stage.submit([5 + i % 50, 6 + i % 7], max_new_tokens=3 + i % 4) for i in range(200)]
    results = stage.ran(*requests)
    for i, result in enumerate(results):
        assert list(result.token_ids) == text([5 + i % 50, 6 + i % 7], 3 + i % 4)
    assert stage.loop is not None
    assert stage.loop.totals.finished == 200
    assert stage.loop.totals.tokens == sum(len(result.token_ids) for result in results)
    assert len(stage.events) == 201  # each was released, then the loop ended


def test_without_room_the_first_waits_and_nobody_overtakes_it() -> None:
    stage = Stage(most=8, room=2)
    requests = [stage.submit([5 + i], max_new_tokens=5 + i) for i in range(6)]
    stage.ran(*requests)
    assert stage.admitted == [request.id for request in requests]
    assert max(record.sequences for record in stage.records) == 2
    assert any(record.elastic == "blocked" for record in stage.records)


def test_what_does_not_even_fit_alone_fails_instead_of_waiting_for_ever() -> None:
    stage = Stage(room=0)
    request = stage.submit(PROMPT)
    with stage.serving(), pytest.raises(EdgespecError, match="no room"):
        request.result(WAIT)


# Deadlines


def test_a_deadline_ends_what_waits_and_what_runs() -> None:
    stage = Stage(most=1)
    running = stage.submit(PROMPT, max_new_tokens=100)
    waiting = stage.submit(PROMPT, deadline=0.0)  # long past
    stage.before_batch[5] = lambda: setattr(running, "deadline", 0.0)
    stage.ran(running, waiting)
    for request in (running, waiting):
        assert request.result(WAIT).finish_reason == "cancelled"
        assert (request.status, request.cancel_reason) == ("cancelled", "deadline")
    assert waiting.result().token_ids == ()
    assert list(running.result().token_ids) == text(PROMPT, 6)


# Cancelling


def test_cancelled_in_the_queue() -> None:
    stage = Stage(most=1)
    stage.gate.clear()
    first, second, third = (stage.submit(PROMPT, max_new_tokens=4) for _ in range(3))
    with stage.serving():
        second.cancel("the client left")
        stage.gate.set()
        assert [piece.finish_reason for piece in second] == ["cancelled"]
        assert (second.status, second.cancel_reason) == ("cancelled", "the client left")
        assert second.result(WAIT).stats.prompt_tokens == 4
        for request in (first, third):
            assert list(request.result(WAIT).token_ids) == text(PROMPT, 4)
    assert second.id not in stage.admitted
    assert second.result().logprobs is None


def test_one_that_asked_for_log_probabilities_has_them_also_if_there_are_none() -> None:
    stage = Stage()
    request = stage.submit(PROMPT, logprobs=1)
    request.cancel()
    (result,) = stage.ran(request)
    assert result.logprobs == ()


def test_cancelled_in_its_prefill() -> None:
    stage, late = Stage(prefill_rows=16), list[Request]()
    other = stage.submit(PROMPT, max_new_tokens=40)
    stage.before_batch[2] = lambda: late.append(stage.submit(LONG, max_new_tokens=4))
    stage.before_batch[6] = lambda: late[0].cancel()
    (result,) = stage.ran(other)
    assert list(result.token_ids) == text(PROMPT, 40)
    cancelled = late[0].result(WAIT)
    assert (cancelled.finish_reason, cancelled.token_ids) == ("cancelled", ())
    assert cancelled.stats.prefill_seconds > 0
    assert [record.prefill_rows for record in stage.records[3:8]] == [16, 16, 16, 16, 0]


def test_cancelled_in_a_round() -> None:
    stage = Stage()
    requests = [stage.submit([5 + i, 6], max_new_tokens=50) for i in range(3)]
    stage.before_batch[20] = requests[1].cancel
    first, got, third = stage.ran(*requests)
    assert got.finish_reason == "cancelled"
    assert list(got.token_ids) == text([6, 6], 21)  # the round that ran still counts
    assert list(first.token_ids) == text([5, 6], 50)
    assert list(third.token_ids) == text([7, 6], 50)
    requests[0].cancel()  # too late: nothing happens
    assert (requests[0].status, requests[0].cancel_reason) == ("finished", None)


def test_cancelled_while_its_draft_guesses() -> None:
    def script(tokens: Any, gamma: int) -> list[int]:
        if len(tokens) == 12:
            requests[0].cancel()
        return [2] * gamma

    stage = Stage(None, [ScriptedDraft(script)])
    requests = [stage.submit([5 + i, 6], max_new_tokens=30) for i in range(2)]
    first, second = stage.ran(*requests)
    assert first.finish_reason == "cancelled"
    assert len(first.token_ids) == 11  # of that round still
    assert list(second.token_ids) == text([6, 6], 30)


# What drafts read, and what is not worth their time


class Reader(ScriptedDraft):
    """Has to read the text before it guesses, and notes how much at once, and how far it was behind when it guessed."""

    kind = "head"

    def __init__(self, made: list[Reader]) -> None:
        super().__init__(lambda tokens, gamma: [2] * gamma, "reader")
        self.read, self.made = 0, made
        self.pieces: list[int] = []
        self.late: list[int] = []

    def open(self) -> Reader:
        self.made.append(Reader(self.made))
        return self.made[-1]

    def behind(self, tokens: Sequence[int]) -> int:
        return max(len(tokens) - 1 - self.read, 0)

    def catch_up(self, tokens: Sequence[int], limit: int) -> int:
        self.pieces.append(min(limit, self.behind(tokens)))
        self.read += self.pieces[-1]
        return self.behind(tokens)

    def propose(self, tokens: Sequence[int], gamma: int, choose: Any, *, floor: float = 0.0) -> Any:
        self.late.append(self.behind(tokens))
        self.read = len(tokens)
        return super().propose(tokens, gamma, choose, floor=floor)

    def crop(self, length: int) -> None:
        self.read = min(self.read, length)


def test_a_draft_that_lags_reads_in_pieces_while_others_run() -> None:
    made: list[Reader] = []
    stage = Stage(None, [Reader(made)], load="fixed:2")
    requests = [stage.submit(LONG, max_new_tokens=20 + 5 * i) for i in range(2)]
    for i, result in enumerate(stage.ran(*requests)):
        assert list(result.token_ids) == text(LONG, 20 + 5 * i)
        assert result.stats.draft_share["reader"] > 5
        assert result.stats.catch_up_seconds > 0
    assert len(made) == 2
    for reader in made:
        assert reader.pieces[:2] == [PIECE, PIECE]
        assert max(reader.pieces) <= PIECE
        assert max(reader.late) <= FREELY


def test_alone_it_reads_all_on_the_way() -> None:
    made: list[Reader] = []
    stage = Stage(None, [Reader(made)], load="fixed:2")
    (result,) = stage.ran(stage.submit(LONG, max_new_tokens=20))
    assert list(result.token_ids) == text(LONG, 20)
    assert (made[0].pieces, max(made[0].late)) == ([], len(LONG))


@pytest.mark.parametrize(
    ("planner", "load", "passed"),
    [
        (AutoPlanner, "none", {("anti",)}),
        (lambda: FixedPlanner(None, 0), "none", {("anti",)}),  # drafting is off
        (lambda: FixedPlanner(None, 2), "fixed:2", {()}),
    ],
)
def test_a_record_says_which_drafts_could_have_guessed(planner: Any, load: str, passed: set[tuple[str, ...]]) -> None:
    whole = [*PROMPT, *text(PROMPT, 40)]
    stage = Stage(None, [anti(whole)], load=load, planner=planner)
    stage.ran(*(stage.submit(PROMPT, max_new_tokens=20) for _ in range(3)))
    rounds = [record for record in stage.records if record.requests]
    assert {record.passed for record in rounds[:-1]} == passed
