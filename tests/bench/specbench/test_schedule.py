"""Shards that share the questions out, and groups that fit into memory."""

from __future__ import annotations

import pytest

from edgespec.bench.specbench.schedule import Shard, groups
from edgespec.errors import ConfigError
from tests.bench.specbench.fakes import question


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_question_is_in_one_shard(count: int) -> None:
    questions = [question(n) for n in range(1, 12)]
    parts = [Shard(index, count).of(questions) for index in range(1, count + 1)]
    assert sorted(q.order for part in parts for q in part) == list(range(11))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(q.order % count == index for index, part in enumerate(parts) for q in part)


def test_shards_are_read_from_text() -> None:
    assert (Shard.parse("2/4"), str(Shard.parse("2/4"))) == (Shard(2, 4), "2/4")
    for wrong in ("", "2", "0/4", "5/4", "1/0", "a/b", "1/2/3", "-1/2", "1 /2"):
        with pytest.raises(ConfigError, match="--shard wants I/N"):
            Shard.parse(wrong)


def test_arms_are_grouped_by_what_fits_but_two_at_least() -> None:
    sizes = {"plain": 2, "a": 3, "b": 3, "c": 9, "d": 1}

    def of(room: int, together: int | None = None) -> list[list[str]]:
        return groups(list(sizes), "plain", together=together, size=sizes.__getitem__, room=room)

    assert of(100) == [["plain", "a", "b", "c", "d"]]
    assert of(8) == [["plain", "a", "b"], ["plain", "c"], ["plain", "d"]]
    assert of(1) == [["plain", "a"], ["plain", "b"], ["plain", "c"], ["plain", "d"]]
    assert of(1, together=3) == [["plain", "a", "b"], ["plain", "c", "d"]]
    assert groups(["plain"], "plain", together=None, size=sizes.__getitem__, room=0) == [["plain"]]
    with pytest.raises(ConfigError, match="--together must be 2 or more"):
        of(1, together=1)
