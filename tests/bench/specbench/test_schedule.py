"""Shards that share the questions out, and groups that fit into memory."""

from __future__ import annotations

import pytest

from edgespec.bench.specbench.schedule import Shard, beside, groups, rotated, turns
from edgespec.errors import ConfigError
from tests.bench.specbench.fakes import question


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_question_is_in_one_shard(count: int) -> None:
    questions = [question(n) for n in range(1, 12)]
    parts = [Shard(index, count).of(questions) for index in range(1, count + 1)]
    assert sorted(q.order for part in parts for q in part) == list(range(11))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(q.order % count == index for index, part in enumerate(parts) for q in part)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kinds", [2, 3, 4, 6, 9])
def test_a_shard_is_a_sample_of_the_run_whatever_takes_turns_in_it(count: int, kinds: int) -> None:
    """In interleaved order every count-th question would be of every count-th kind."""
    names = [str(kind) for kind in range(kinds)]
    for order in (names * 13, sorted(names * 13), [*names * 5, *names[: kinds // 2] * 8]):
        questions = [question(n + 1, category=name) for n, name in enumerate(order)]
        parts = [Shard(index, count).of(questions) for index in range(1, count + 1)]
        assert sorted(q.order for part in parts for q in part) == list(range(len(order)))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        for name in names:
            sizes = [sum(q.category == name for q in part) for part in parts]
            assert max(sizes) - min(sizes) <= 1


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


@pytest.mark.parametrize(("arms", "repeats"), [(3, 3), (4, 4), (3, 5)])
def test_every_arm_leads_as_often(arms: int, repeats: int) -> None:
    """Also where their number divides that of the questions."""
    found = turns([question(1), question(2)], repeats)
    leaders = [(q.key, rotated("abcd"[:arms], leader, repeat)[0]) for repeat, q, leader in found]
    counts = [sum(name == leader for _, leader in leaders) for name in "abcd"[:arms]]
    assert max(counts) - min(counts) <= 1
    assert len({name for key, name in leaders if key == "1"}) > 1
    assert rotated("abc", 2) == ["c", "a", "b"]
    assert rotated([], 4) == []


@pytest.mark.parametrize("arms", range(2, 13))
def test_no_domain_has_leaders_of_its_own(arms: int) -> None:
    """Whatever their number, and whether the domains take turns or come one after the other."""
    for domains in range(1, 14):
        kinds = [str(kind) for kind in range(domains)]
        for order in (kinds * 25, sorted(kinds * 25)):
            questions = [question(n + 1, domain=domain) for n, domain in enumerate(order)]
            found = [(q.domain, rotated(range(arms), leader)[0]) for _, q, leader in turns(questions, 1)]
            for domain in kinds:
                counts = [found.count((domain, arm)) for arm in range(arms)]
                assert max(counts) - min(counts) <= 1
            whole = [sum(who == arm for _, who in found) for arm in range(arms)]
            assert max(whole) - min(whole) <= 1


PLACES = [(0, "1"), (0, "2"), (0, "3")]


def who(known: dict[str, list[tuple[int, str]]], *, broken: tuple[str, ...] = ()) -> list[dict[int, str]]:
    """By place, the arms of each group. known: (group, question)."""
    keys = {arm: {(group, 0, name) for group, name in found} for arm, found in known.items()}
    found = beside(PLACES, 0, ["p", "a", "b"], "p", keys, groups=1, broken=broken)
    return [{group: "".join(sorted(names)) for group, names in found[place]} for place in PLACES]


def test_what_was_not_begun_is_run_by_all_together() -> None:
    assert who({}) == [{0: "abp"}] * 3
    assert who({"p": [(0, "1")], "a": [(0, "1")], "b": [(0, "1")]}) == [{0: "abp"}] * 3


def test_the_question_that_was_interrupted_is_ended_where_it_was_begun() -> None:
    assert who({"p": [(0, "1"), (0, "2")], "a": [(0, "1"), (0, "2")], "b": [(0, "1")]}) == [{0: "abp"}] * 3


def test_what_an_arm_lacks_of_another_day_is_run_with_plain_in_a_group_of_its_own() -> None:
    whole = [(0, "1"), (0, "2"), (0, "3")]
    known = {"p": whole, "a": whole, "b": [(0, "1")]}
    assert who(known, broken=("b",)) == [{0: "abp"}, {0: "ap", 1: "bp"}, {0: "ap", 1: "bp"}]
    assert who(known)[1:] == [{0: "ap", 1: "bp"}, {0: "abp"}]
    known = {"p": [*whole, (1, "2")], "a": whole, "b": [(0, "1"), (1, "2")]}
    assert who(known, broken=("b",)) == [{0: "abp"}, {0: "ap", 1: "bp"}, {0: "ap", 2: "bp"}]
