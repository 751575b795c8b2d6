"""The questions of a run: read in Spec-Bench's form, chosen by category, and put in order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edgespec.config import nearest
from edgespec.errors import ConfigError, PromptError
from edgespec.evaluation.prompts import Item, Skipped, limited, read_prompts

MT_BENCH = "mt-bench"
# The categories of Spec-Bench that are one task together; every other category is a task of its own.
TASKS = dict.fromkeys(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), MT_BENCH
)
ORDERS = ("file", "shuffled", "interleaved")
_KEYS = ("question_id", "category")

T = TypeVar("T")


def task_of(category: str) -> str:
    """Spec-Bench's task that a category belongs to."""
    return TASKS.get(category, category)


@dataclass(frozen=True, slots=True)
class Question:
    """One question with all its turns. id: as the file has it; order: its index in the whole run."""

    id: int | str
    category: str
    domain: str
    turns: tuple[str, ...]
    file: str
    line: int
    order: int = 0

    @property
    def key(self) -> str:
        return str(self.id)

    @property
    def task(self) -> str:
        return task_of(self.category)


def read_questions(path: Path) -> tuple[list[Item], dict[int, int | str], list[Skipped]]:
    """The questions of a file, their ids by line, and the lines that cannot be used.

    A line with `turns` needs a question_id and a category; no two lines may have one id. PromptError for a file without
    any question.
    """
    items, skipped = read_prompts([path], all_turns=True)
    ids = _ids(items, skipped)
    kept: list[Item] = []
    first: dict[str, int] = {}
    for item in items:
        if item.line not in ids:
            continue
        other = first.setdefault(str(ids[item.line]), item.line)
        if other != item.line:
            skipped.append(Skipped(item.file, item.line, f"its question_id is that of line {other}"))
            continue
        kept.append(item)
    if not kept:
        raise PromptError(f"No question in {path} can be used; {min(skipped, key=lambda one: one.line)}.")
    return kept, ids, sorted(skipped, key=lambda one: one.line)


def _ids(items: Iterable[Item], skipped: list[Skipped]) -> dict[int, int | str]:
    """The question_id of each line; what lacks one, or its category, is noted. Other prompts: file:line."""
    found: dict[int, int | str] = {}
    for item in items:
        missing = [key for key in _KEYS if key not in item.given] if "turns" in item.given else []
        name = item.given.get("question_id", f"{Path(item.file).stem}:{item.line}")
        if missing:
            skipped.append(Skipped(item.file, item.line, f"it has no {missing[0]!r}"))
        elif isinstance(name, bool) or not isinstance(name, (int, str)) or name == "":
            skipped.append(Skipped(item.file, item.line, "'question_id' must be a whole number or a word"))
        elif isinstance(name, str) and name.encode("utf-8", "replace").decode("utf-8") != name:
            skipped.append(Skipped(item.file, item.line, "'question_id' has half a character (a lone surrogate)"))
        else:
            found[item.line] = name
    return found


def chosen(items: Sequence[Item], categories: Sequence[str] | None, limit: int | None) -> list[Item]:
    """Those of the named categories or tasks, at most `limit` of each category. ConfigError for an unknown name."""
    if categories is not None:
        known = dict.fromkeys(name for item in items for name in (item.category, task_of(item.category)))
        for name in categories:
            if name not in known:
                raise ConfigError(f"--categories: no question is of {name!r}; {nearest(name, sorted(known))}")
        items = [item for item in items if {item.category, task_of(item.category)} & set(categories)]
    return limited(items, limit, by=lambda item: item.category)


def ordered(items: Sequence[Item], ids: dict[int, int | str], order: str, seed: int) -> list[Question]:
    """In the file's order, shuffled (by `seed` alone), or one question of each domain in turn."""
    found = list(items)
    if order == "shuffled":
        random.Random(seed).shuffle(found)
    elif order == "interleaved":
        found = in_turn(found, lambda item: item.domain)
    return [
        Question(ids[i.line], i.category, i.domain, i.turns, i.file, i.line, order=place)
        for place, i in enumerate(found)
    ]


def in_turn(items: Iterable[T], kind: Callable[[T], str]) -> list[T]:
    """One item of each kind after the other, as long as there are any."""
    queues: dict[str, list[T]] = {}
    for item in items:
        queues.setdefault(kind(item), []).append(item)
    longest = max(map(len, queues.values()), default=0)
    return [queue[place] for place in range(longest) for queue in queues.values() if place < len(queue)]
