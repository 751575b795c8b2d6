"""Who runs when: shards of the questions, groups of arms that fit into memory together, and whose turn comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edgespec.bench.specbench.questions import Question
from edgespec.errors import ConfigError

LEAST_TOGETHER = 2  # an arm and the plain one that it is compared with

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` (from 1): every count-th question of each category, a sample of the whole."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Of "2/4". Raises ConfigError."""
        parts = text.split("/")
        if len(parts) == 2 and all(part.isascii() and part.isdigit() for part in parts):
            index, count = map(int, parts)
            if 1 <= index <= count:
                return cls(index, count)
        raise ConfigError(f"--shard wants I/N with I from 1 to N, as in 1/4, not {text!r}")

    def of(self, questions: Sequence[Question]) -> list[Question]:
        """Of all questions of the run, in order; not of some, for each counts those before it."""
        numbers = _numbers([question.category for question in questions])
        return [each for each, number in zip(questions, numbers) if number % self.count == self.index - 1]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def groups(
    names: Sequence[str], first: str, *, together: int | None, size: Callable[[str], int], room: int
) -> list[list[str]]:
    """The arms in groups, `first` in each of them, the others in their order.

    together: arms of a group; None = as many as fit into `room` bytes by their `size`, but at least two.
    """
    if together is not None and together < LEAST_TOGETHER:
        raise ConfigError(f"--together must be {LEAST_TOGETHER} or more: every group has the plain arm in it")
    found: list[list[str]] = [[first]]
    for name in names:
        if name == first:
            continue
        here = found[-1]
        if len(here) >= LEAST_TOGETHER:
            full = sum(map(size, [*here, name])) > room if together is None else len(here) >= together
            if full:
                found.append(here := [first])
        here.append(name)
    return found


Place = tuple[int, str]  # repeat and question
Beside = Mapping[Place, Sequence[tuple[int, Collection[str]]]]


def turns(questions: Sequence[Question], repeats: int) -> Iterator[tuple[int, Question, int]]:
    """(repeat, question, number of whom it begins with) of all that is asked, in order; see `rotated`."""
    leaders = _numbers([question.domain for question in questions])
    for repeat in range(repeats):
        for question, leader in zip(questions, leaders):
            yield repeat, question, leader


def _numbers(kinds: Sequence[str]) -> list[int]:
    """Numbers that go on from one to the next of its kind, and from kind to kind, in whatever order they come.

    Dealt out by them, as whose turn it is to lead or as the shard it is in, all get as many of each kind, and as many
    on the whole, or one less.
    """
    following: dict[str, int] = {}
    total = 0
    for kind, count in Counter(kinds).items():
        following[kind] = total
        total += count
    found = []
    for kind in kinds:
        found.append(following[kind])
        following[kind] += 1
    return found


def rotated(arms: Sequence[T], leader: int, repeat: int = 0) -> list[T]:
    """The arms, beginning with that one (round and round), and with another one in each repeat of a question.

    Give only those that run there: else who stands behind one that does not would lead twice as often.
    """
    at = (repeat + leader) % len(arms) if arms else 0
    return [*arms[at:], *arms[:at]]


def beside(
    places: Sequence[Place],
    number: int,
    arms: Sequence[str],
    first: str,
    known: Mapping[str, Collection[tuple[int, int, str]]],
    *,
    groups: int,
    broken: Collection[str] = (),
) -> Beside:
    """Who runs beside whom in group `number` of `groups`: for each place the names by the group that they are noted in.

    All in one, if nothing was measured before (known: (group, repeat, question) by arm). An arm that lacks what `first`
    has done in an earlier session gets a group of its own for it, from `groups` on, in which `first` runs again: a
    machine may be faster on another day. But for the place at which all of them were interrupted: one question. broken:
    arms that had ended before the others.
    """
    extra = sorted({group for keys in known.values() for group, _, _ in keys if group >= groups})
    fresh = max([groups, *(group + 1 for group in extra)])
    last = next((p for p in reversed(places) if any((number, *p) in known.get(arm, ()) for arm in arms)), None)
    found: dict[Place, list[tuple[int, Collection[str]]]] = {}
    for place in places:
        others = [arm for arm in arms if arm != first]
        again = {g: {arm for arm in others if (g, *place) in known.get(arm, ())} for g in extra}
        moved = {arm for names in again.values() for arm in names}
        late: set[str] = set()
        if (number, *place) in known.get(first, ()):
            lacking = {arm for arm in others if (number, *place) not in known.get(arm, ())} - moved
            late = {arm for arm in lacking if place != last or arm in broken}
        found[place] = [(number, {arm for arm in arms if arm not in late | moved})]
        found[place] += [(g, {first, *names}) for g, names in again.items() if names]
        found[place] += [(fresh, {first, *late})] if late else []
    return found
