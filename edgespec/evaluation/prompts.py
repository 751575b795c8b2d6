"""Prompt files for evaluation: JSON lines with a `prompt`, or Spec-Bench's questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import PromptError

MAX_LINE = 1 << 20  # bytes: a megabyte of text is far beyond the context of every supported model

# Spec-Bench's categories by domain; others are domains of their own.
GROUPS = {
    "coding": "code",
    "math_reasoning": "math",
    "writing": "chat",
    "roleplay": "chat",
    "humanities": "chat",
    "stem": "chat",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt: its user messages in turn (one, unless all turns of a question were asked for).

    category: what the file says, domain: what figures are made for. given: the whole line.
    """

    name: str
    domain: str
    category: str
    turns: tuple[str, ...]
    file: str
    line: int
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line that cannot be used, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


def read_prompts(
    files: Iterable[str | Path], *, domain: str | None = None, all_turns: bool = False
) -> tuple[list[Item], list[Skipped]]:
    """The prompts of all files in order, and the lines that were skipped.

    domain: None = a Spec-Bench question's category (grouped by `GROUPS`), else the file's name without its ending.
    PromptError for a file that cannot be read or has no usable prompt; its message tells the first line's fault.
    """
    items: list[Item] = []
    skipped: list[Skipped] = []
    seen: dict[tuple[str, tuple[str, ...]], Item] = {}
    for file in files:
        path = Path(file).expanduser()
        found, before = 0, len(skipped)
        for line, raw in _lines(path):
            try:
                item = _item(raw, path, line, domain, all_turns)
                first = seen.setdefault((item.domain, item.turns), item)
                if first is not item:
                    raise ValueError(f"the same prompt as in {first.file}, line {first.line}")
            except ValueError as error:
                skipped.append(Skipped(str(path), line, str(error)))
                continue
            items.append(item)
            found += 1
        if not found:
            reason = f"{len(skipped) - before} lines cannot be used; {skipped[before]}" if skipped[before:] else "empty"
            raise PromptError(f"The prompt file {path} has no prompt: {reason}. One JSON object a line is wanted.")
    return items, skipped


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of all lines that are not blank; one that is too long comes with just over `MAX_LINE` bytes."""
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE + 1):
                number += 1
                rest = line
                while rest and not rest.endswith(b"\n"):  # too long, or the file's last line
                    rest = stream.readline(MAX_LINE)
                if line.strip():
                    yield number, line
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"The prompt file {path} cannot be read: {reason}.") from error


def _item(raw: bytes, path: Path, line: int, domain: str | None, all_turns: bool) -> Item:
    """The prompt in one line. Raises ValueError with what is wrong."""
    record = _record(raw)
    if "turns" in record:
        turns, category = record["turns"], record.get("category", path.stem)
        if not isinstance(turns, list) or not turns:
            raise ValueError("'turns' must be a list of texts")
        turns = turns if all_turns else turns[:1]
    elif "prompt" in record:
        turns, category = [record["prompt"]], path.stem
    else:
        raise ValueError("it has neither 'prompt' nor 'turns'")
    if not isinstance(category, str) or not category.strip():
        raise ValueError("'category' must be a word")
    name = str(record.get("id", record.get("question_id", f"{path.stem}:{line}")))
    texts = tuple(_text(turn) for turn in turns)
    _whole(category, "category")
    _whole(name, "id")
    return Item(name, domain or GROUPS.get(category, category), category, texts, str(path), line, record)


def _record(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_LINE:
        raise ValueError(f"it has more than {MAX_LINE:,} bytes")
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return record


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the prompt is {type(value).__name__}, not text")
    if not value.strip():
        raise ValueError("the prompt is empty")
    _whole(value, "prompt")
    return value


def _whole(value: str, what: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"the {what} has half a character (a lone surrogate)") from None


def limited(
    items: Sequence[Item], most: int | None, *, by: Callable[[Item], str] = lambda item: item.domain
) -> list[Item]:
    """At most `most` prompts of each domain (or what `by` says), evenly spread over its list (files are often sorted by
    source)."""
    if most is None:
        return list(items)
    kept: list[Item] = []
    for kind in dict.fromkeys(map(by, items)):
        of_kind = [item for item in items if by(item) == kind]
        count = min(most, len(of_kind))
        kept += [of_kind[i * len(of_kind) // count] for i in range(count)]
    return kept
