"""A session of the head draft: what it has to go on, what trouble it survives, and that no other session meets it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from drafts import head as head_module
from drafts import head_session
from drafts.base import FloatArray, InvalidLogits, Proposal
from drafts.head_session import HeadSession
from edgespec.errors import DraftError
from tests.decoding.test_rollback import _Trip
from tests.support.head_talk import BEST, SPEC, Talk, make, toy, vocab_of
from tests.support.tiny_head import random_head

# What it has to go on


def test_it_can_run_when_there_is_a_row_and_the_last_token_is_the_only_one_unseen() -> None:
    _draft, talk = make()
    assert talk.session.level([]) == talk.session.level([5]) == 0
    talk.say(1)
    assert talk.session.level(talk.tokens) == 0
    assert talk.session.propose(talk.tokens, 3, BEST) == Proposal()
    talk.say(1)
    assert talk.session.level(talk.tokens) == 1
    assert len(talk.session.propose(talk.tokens, 3, BEST)) == 3
    assert talk.session.level([*talk.tokens, 5]) == 0
    talk.states.crop(0)
    assert talk.session.level(talk.tokens) == 0


def test_catching_up_reads_at_most_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    _draft, talk = make()
    read: list[int] = []
    fill = head_session._Buffers.fill

    def counted(self: Any, start: int, tokens: Sequence[int], hidden: FloatArray) -> None:
        read.append(len(tokens))
        fill(self, start, tokens, hidden)

    monkeypatch.setattr(head_session._Buffers, "fill", counted)
    for count in (200, 2, 1, 150, 5):
        talk.say(count)
        talk.session.propose(talk.tokens, 3, BEST)
    assert read == [8, 2, 1, 8, 5]


def test_long_blocks_end_where_the_buffers_do() -> None:
    _, talk = make()
    talk.say(300)
    assert len(talk.session.propose(talk.tokens, 1000, BEST)) == head_session.SLACK


@pytest.mark.usefixtures("float_products")
def test_embeddings_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "_KEPT_EMBEDDINGS", 6)
    draft, talk = make()
    for count in (12, 3, 1, 5, 2):
        talk.say(count)
        assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-4
        assert len(draft._embeddings._kept) <= 8  # the limit, or what one call asks for


# Trouble


def test_hidden_states_that_are_no_numbers() -> None:
    _draft, talk = make()
    talk.say(10)
    fine = talk.session.propose(talk.tokens, 3, BEST)
    talk.states.rows(8, 9)[0, 3] = np.nan
    talk.session.crop(5)
    with pytest.raises(InvalidLogits):
        talk.session.propose(talk.tokens, 3, BEST)
    talk.states.write(8, talk.hidden[8][None])
    assert talk.session.propose(talk.tokens, 3, BEST) == fine


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("late", [False, True])
def test_a_call_that_fails_or_is_interrupted_leaves_no_trace(
    error: type[BaseException], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, talk = make()
    plain = draft.session
    calls = 0

    class Failing:
        def io_binding(self) -> Any:
            return plain.io_binding()

        def run_with_iobinding(self, bound: Any) -> None:
            nonlocal calls
            calls += 1
            if late:
                plain.run_with_iobinding(bound)
            if calls % 3 == 0:
                raise error
            if not late:
                plain.run_with_iobinding(bound)

    failed = 0
    for round_ in range(60):
        talk.say(1 + round_ % 5)
        draft.session = Failing()  # type: ignore[assignment]
        try:
            talk.session.propose(talk.tokens, 3, BEST)
        except error:
            failed += 1
        draft.session = plain
        if round_ % 7 == 0:
            talk.cut(len(talk.tokens) - 3)
        fresh = draft.open(talk.states)
        assert talk.session.propose(talk.tokens, 3, BEST).tokens == fresh.propose(talk.tokens, 3, BEST).tokens
    assert failed > 20


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace hook for itself")
def test_ctrl_c_at_any_line_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Trip, "FILES", ("drafts/head_session.py",))
    monkeypatch.setattr(head_session, "SLACK", 6)  # rows are moved often
    draft, _ = make()

    target, weights = toy(), random_head(SPEC, vocab_of(SPEC), 3)

    def talk_until(at: int) -> int:
        talk = Talk(draft, target, weights)
        with _Trip(at) as trip:
            try:
                for count in (12, 3, 5, 4):
                    talk.say(count)
                    talk.session.propose(talk.tokens, 3, BEST)
                    talk.cut(len(talk.tokens) - 1)
            except KeyboardInterrupt:
                pass
        for count in (1, 4):
            talk.say(count)
            fresh = draft.open(talk.states)
            assert talk.session.propose(talk.tokens, 3, BEST).tokens == fresh.propose(talk.tokens, 3, BEST).tokens
        return trip.count

    for at in range(1, talk_until(-1), 2):
        talk_until(at)


def test_a_closed_session_and_a_closed_draft() -> None:
    draft, talk = make()
    talk.say(9)
    before = talk.session.propose(talk.tokens, 3, BEST)
    talk.session.close()
    assert talk.session.propose(talk.tokens, 3, BEST).tokens == before.tokens
    assert draft.nbytes > 0
    draft.close()
    assert draft.nbytes == 0
    with pytest.raises(DraftError, match="tiny is not loaded"):
        talk.session.propose(talk.tokens, 3, BEST)


def test_sessions_on_several_threads_do_not_meet() -> None:
    draft, _ = make()
    target, weights = toy(), random_head(SPEC, vocab_of(SPEC), 3)
    talks = [Talk(draft, target, weights) for _ in range(4)]
    for number, talk in enumerate(talks):
        talk.rng = np.random.default_rng(number)
    together: dict[int, list[list[int]]] = {}

    def follow(number: int, session: HeadSession, talk: Talk) -> list[list[int]]:
        guesses = []
        for _ in range(40):
            talk.say(3)
            guesses.append(session.propose(talk.tokens, 3, BEST).tokens)
        return guesses

    def work(number: int) -> None:
        together[number] = follow(number, talks[number].session, talks[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        alone = Talk(draft, target, weights)
        alone.rng = np.random.default_rng(number)
        assert together[number] == follow(number, alone.session, alone)
