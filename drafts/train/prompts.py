"""Prompts to train on: read from JSON lines, checked, freed of test questions, and split into training and held-out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafts.train.errors import TrainingError
from edgespec.errors import PromptError

LEAST_PROMPTS = 8  # of a file; fewer can be fitted or tested on, not both
HELD_OUT_SHARE = 0.04
LEAST_HELD_OUT = 3
NGRAM = 13  # words in a row that a prompt may not share with an excluded text
_MAX_LINE = 4 << 20  # characters; a longer line is no prompt
_NAMED = 5  # names given of each kind of skipped line
_WORD = re.compile(r"\w+")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. key: unique, "<group>/<id>"; group: the file's stem (or the domain); ids: as the target reads it."""

    key: str
    group: str
    source: str
    licence: str
    text: str
    ids: list[int]


@dataclass(slots=True)
class Skipped:
    """What was left out: reason -> "file:line (id)" of each."""

    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        self.places.setdefault(reason, []).append(place)

    @property
    def count(self) -> int:
        return sum(map(len, self.places.values()))

    def lines(self) -> list[str]:
        """One line a reason: how many, and the first names."""
        return [f"{len(names)} {reason}: {_some(names)}" for reason, names in self.places.items()]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts that are left, by use. sources: (source, licence) -> prompts used."""

    train: list[Prompt]
    held_out: list[Prompt]
    skipped: Skipped

    @property
    def groups(self) -> list[str]:
        return sorted({prompt.group for prompt in self.train})

    def sources(self) -> dict[tuple[str, str], int]:
        counts: dict[tuple[str, str], int] = {}
        for prompt in (*self.train, *self.held_out):
            origin = prompt.source, prompt.licence
            counts[origin] = counts.get(origin, 0) + 1
        return dict(sorted(counts.items()))


def load_prompts(
    files: Sequence[Path], encode: Encode, longest: int, *, domain: str, exclude: Path | None = None, limit: int = 0
) -> PromptSet:
    """Read, check and split all files.

    encode: text -> ids with the target's template. longest: tokens a prompt may have. One file belongs to `domain`,
    of several each makes a group named by its stem. limit: at most that many prompts a file (0 = all).
    Raises TrainingError for a file that cannot be used, naming what is wrong with it; single bad lines are skipped.
    """
    stems = [domain] if len(files) == 1 else [file.stem for file in files]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise TrainingError(f"two prompt files are named {twice[0]}: rename one, the names tell the groups apart.")
    forbidden = excluded_texts(exclude) if exclude else None
    skipped = Skipped()
    seen: set[str] = set()
    train: list[Prompt] = []
    held_out: list[Prompt] = []
    for file, group in zip(files, stems, strict=True):
        prompts = _file_prompts(file, group, encode, longest, forbidden, exclude, seen, skipped)
        if limit:
            prompts = sorted(prompts, key=lambda p: _hash(f"limit:{p.key}"))[:limit]
        if len(prompts) < LEAST_PROMPTS:
            raise TrainingError(_too_few(file, prompts, skipped, exclude))
        kept = _held_out(prompts)
        train += [p for p in prompts if p.key not in kept]
        held_out += [p for p in prompts if p.key in kept]
    return PromptSet(train, held_out, skipped)


def _file_prompts(
    file: Path,
    group: str,
    encode: Encode,
    longest: int,
    forbidden: Excluded | None,
    exclude: Path | None,
    seen: set[str],
    skipped: Skipped,
) -> list[Prompt]:
    """The usable prompts of one file. seen: ids and texts so far, by which duplicates are noticed."""
    prompts = []
    for number, line in _lines(file):
        place = f"{file.name}:{number}"
        record = _record(line)
        if record is None:
            skipped.add('lines without a JSON object that has a text in "prompt" or "text"', place)
            continue
        text = next((record[k] for k in ("prompt", "text") if isinstance(record.get(k), str)), "")
        name = str(record.get("id") or f"text-{_hash(text):016x}")
        place = f"{place} ({name[:60]})"
        marks = (f"id:{group}/{name}", f"text:{text.strip()}")
        if not text.strip():
            skipped.add("empty prompts", place)
        elif seen.intersection(marks):
            skipped.add("duplicates of earlier prompts or ids", place)
        elif forbidden is not None and forbidden.shares(text):
            skipped.add(f"that share {NGRAM} words in a row (or all words) with {exclude}", place)
        else:
            ids = _encoded(encode, text)
            if ids is None or len(ids) > longest:
                length = "too many" if ids is None else len(ids)
                skipped.add(f"too long for the target (more than {longest} tokens)", f"{place}: {length}")
                continue
            seen.update(marks)
            source = str(record.get("source") or file.name)
            licence = str(record.get("license") or record.get("licence") or "unknown")
            prompts.append(Prompt(f"{group}/{name}", group, source, licence, text, ids))
    return prompts


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of the lines that are not blank. TrainingError for what is no text file."""
    try:
        with file.open("rb") as stream:
            number = 0
            while raw := stream.readline(_MAX_LINE):
                number += 1
                if b"\0" in raw:
                    raise TrainingError(f"{file}: is a binary file (line {number}); prompts are JSON lines in UTF-8.")
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    if len(raw) < _MAX_LINE:
                        message = f"{file}: line {number} is not UTF-8 ({error.reason}); convert the file first."
                        raise TrainingError(message) from None
                    text = ""
                if len(raw) == _MAX_LINE and not raw.endswith(b"\n"):  # the rest of a line that is too long
                    while (rest := stream.readline(_MAX_LINE)) and not rest.endswith(b"\n"):
                        pass
                    text = "{"
                if text.strip():
                    yield number, text
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read ({error.strerror}); check the path.") from error


