"""A standalone draft whose weights come and go. The target's own numbers serve as its weights: all must be accepted."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from drafts import StandaloneDraft
from drafts.base import Lagging, Loadable, LoadCancelled, LoadControl
from drafts.load_now import OwnSlot, Unhindered
from drafts.standalone import CHUNK, Checkpoint
from edgespec.errors import DraftError
from tests.drafts.test_standalone import best
from tests.support.scripted import TOKENS, ToyDecoder, plain_greedy
from tests.support.tiny_head import Hindered

SLOT = OwnSlot(0)
LONG = 700


def self_draft(
    made: list[ToyDecoder] | None = None, before: Callable[[LoadControl], None] = lambda control: None
) -> StandaloneDraft:
    """A draft that builds a twin of the target whenever it is loaded; `made` collects the twins."""

    def build(_slot: Any, control: LoadControl) -> Any:
        before(control)
        decoder = ToyDecoder(max_positions=LONG)
        if made is not None:
            made.append(decoder)
        return decoder

    checkpoint = Checkpoint(ToyDecoder(max_positions=LONG).spec, 5000, (), build)
    return StandaloneDraft("self", checkpoint, TOKENS)


def right(target: ToyDecoder, tokens: list[int], guesses: list[int]) -> bool:
    return guesses == plain_greedy(target, tokens, len(guesses))


@pytest.mark.parametrize("piece", [1, 7, 32, 1000])
def test_after_any_absence_everything_it_proposes_is_accepted(piece: int) -> None:
    target, made = ToyDecoder(max_positions=LONG), []
    draft, rng = self_draft(made), random.Random(piece)
    session = draft.open()
    tokens = [5, 6, 7, 8]
    for missed, cut in ((0, 0), (5, 0), (50, 30), (300, 0), (0, 200), (1, 1)):
        tokens += [rng.randrange(2, TOKENS) for _ in range(missed)]
        del tokens[len(tokens) - cut :]
        session.crop(len(tokens))
        draft.load(SLOT, Unhindered())
        missing = session.behind(tokens)
        assert missing == len(tokens) - 1  # keys and values went with the weights
        while session.behind(tokens):
            left = session.catch_up(tokens, piece)
            assert left == missing - min(piece, CHUNK, missing) == session.behind(tokens)
            missing = left
        decoder = made[-1]
        read = len(decoder.calls)
        for round_number in range(3):
            guesses = session.propose(tokens, 4, best).tokens
            assert right(target, tokens, guesses)
            if not round_number:
                assert [len(call) for call in decoder.calls[read:]] == [1] * 4  # it had read all but the last
            tokens += [*guesses[: rng.randrange(5)], rng.randrange(2, TOKENS)]
        draft.unload()
    assert len(made) == 6
    assert all(decoder.closed for decoder in made)


def test_it_lags_where_it_stayed_but_did_not_run() -> None:
    draft = self_draft()
    draft.load(SLOT, Unhindered())
    session = draft.open()
    tokens = [5, 6, 7, 8]
    assert isinstance(session, Lagging)
    assert session.behind([]) == 0
    assert session.behind(tokens) == 3
    guesses = session.propose(tokens, 4, best).tokens
    assert session.behind([*tokens, *guesses]) == 0
    assert session.behind([*tokens, *guesses, 9]) == 1  # the last guess was not fed, the last token never counts
    tokens += [(guesses[0] + 1) % TOKENS, 9, 9]
    assert session.behind(tokens) == 2  # of the guesses none stood
    assert session.catch_up(tokens, 1) == 1
    assert session.catch_up(tokens, 1) == 0
    assert right(ToyDecoder(max_positions=LONG), tokens, session.propose(tokens, 3, best).tokens)
    assert session.behind([9] * (LONG + 1)) == 0  # beyond its positions
    assert session.behind([9, TOKENS + 5, 9]) == 0  # no row for it


def test_a_draft_that_is_not_loaded_has_nothing_to_go_on() -> None:
    draft = self_draft()
    session = draft.open()
    assert isinstance(draft, Loadable)
    assert (draft.slot_bytes, draft.buffer_bytes, draft.nbytes) == (5000, 0, 0)
    assert session.level([5, 6]) == 0
    for call in (lambda: session.propose([5, 6], 1, best), lambda: session.catch_up([5, 6], 1)):
        with pytest.raises(DraftError, match="self is not loaded"):
            call()
    draft.load(SLOT, Unhindered())
    draft.load(SLOT, Unhindered())
    assert (session.level([5, 6]), draft.nbytes) == (1, 1000)
    draft.unload()
    draft.unload()
    assert session.level([5, 6]) == 0


def test_an_unload_leaves_no_weights_and_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    draft = self_draft()
    sessions = [draft.open() for _ in range(3)]
    draft.load(SLOT, Unhindered())
    for session in sessions[:2]:
        session.propose([5, 6, 7], 3, best)
    left = [weakref.ref(draft.decoder), *(weakref.ref(session._cache) for session in sessions[:2])]
    draft.unload()
    gc.collect()
    assert [reference() for reference in left] == [None] * 3


def test_a_load_that_is_called_off_or_fails_holds_nothing() -> None:
    made: list[ToyDecoder] = []
    draft = self_draft(made, lambda control: control.checkpoint())
    whole = Hindered()
    draft.load(SLOT, whole)
    draft.unload()
    for end in range(1, whole.places + 1):
        with pytest.raises(LoadCancelled):
            draft.load(SLOT, Hindered(end))
        assert not draft.loaded
    assert len(made) == 2  # the whole load's, and that of one called off at its last place
    assert all(decoder.closed for decoder in made)
    other = Checkpoint(ToyDecoder(30).spec, 1, (), lambda _slot, control: made.append(ToyDecoder()) or made[-1])  # type: ignore[arg-type,func-returns-value]
    with pytest.raises(DraftError, match="another one now"):
        StandaloneDraft("x", other, TOKENS).load(SLOT, Unhindered())
    assert made[-1].closed


def test_one_that_was_given_its_decoder_is_loaded_once() -> None:
    decoder = ToyDecoder()
    draft = StandaloneDraft("given", decoder, TOKENS)
    assert draft.loaded
    draft.unload()
    assert decoder.closed
    with pytest.raises(DraftError, match="cannot be loaded again"):
        draft.load(SLOT, Unhindered())
