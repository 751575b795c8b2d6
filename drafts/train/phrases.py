"""A table of phrases from the target's answers: counts, chances, and only the entries that say something.

Counted are *prompts*: in how many answers a token follows an n-gram. What one answer repeats teaches nothing about the
next one, and prompt lookup finds it anyway. (Counting every occurrence instead is worse at any size.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drafts.evaluate import calibration_error
from drafts.phrases import CERTAIN, FILE_NAME, LONGEST, PhraseDraft, PhraseTable, step
from drafts.train.calibrate import Calibration
from drafts.train.corpus import SAMPLED_TEMPERATURE
from drafts.train.errors import TrainingError
from drafts.train.fitting import Fitted

if TYPE_CHECKING:
    from drafts.train.corpus import Progress
    from drafts.train.fit import Example
    from edgespec.models.base import Decoder

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What goes into a table.

    longest: tokens of an n-gram, from 1. prompts: answers in which the same token must follow. doubt: how many further
    answers the next shorter n-gram's opinion weighs as much as. least: chance below which nothing is proposed. near:
    entries that change no token and the chance by no more than this are left out.
    """

    longest: int = 4
    prompts: int = 2
    doubt: float = 3.0
    least: float = 0.2
    near: float = 0.1

    def __post_init__(self) -> None:
        if not (1 <= self.longest <= LONGEST and self.prompts >= 1 and self.doubt >= 0):
            raise ValueError(f"these limits make no table: {self}")


@dataclass(frozen=True, slots=True)
class Answer:
    """prompt: the same for all answers to one prompt. tokens: int [n], prompt and answer; start: where that begins."""

    prompt: str
    tokens: npt.NDArray[np.integer]
    start: int


