"""Prompts dealt out to arrivals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from edgespec.bench.load.arrivals import Arrival
from edgespec.bench.load.prompts import Pool
from edgespec.errors import ConfigError, PromptError


def encode(text: str) -> list[int]:
    return [sum(map(ord, word)) for word in text.split()]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ["one two", "three four five", "six " * 40]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def pool(file: Path, **changes) -> Pool:
    return Pool.read([file], encode, **{"new": 8, "context": 40, **changes})[0]


def test_what_does_not_fit_is_left_out_with_its_reason(file: Path) -> None:
    made, skipped = Pool.read([file], encode, new=8, context=40)
    assert len(made) == 2
    assert "its 40 prompt tokens and 8 new ones do not fit the context of 40" in str(skipped[0])
    with pytest.raises(PromptError, match="No prompt can be asked"):
        Pool.read([file], encode, new=8, context=8)


def test_the_same_seed_asks_the_same(file: Path) -> None:
    arrivals = [Arrival(float(n)) for n in range(20)]
    first, again, other = (pool(file).asks(arrivals, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [ask.at for ask in first] == [arrival.at for arrival in arrivals]
    assert {a.name for a in first[:2]} == {a.name for a in first[2:4]}  # all, before one comes again
    assert list(itertools.islice(pool(file).endless(1), 20)) == list(itertools.islice(pool(file).endless(1), 20))


def test_distinct_prompts_share_no_beginning(file: Path) -> None:
    asks = pool(file, distinct=True).asks([Arrival(0.0)] * 30, 0)
    assert len({ask.ids[0] for ask in asks}) > 12
    assert all(len(ask.ids) in (3, 4) for ask in asks)


def test_arrivals_may_say_what_is_asked(file: Path) -> None:
    arrivals = [Arrival(0.0, "a b c", None, 5), Arrival(1.0, None, 25, None), Arrival(2.0, None, 25, None)]
    said, long, longer = pool(file).asks(arrivals, 0)
    assert (said.ids, said.new) == (tuple(encode("a b c")), 5)
    assert (len(long.ids), long.new) == (25, 8)
    assert long.ids != longer.ids
    with pytest.raises(ConfigError, match="do not fit the context of 40"):
        pool(file).asks([Arrival(0.0, None, 35, 6)], 0)
