"""Prompt lookup: what it proposes, and that its index follows every edit of the conversation."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts import NgramDraft
from drafts.base import FloatArray
from drafts.ngram import NgramSession


def never(row: FloatArray, proposed: Sequence[int]) -> tuple[int, FloatArray | None]:
    raise AssertionError("lookup has no logits")


def propose(session: NgramSession, tokens: list[int], gamma: int) -> list[int]:
    proposal = session.propose(tokens, gamma, never)
    assert proposal.rows == [None] * len(proposal.tokens)
    return proposal.tokens


def brute_force(tokens: list[int], gamma: int, longest: int, shortest: int) -> tuple[int, list[int]]:
    """(level, proposal) by looking at every place."""
    end = len(tokens)
    for size in range(longest, shortest - 1, -1):
        for start in range(end - 1, size - 1, -1):
            if size < end and tokens[start - size : start] == tokens[end - size :]:
                known = list(tokens)
                for i in range(gamma):
                    known.append(known[start + i])
                return size, known[end:]
    return 0, []


def test_the_longest_match_wins_and_the_most_recent_among_equals() -> None:
    session = NgramDraft(3, 2).open()
    #              (1 2 3 -> 9)        (2 3 -> 7)   (2 3 -> 8)
    tokens = [1, 2, 3, 9, 5, 2, 3, 7, 6, 2, 3, 8, 4, 1, 2, 3]
    assert session.level(tokens) == 3
    assert propose(session, tokens, 2) == [9, 5]
    assert propose(NgramDraft(2, 2).open(), tokens, 2) == [8, 4]


def test_no_match_no_proposal() -> None:
    session = NgramDraft().open()
    assert session.level([1, 2, 3, 4]) == 0
    assert propose(session, [1, 2, 3, 4], 3) == []
    assert NgramDraft().open().level([7]) == 0


def test_a_period_goes_on() -> None:
    session = NgramDraft().open()
    assert propose(session, [1, 1, 1], 4) == [1, 1, 1, 1]
    assert propose(session, [1, 1, 1, 5, 6, 7, 5, 6, 7], 8) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_the_text_only_grows_by_one_entry_a_size_and_token() -> None:
    session = NgramDraft(6, 2).open()
    tokens = list(range(100, 400))
    session.level(tokens)
    before = len(session._starts)
    tokens += [3, 4]
    session.level(tokens)
    assert len(session._starts) - before == 2 * 5


@pytest.mark.parametrize(("longest", "shortest"), [(6, 2), (3, 1), (2, 2), (1, 1)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_brute_force_through_growth_and_crops(longest: int, shortest: int, data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    session = NgramDraft(longest, shortest).open()
    tokens: list[int] = [rng.randrange(3)]
    for _ in range(12):
        if rng.random() < 0.25:
            length = rng.randrange(len(tokens) + 1)
            session.crop(length)
            del tokens[length:]
        tokens += [rng.randrange(3) for _ in range(rng.randrange(6))]
        level, guess = brute_force(tokens, 5, longest, shortest)
        assert session.level(tokens) == level
        assert propose(session, tokens, 5) == guess


def test_a_crop_that_is_forgotten_shows() -> None:
    # The mutation: without its crop the index would point behind the new end or at other tokens.
    session = NgramDraft(2, 2).open()
    session.level([1, 2, 3, 4, 1, 2])
    session.crop(1)
    tokens = [1, 2, 5, 5, 1, 2]
    assert propose(session, tokens, 1) == [5]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 0), (0, 0), (2, -1)])
def test_sizes_that_cannot_be(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        NgramDraft(*sizes)


def test_closed_session_starts_anew() -> None:
    draft = NgramDraft()
    session = draft.open()
    session.level([1, 2, 3, 1, 2])
    session.close()
    assert session._starts == {}
    assert session.level([1, 2, 3, 1, 2]) == 2
    assert draft.nbytes == 0
    draft.close()
