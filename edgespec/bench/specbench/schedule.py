"""Who runs when: shards of the questions, groups of arms that fit into memory together, and whose turn comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edgespec.bench.specbench.questions import Question
from edgespec.errors import ConfigError

LEAST_TOGETHER = 2  # an arm and the plain one that it is compared with

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` (from 1), every count-th question."""

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

    def of(self, questions: Iterable[Question]) -> list[Question]:
        return [question for question in questions if question.order % self.count == self.index - 1]

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


def turns(
    arms: Sequence[T], questions: Sequence[Question], repeats: int
) -> Iterator[tuple[int, Question, Sequence[T]]]:
    """(repeat, question, the arms with another one in front each time), so that no arm is always the first."""
    turn = 0
    for repeat in range(repeats):
        for question in questions:
            at = turn % len(arms)
            turn += 1
            yield repeat, question, [*arms[at:], *arms[:at]]
        turn += 1  # else the same arm leads in every repeat where their numbers divide each other
