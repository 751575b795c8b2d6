"""The standalone draft: its own KV through rollback, absence, edits, failures and its context's end."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import numpy as np
import pytest

from drafts import StandaloneDraft
from drafts.base import FloatArray, InvalidLogits
from drafts.standalone import StandaloneSession
from tests.support.scripted import TOKENS, ToyDecoder, plain_greedy


def best(row: FloatArray, proposed: Sequence[int]) -> tuple[int, FloatArray | None]:
    return int(np.argmax(row)), None


def make(**kwargs: int) -> tuple[ToyDecoder, StandaloneDraft, StandaloneSession]:
    decoder = ToyDecoder(max_positions=kwargs.pop("positions", 256), seed=3)
    draft = StandaloneDraft("toy", decoder, TOKENS, **kwargs)
    return decoder, draft, draft.open()


@pytest.fixture
def reference() -> ToyDecoder:
    return ToyDecoder(seed=3)


def test_guesses_are_its_own_greedy_text(reference: ToyDecoder) -> None:
    decoder, _, session = make()
    tokens = [5, 9, 3, 7]
    proposal = session.propose(tokens, 6, best)
    assert proposal.tokens == plain_greedy(reference, tokens, 6)
    assert proposal.rows == [None] * 6
    assert [len(call) for call in decoder.calls] == [4, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(6))
def test_any_history_of_rounds_and_edits_gives_what_a_fresh_draft_would(seed: int, reference: ToyDecoder) -> None:
    _any_history(seed, reference)


def _all_histories(reference: ToyDecoder) -> None:
    for seed in range(6):
        _any_history(seed, reference)


def _any_history(seed: int, reference: ToyDecoder) -> None:
    rng = random.Random(seed)
    decoder, _, session = make()
    tokens = [rng.randrange(2, TOKENS) for _ in range(5)]
    for _ in range(60):
        gamma = rng.randrange(1, 7)
        before = len(decoder.calls)
        guess = session.propose(tokens, gamma, best).tokens
        assert guess == plain_greedy(reference, tokens, gamma)
        assert len(decoder.calls) - before <= gamma
        kind = rng.random()
        if kind < 0.6:  # a round: some guesses stand, and one token follows
            tokens += guess[: rng.randrange(gamma + 1)] + [rng.randrange(2, TOKENS)]
        elif kind < 0.8:  # others were at work
            tokens += [rng.randrange(2, TOKENS) for _ in range(rng.randrange(30))]
        else:  # the user edits
            length = rng.randrange(1, len(tokens))
            session.crop(length)
            del tokens[length:]
            tokens += [rng.randrange(2, TOKENS)]
        if len(tokens) > 200:
            session.crop(3)
            del tokens[3:]


def test_full_acceptance_feeds_two_tokens_next_time_and_rejection_one() -> None:
    decoder, _, session = make()
    tokens = [5, 9, 3]
    guess = session.propose(tokens, 3, best).tokens
    decoder.calls.clear()
    session.propose([*tokens, *guess, 4], 2, best)
    assert decoder.calls[0] == [guess[-1], 4]
    wrong = (guess[1] + 1) % TOKENS
    session.crop(3)
    session.propose(tokens, 3, best)
    decoder.calls.clear()
    session.propose([*tokens, guess[0], wrong], 1, best)
    assert decoder.calls == [[wrong]]


def test_the_same_text_again_recomputes_its_last_row_only() -> None:
    decoder, _, session = make()
    tokens = [5, 9, 3, 8]
    first = session.propose(tokens, 3, best).tokens
    decoder.calls.clear()
    assert session.propose(tokens, 3, best).tokens == first
    assert decoder.calls[0] == [8]


def test_rollback_compares_only_what_is_new() -> None:
    class Watched(list):  # type: ignore[type-arg]
        looked = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            Watched.looked += isinstance(at, int)
            return super().__getitem__(at)

    _, _, session = make()
    tokens = Watched([5] * 150)
    guess = session.propose(tokens, 4, best).tokens
    tokens += [*guess, 9]
    session.propose(tokens, 4, best)
    Watched.looked = 0
    tokens += [9]
    session.propose(tokens, 4, best)
    assert 0 < Watched.looked <= 8


@pytest.mark.parametrize("planted", ["no crop", "keep one too many", "forget to compare"])
def test_planted_faults_are_seen(planted: str, monkeypatch: pytest.MonkeyPatch, reference: ToyDecoder) -> None:
    if planted == "no crop":
        monkeypatch.setattr("tests.support.scripted.ToyCache.crop", lambda self, length: 0)
    elif planted == "keep one too many":
        real = StandaloneSession._roll_back

        def sloppy(self: StandaloneSession, tokens: Sequence[int]) -> None:
            before = list(self._fed)
            real(self, tokens)
            self._fed[:] = before[: max(len(self._fed), min(len(self._fed) + 1, len(tokens) - 1))]

        monkeypatch.setattr(StandaloneSession, "_roll_back", sloppy)
    else:

        def by_number(self: StandaloneSession, tokens: Sequence[int]) -> None:
            del self._fed[len(tokens) - 1 :]

        monkeypatch.setattr(StandaloneSession, "_roll_back", by_number)
    with pytest.raises(AssertionError):
        _all_histories(reference)


def test_long_absence_is_read_up_in_chunks() -> None:
    decoder, _, session = make(positions=1000)
    session.propose([2] * 600, 2, best)
    assert [len(call) for call in decoder.calls] == [256, 256, 88, 1]


# B011, B085, B086
def test_its_own_context_ends_it_without_an_error_and_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    decoder, _, session = make(positions=20)
    with caplog.at_level(logging.INFO):
        assert session.level([3] * 20) == 1
        assert len(session.propose([3] * 18, 8, best)) == 3
        assert len(session.propose([3] * 20, 8, best)) == 1
        decoder.calls.clear()
        for length in (21, 22, 23):
            assert session.level([3] * length) == 0
            assert len(session.propose([3] * length, 8, best)) == 0
    assert decoder.calls == []
    assert len(caplog.records) == 1
    session.crop(5)
    assert session.level([3] * 5) == 1
    assert len(session.propose([3] * 5, 4, best)) == 4


def test_a_tighter_limit_and_a_cache_of_that_size() -> None:
    decoder, draft, session = make(positions=100, max_positions=30)
    assert draft.max_positions == 30
    assert session.level([3] * 31) == 0
    session.propose([3] * 4, 1, best)
    assert session._cache is not None
    assert session._cache.capacity == 30
    assert make(positions=100, max_positions=500)[1].max_positions == 100
    for wrong in ({"token_count": 0}, {"token_count": 5, "max_positions": 0}):
        with pytest.raises(ValueError):
            StandaloneDraft("toy", decoder, **wrong)  # type: ignore[arg-type]


# B068
def test_a_conversation_with_a_token_it_has_no_row_for_is_not_drafted() -> None:
    decoder = ToyDecoder(40)
    session = StandaloneDraft("small", decoder, TOKENS).open()
    assert session.level([5, 6, 45, 7]) == 0
    assert len(session.propose([5, 6, 45, 7], 3, best)) == 0
    assert decoder.calls == []
    session.crop(2)
    assert session.level([5, 6, 7]) == 1
    assert len(session.propose([5, 6, 7], 3, best)) == 3
    session.crop(1)
    assert session.level([5, 45, 7]) == 0


def test_a_chosen_token_that_it_cannot_read_ends_the_guess() -> None:
    decoder = ToyDecoder(40)
    session = StandaloneDraft("small", decoder, TOKENS).open()
    assert session.propose([5, 6], 4, lambda row, proposed: (45, None)).tokens == [45]
    assert decoder.calls == [[5, 6]]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), InvalidLogits("NaN")])
@pytest.mark.parametrize("where", ["before", "after", "choose"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_exception_anywhere_leaves_it_right(
    error: BaseException, where: str, call: int, reference: ToyDecoder
) -> None:
    decoder, _, session = make()
    tokens = [5, 9, 3, 7, 8]
    session.propose(tokens, 2, best)
    tokens += [4, 6]
    count = [0]

    def trip() -> None:
        count[0] += 1
        if count[0] == call:
            raise error

    def choose(row: FloatArray, proposed: Sequence[int]) -> tuple[int, FloatArray | None]:
        if where == "choose":
            trip()
        return best(row, proposed)

    if where != "choose":
        setattr(decoder, where, trip)
    with pytest.raises(type(error)):
        session.propose(tokens, 3, choose)
    decoder.before = decoder.after = lambda: None
    assert session.propose(tokens, 5, best).tokens == plain_greedy(reference, tokens, 5)


def test_close_releases_the_cache_and_the_decoder() -> None:
    decoder, draft, session = make()
    session.propose([4, 5], 1, best)
    session.close()
    assert session._cache is None
    assert session.propose([4, 5], 1, best).tokens
    draft.close()
    assert decoder.closed
    assert draft.nbytes == 0