def build_table(answers: Iterable[Answer], limits: Limits | None = None) -> PhraseTable:
    """The table of these answers; the same bytes for the same answers in any order. TrainingError if it is empty."""
    limits = limits or Limits()
    seen = _occurrences(answers, limits.longest)
    kept: list[_Entries] = []
    below: _Counts | None = None
    for size in range(1, limits.longest + 1):
        counts = _Counts.of(seen, size, below, limits.doubt)
        kept.append(_worth(counts.best(limits.prompts), kept, limits))
        below = counts
    keys, tokens, chances = (np.concatenate(parts) for parts in zip(*((e.keys[-1], e.next, e.chance) for e in kept)))
    keys, first = np.unique(keys, return_index=True)
    if not len(keys):
        raise TrainingError(
            f"no phrase follows in {limits.prompts} or more of these answers; a table needs more prompts of one kind."
        )
    return PhraseTable(
        tuple(range(1, limits.longest + 1)), keys, tokens[first].astype(np.int32), _in_255ths(chances[first])
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """One row for every token of an answer but its first.

    keys[n - 1]: hash of the n tokens before it, if `valid[n - 1]`: there are that many. next: the token. prompt: number
    of its prompt.
    """

    keys: list[Keys]
    valid: list[npt.NDArray[np.bool_]]
    next: Ints
    prompt: Ints


def _occurrences(answers: Iterable[Answer], longest: int) -> _Seen:
    names: dict[str, int] = {}
    keys: list[list[Keys]] = [[] for _ in range(longest)]
    valid: list[list[npt.NDArray[np.bool_]]] = [[] for _ in range(longest)]
    following: list[Ints] = [np.empty(0, np.int64)]
    prompts: list[Ints] = [np.empty(0, np.int64)]
    for answer in answers:
        text = np.asarray(answer.tokens).astype(np.uint64)
        ends = np.arange(answer.start, len(text) - 1)  # of the n-grams
        if not len(ends):
            continue
        key = np.zeros(len(ends), np.uint64)
        for size in range(longest):
            key = step(key, text[np.maximum(ends - size, 0)])
            keys[size].append(key)
            valid[size].append(ends >= size)
        following.append(text[ends + 1].astype(np.int64))
        prompts.append(np.full(len(ends), names.setdefault(answer.prompt, len(names)), np.int64))
    nothing = np.empty(0, np.uint64)
    return _Seen(
        [np.concatenate([nothing, *parts]) for parts in keys],
        [np.concatenate([nothing.astype(bool), *parts]) for parts in valid],
        np.concatenate(following),
        np.concatenate(prompts),
    )


@dataclass(frozen=True, slots=True)
class _Entries:
    """n-grams of one size with their next token and its chance. keys: [size] hashes of the last 1, 2, ... tokens."""

    keys: list[Keys]
    next: Ints
    chance: npt.NDArray[np.float64]

    def pick(self, which: npt.NDArray[np.bool_]) -> _Entries:
        return _Entries([key[which] for key in self.keys], self.next[which], self.chance[which])


@dataclass(frozen=True, slots=True)
class _Counts:
    """All (n-gram, next token) pairs of one size, by key and token.

    keys: as of `_Entries`, of each pair. group: number of the pair's n-gram, 0, 1, ...; count: prompts that have it.
    chance: of the token after the n-gram, shorter n-grams considered. unique: key of each group.
    """

    keys: list[Keys]
    next: Ints
    group: Ints
    count: Ints
    chance: npt.NDArray[np.float64]
    unique: Keys

    @classmethod
    def of(cls, seen: _Seen, size: int, below: _Counts | None, doubt: float) -> _Counts:
        which = np.flatnonzero(seen.valid[size - 1])
        key, token, prompt = seen.keys[size - 1][which], seen.next[which], seen.prompt[which]
        order = np.lexsort((prompt, token, key))
        key, token, prompt = key[order], token[order], prompt[order]
        new_pair = _changes(key) | _changes(token)
        once = new_pair | _changes(prompt)
        pair = np.cumsum(new_pair) - 1
        starts = np.flatnonzero(new_pair)
        count = np.bincount(pair[once], minlength=len(starts))
        rows = which[order[starts]]
        keys = [seen.keys[n][rows] for n in range(size)]
        unique, group = np.unique(key[starts], return_inverse=True)
        total = np.bincount(group, count, len(unique))
        shorter = np.zeros(len(starts)) if below is None else below.chance_of(keys[-2], token[starts])
        chance = (count + doubt * shorter) / (total[group] + doubt)
        return cls(keys, token[starts], group, count, chance, unique)

    def chance_of(self, keys: Keys, tokens: Ints) -> npt.NDArray[np.float64]:
        """Of pairs that occur at this size."""
        wide = int(self.next.max(initial=0)) + 1
        known = self.group * wide + self.next  # ascending, as the pairs are
        return self.chance[np.searchsorted(known, np.searchsorted(self.unique, keys) * wide + tokens)]

    def best(self, prompts: int) -> _Entries:
        """Of each n-gram the likeliest next token of those that enough prompts have; the lowest of equals."""
        order = np.lexsort((self.next, -self.chance, self.group))
        order = order[self.count[order] >= prompts]
        first = order[_changes(self.group[order])]
        return _Entries([key[first] for key in self.keys], self.next[first], self.chance[first])


def _worth(entries: _Entries, shorter: list[_Entries], limits: Limits) -> _Entries:
    """Those that say something else than the longest kept n-gram at their end, or likely enough where there is none."""
    token = np.full(len(entries.next), -1)
    chance = np.zeros(len(entries.next))
    for kept in shorter:  # longer ones overwrite what shorter ones said
        mine, theirs = entries.keys[len(kept.keys) - 1], kept.keys[-1]
        if len(theirs):
            place = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
            hit = theirs[place] == mine
            token[hit], chance[hit] = kept.next[place[hit]], kept.chance[place[hit]]
    differs = (token != entries.next) | (np.abs(chance - entries.chance) > limits.near)
    found = entries.pick(np.where(token < 0, entries.chance >= limits.least, differs))
    order = np.argsort(found.keys[-1])
    return _Entries([key[order] for key in found.keys], found.next[order], found.chance[order])


def _changes(values: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before; the first does."""
    changes = np.ones(len(values), bool)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _in_255ths(chances: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    return np.rint(chances * CERTAIN).clip(1, CERTAIN).astype(np.uint8)


class PhraseRecipe:
    """Phrases as a kind of draft in training: counted instead of fitted. vocab_size: rows of the target's logits."""

    dtype = "none"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._table: PhraseTable | None = None

    def count(self, examples: Mapping[str, Example], progress: Progress) -> Fitted:
        """Make the table of these answers, by key. Raises TrainingError."""
        begin = time.monotonic()
        progress("fit", 0, 1, "")
        # A prompt that was answered greedily and sampled is one prompt all the same.
        self._table = build_table(
            Answer(key.removesuffix(f"@{SAMPLED_TEMPERATURE}"), example.tokens, example.answer_start)
            for key, example in examples.items()
        )
        progress("fit", 1, 1, f"{len(self.table.keys)} phrases")
        return Fitted(seconds=time.monotonic() - begin)

    @property
    def table(self) -> PhraseTable:
        if self._table is None:
            raise RuntimeError("nothing was counted yet")
        return self._table

    def calibration(self, held_out: Sequence[Example]) -> Calibration:
        """How far the table's confidence is off on held-out answers, at every place where it has something to say."""
        draft, pairs = PhraseDraft("", self.table), []
        for example in held_out:
            tokens: list[int] = example.tokens.tolist()
            for place in range(example.answer_start + 1, len(tokens)):
                found = draft.find(tokens[max(0, place - LONGEST) : place])
                if found is not None:
                    pairs.append((found[1] / CERTAIN, found[0] == tokens[place]))
        error = calibration_error(pairs) or 0.0
        return Calibration(1.0, error, error, len(pairs))

    def write(self, folder: Path) -> None:
        self.table.write(folder / FILE_NAME, self._vocab_size)

    def draft(self, folder: Path, name: str, temperature: float, decoder: Decoder) -> PhraseDraft:
        return PhraseDraft(name, PhraseTable.read(folder / FILE_NAME, self._vocab_size))

    def architecture(self) -> dict[str, int | float]:
        return {"phrases": len(self.table.keys), "longest": self.table.sizes[-1]}