def _record(line: str) -> dict[str, Any] | None:
    """The line's object if it has a prompt (which may be empty), else None."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not any(isinstance(record.get(key), str) for key in ("prompt", "text")):
        return None
    return record


def _encoded(encode: Encode, text: str) -> list[int] | None:
    try:
        return encode(text)
    except PromptError:
        return None


def _too_few(file: Path, prompts: list[Prompt], skipped: Skipped, exclude: Path | None) -> str:
    count = {0: "no prompt is", 1: "one prompt is"}.get(len(prompts), f"{len(prompts)} prompts are")
    why = f" Skipped were {'; '.join(skipped.lines())}." if skipped.count else ""
    if not prompts and exclude and skipped.count and all(str(exclude) in reason for reason in skipped.places):
        return f"{file}: every prompt is in {exclude}, nothing is left to train on; give other prompts.{why}"
    return (
        f"{file}: {count} usable; a draft needs at least {LEAST_PROMPTS} of a file, some to train on and some to test "
        f"on, and some hundred to be any good.{why}"
    )


def _held_out(prompts: Sequence[Prompt]) -> set[str]:
    """Keys of the held-out prompts: those with the lowest hashes, so that more prompts change few of the others."""
    ordered = sorted(prompts, key=lambda p: (_hash(f"held out:{p.key}"), p.key))
    return {p.key for p in ordered[: max(LEAST_HELD_OUT, round(HELD_OUT_SHARE * len(prompts)))]}


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def chosen(key: str, share: float) -> bool:
    """Whether the prompt `key` is among the `share` of all that is picked by hash."""
    return _hash(f"picked:{key}") < share * 2**64


class Excluded:
    """Texts that no prompt may overlap: their word sequences of 13, and shorter texts as a whole."""

    def __init__(self) -> None:
        self._grams: set[int] = set()
        self.texts = 0

    def add(self, text: str) -> None:
        words = _words(text)
        if words:
            self.texts += 1
            self._grams.update(_grams(words))

    def shares(self, text: str) -> bool:
        return not self._grams.isdisjoint(_grams(_words(text)))


def excluded_texts(file: Path) -> Excluded:
    """All texts of a JSON lines file: prompts, or questions with turns as in Spec-Bench. TrainingError without any."""
    excluded = Excluded()
    for number, line in _lines(file):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise TrainingError(f"{file}: line {number} is not JSON; --exclude wants JSON lines.") from None
        for text in _texts(record):
            excluded.add(text)
    if not excluded.texts:
        raise TrainingError(f"{file}: holds no text to exclude; --exclude wants JSON lines with prompts or turns.")
    return excluded


_LABELS = ("id", "question_id", "category", "source", "license", "licence", "role")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _LABELS:
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str]) -> Iterator[int]:
    """Hashes of all runs of 13 words; of a shorter text, of all its words."""
    for start in range(max(1, len(words) - NGRAM + 1) if words else 0):
        yield hash(tuple(words[start : start + NGRAM]))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
