"""The best lengths, against all lengths there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from predictor.load.marginal import Offer, Shares


def offer(rates: Sequence[float], step: float, rows: Sequence[float] = (), entry: float = 0.0) -> Offer:
    chances = np.cumprod(rates)
    tokens = [1.0, *(1.0 + np.cumsum(chances)).tolist()]
    seconds = [0.0, *(entry + step * (place + 1) for place in range(len(rates)))]
    further = [0.0, *(np.cumsum(rows).tolist() if len(rows) else [place + 1.0 for place in range(len(rates))])]
    return Offer(tokens, seconds, further)


def drawn(seed: int, *, entries: bool = False) -> Shares:
    rng = np.random.default_rng(seed)
    n, most = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    offers = [
        offer(
            np.sort(rng.uniform(0.1, 0.95, most))[::-1].tolist(),
            float(rng.uniform(0.0, 0.002)),
            entry=float(rng.uniform(0, 0.02)) if entries else 0.0,
        )
        for _ in range(n)
    ]
    slopes = np.sort(rng.uniform(0.0002, 0.006, n * most + 2))  # rows become dearer
    curve = [0.02 + 0.005 * n, *(0.02 + 0.005 * n + np.cumsum(slopes)).tolist()]
    return Shares(offers, 0.0, curve)


def all_lengths(shares: Shares) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(o.tokens)) for o in shares.offers)))


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("entries", [False, True])
def test_no_other_lengths_are_cheaper(seed: int, entries: bool) -> None:
    shares = drawn(seed, entries=entries)
    best = min(shares.cost(lengths) for lengths in all_lengths(shares))
    assert shares.cost(shares.best()) <= best * (1 + (0.01 if entries else 1e-3))


@pytest.mark.parametrize("seed", range(20))
def test_most_of_them_are_exactly_the_best_and_a_price_from_before_changes_little(seed: int) -> None:
    exact = 0
    for case in range(20):
        shares = drawn(1000 * seed + case)
        best = min(shares.cost(lengths) for lengths in all_lengths(shares))
        exact += shares.cost(shares.best()) <= best * (1 + 1e-9)
        assert shares.cost(shares.best(price=0.01)) <= best * 1.01
    assert exact >= 18


@pytest.mark.parametrize("seed", range(20))
def test_one_sequence_alone_makes_most_tokens_a_second(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = offer(rng.uniform(0.2, 0.95, 6).tolist(), 0.001)
    shares = Shares([one], 0.0, [0.02 + 0.003 * rows for rows in range(9)])
    speeds = [shares.tokens([length]) / shares.seconds([length]) for length in range(7)]
    assert shares.best() == [int(np.argmax(speeds))]


def test_seconds_are_shared_out_to_the_last_one() -> None:
    shares = drawn(5)
    lengths = [1] * len(shares.offers)
    single = Shares(shares.offers[:1], 0.0, [0.02, 0.03, 0.04, 0.05, 0.06, 0.07])
    assert single.cost([1]) == pytest.approx(single.seconds([1]) / single.tokens([1]))
    assert shares.seconds(lengths) > shares.seconds([0] * len(lengths))


def test_texts_that_are_hard_to_guess_are_not_starved_for_easy_ones() -> None:
    """At the batch's tokens a second the hard ones' guesses look too dear; but they have to be written, too."""
    easy, hard = offer([0.9, 0.8, 0.8], 0.0), offer([0.42], 0.0)
    shares = Shares([easy] * 4 + [hard] * 4, 0.0, [0.056 + 0.0027 * rows for rows in range(18)])
    lengths = shares.best()
    assert lengths[4:] == [1] * 4
    speed = shares.tokens(lengths) / shares.seconds(lengths)
    assert speed * 0.0027 > 0.42  # tokens that the seconds of that guess make at the batch's speed


def test_parts_of_rows_count_as_such() -> None:
    dear = [0.02 + 0.012 * rows for rows in range(4)]
    assert Shares([offer([0.5], 0.0)], 0.0, dear).best() == [0]
    assert Shares([offer([0.5], 0.0, rows=[0.6])], 0.0, dear).best() == [1]
