"""Features of a text: the same bit by bit as from scratch, the same on every machine, and cheap."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from predictor.features import BUCKETS, RECENT, SCALARS, Layout, TextFeatures, bucket

LAYOUT = Layout(6, ["a", "b"])
TOKENS = st.lists(st.integers(0, 60_000), max_size=3 * RECENT)


def scalar(vector: np.ndarray, name: str) -> float:
    return float(vector[LAYOUT.scalar(name)])


def part(vector: np.ndarray, name: str) -> np.ndarray:
    return vector[LAYOUT.parts[name]]


def of(prompt, new=(), *, recent=None, mean=None, acceptance=None) -> np.ndarray:
    made = TextFeatures(LAYOUT)
    made.begin(prompt)
    made.push(list(new))
    return made.vector(recent, mean, acceptance or {})


def by_hand(prompt: list[int], new: list[int]) -> tuple[np.ndarray, np.ndarray, float]:
    """Both bags and the share that is copied, straight from their definitions."""

    def bag(grams: list[tuple[int, ...]]) -> np.ndarray:
        out = np.zeros(BUCKETS)
        for gram in grams:
            place, sign = bucket(*gram)
            out[place] += sign
        norm = np.linalg.norm(out)
        return out / norm if norm else out

    text, start = prompt + new, max(len(prompt), len(prompt) + len(new) - RECENT)
    pairs = list(pairwise(text))
    prompt_pairs = set(pairwise(prompt))
    recent_pairs = pairs[max(start - 1, 0) :] if new else []
    grams = [(token,) for token in text[start:]] + recent_pairs
    copied = sum(pair in prompt_pairs for pair in recent_pairs) / max(len(text[start:]), 1)
    prompt_bag = bag([(token,) for token in prompt] + list(pairwise(prompt)))
    return prompt_bag, bag(grams), copied


_LONG = [n * n % 7 for n in range(3 * RECENT)]  # far longer than what is remembered, with pairs that come again


@settings(max_examples=60, deadline=None)
@example(_LONG[:20], _LONG, 5)
@example([1, 2, 3], [1, 2, 3, *range(50, 50 + RECENT)], 1)  # what was copied is out of sight
@given(TOKENS, TOKENS, st.integers(1, 7))
def test_growing_is_the_same_as_from_scratch(prompt: list[int], new: list[int], piece: int) -> None:
    grown = TextFeatures(LAYOUT)
    grown.begin([9, 9, 9])  # another text before: nothing of it stays
    grown.push([1, 2, 3])
    grown.begin(prompt)
    for begin in range(0, len(new), piece):
        grown.push(new[begin : begin + piece])
        grown.vector(None, None, {})
    vector = grown.vector(None, None, {})
    assert np.array_equal(vector, of(prompt, new))
    prompt_bag, recent_bag, copied = by_hand(prompt, new)
    np.testing.assert_allclose(part(vector, "text_prompt"), prompt_bag, atol=1e-6)
    np.testing.assert_allclose(part(vector, "text_recent"), recent_bag, atol=1e-6)
    assert scalar(vector, "copied") == pytest.approx(copied, abs=1e-6)


def test_hashes_are_the_same_for_ever() -> None:
    """Rankers are trained on one machine and run on another: these numbers must not change."""
    assert [bucket(0), bucket(1), bucket(49_151)] == GOLDEN[:3]
    assert [bucket(0, 0), bucket(1, 2), bucket(2, 1), bucket(49_151, 17)] == GOLDEN[3:]


GOLDEN = [(198, 1), (236, -1), (147, 1), (246, 1), (221, -1), (108, -1), (4, -1)]


def test_hashes_spread_over_all_buckets_and_signs() -> None:
    found = [bucket(token) for token in range(20_000)]
    counts = np.bincount([place for place, _ in found], minlength=BUCKETS)
    assert counts.min() > 40
    assert counts.max() < 130
    assert abs(sum(sign for _, sign in found)) < 600
    pairs = [bucket(token // 100, token % 100)[0] for token in range(20_000)]
    assert np.bincount(pairs, minlength=BUCKETS).min() > 40


def test_parts_that_are_not_there_are_zero_and_flagged() -> None:
    before = of([5, 6, 7])
    assert [scalar(before, name) for name in ("hidden_recent?", "hidden_prompt?", "recent?")] == [0, 0, 0]
    for name in ("hidden_recent", "hidden_prompt", "text_recent", "rates", "known"):
        assert not part(before, name).any()
    assert part(before, "text_prompt").any()
    rows, mean = np.ones((3, 6), np.float32), np.full(6, 2, np.float32)
    after = of([5, 6, 7], [8], recent=rows, mean=mean, acceptance={"b": 0.25, "nobody": 1.0})
    assert [scalar(after, name) for name in ("hidden_recent?", "hidden_prompt?", "recent?")] == [1, 1, 1]
    assert part(after, "hidden_recent").tolist() == [1] * 6
    assert part(after, "hidden_prompt").tolist() == [2] * 6
    assert part(after, "rates").tolist() == [0, 0.25]
    assert part(after, "known").tolist() == [0, 1]
    assert after.dtype == np.float32
    assert after.shape == (LAYOUT.size,)


def test_only_the_last_rows_count() -> None:
    rows = np.arange(6 * (RECENT + 5), dtype=np.float32).reshape(-1, 6)
    assert np.array_equal(part(of([1], recent=rows), "hidden_recent"), rows[-RECENT:].mean(axis=0))
    assert scalar(of([1], recent=rows[:0]), "hidden_recent?") == 0


def test_copied_text_and_runs() -> None:
    copied = of([1, 2, 3, 4, 5, 6], [9, 1, 2, 3])
    assert scalar(copied, "copied") == 0.5  # (1, 2) and (2, 3) of four
    assert scalar(copied, "run") == 2 / 8
    assert scalar(of([1, 2, 3, 4, 5, 6], [9, 1, 2]), "run") == 0  # one pair is no run
    assert scalar(of([1, 2, 3, 4, 5, 6], [9, 9, 9]), "copied") == 0


def test_wrong_hidden_states_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden states of shape"):
        of([1], recent=np.zeros((3, 5), np.float32))
    with pytest.raises(ValueError, match="a mean of shape"):
        of([1], mean=np.zeros(5, np.float32))
    for wrong in ((0, ["a"]), (4, []), (4, ["a", "a"])):
        with pytest.raises(ValueError):
            Layout(*wrong)


def test_the_layout_has_no_gaps() -> None:
    covered = [place for where in LAYOUT.parts.values() for place in range(where.start, where.stop)]
    assert covered == list(range(LAYOUT.size))
    assert LAYOUT.size == 2 * 6 + 2 * BUCKETS + len(SCALARS) + 2 * 2


def test_what_was_given_out_is_not_changed_later() -> None:
    made = TextFeatures(LAYOUT)
    made.begin([1, 2, 3])
    first = made.vector(None, None, {})
    kept = first.copy()
    made.push([4, 5])
    made.vector(None, None, {})
    assert np.array_equal(first, kept)


def test_a_push_does_not_look_at_the_whole_text() -> None:
    made = TextFeatures(LAYOUT)
    made.begin([1, 2, 3])
    made.push(list(range(10_000)))
    assert len(made._recent) == RECENT
