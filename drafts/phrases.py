"""A table of the target's own phrases: after which few tokens it mostly writes which one. No model call.

The table is made from the target's answers (`drafts.train.phrases`). The longest of the stored n-grams that the text
ends with decides; every entry knows the chance that its token is right. On disk it is `phrases.safetensors`:

    keys        uint64 [entries]  hashes of the n-grams, ascending, each once
    next        int32  [entries]  the token that follows
    confidence  uint8  [entries]  its chance to be right, in 255ths, 1 and up

with the format's version and the lengths of the n-grams in the header's metadata. An n-gram's hash is `step` over its
tokens, the last one first.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from drafts.base import Choose, Proposal
from edgespec.errors import DraftError, ModelError
from edgespec.files import write_bytes
from edgespec.models.weights.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from drafts.states import HiddenStates

FILE_NAME = "phrases.safetensors"
VERSION = 1
MOST_ENTRIES = 1 << 22  # 52 MiB; more than any table that is worth its memory
LONGEST = 8  # tokens of an n-gram
CERTAIN = 255  # the confidence of a token that is always right

# Levels are those of lookup, whose matches of 2, 3, ... 6 tokens are about as often right: the planner assumes the same
# of both until it has seen them at work. (The length of the n-gram says much less than the confidence.)
LEVELS = tuple(2 + bisect_right((0.375, 0.5, 0.6, 0.7), chance / CERTAIN) for chance in range(CERTAIN + 1))

_MULTIPLIER, _MASK, _SHIFT = 0x9E3779B97F4A7C15, (1 << 64) - 1, 29
_LAYOUT: dict[str, tuple[str, np.dtype[Any]]] = {
    "keys": ("U64", np.dtype("<u8")),
    "next": ("I32", np.dtype("<i4")),
    "confidence": ("U8", np.dtype("u1")),
}
_METADATA = {"format": "edgespec-phrases", "version": str(VERSION)}

Hash = TypeVar("Hash", int, npt.NDArray[np.uint64])


def step(before: Hash, token: Hash) -> Hash:
    """The hash of an n-gram that is one token longer to the left. The hash of no token is 0.

    So the hashes of all suffixes of a text come one after the other, and each further token is another round of mixing:
    n-grams of different lengths have unrelated hashes. Takes ints, or uint64 arrays.
    """
    mixed: Any = ((before ^ (token + 1)) * _MULTIPLIER) & _MASK
    key: Hash = mixed ^ (mixed >> _SHIFT)
    return key


@dataclass(frozen=True)
class PhraseTable:
    """All entries, as in the file. sizes: lengths of the n-grams, ascending."""

    sizes: tuple[int, ...]
    keys: npt.NDArray[np.uint64]
    next: npt.NDArray[np.int32]
    confidence: npt.NDArray[np.uint8]

    @classmethod
    def read(cls, path: Path, vocab_size: int) -> PhraseTable:
        """The table in a file, for a target with so many rows of logits. Positional reads, nothing is mapped.

        Raises DraftError for a file that is missing, cut, no table, or that holds values which cannot be right.
        """
        try:
            sizes, arrays = _read(Path(path))
        except ModelError as error:
            raise DraftError(str(error)) from error
        table = cls(sizes, arrays["keys"], arrays["next"], arrays["confidence"])
        table.check(str(path), vocab_size)
        return table

    def write(self, path: Path, vocab_size: int) -> None:
        """Write the file in one durable step; a failure leaves the old one. Raises DraftError, OSError."""
        self.check(str(path), vocab_size)
        # Not by the safetensors library: it writes metadata of several texts in an order that changes from run to run.
        header: dict[str, Any] = {"__metadata__": {**_METADATA, "sizes": ",".join(map(str, self.sizes))}}
        parts, end = [], 0
        for name, (kind, dtype) in _LAYOUT.items():  # wide numbers first, so that all are aligned
            part = np.ascontiguousarray(getattr(self, name), dtype).tobytes()
            header[name] = {"dtype": kind, "shape": [len(self.keys)], "data_offsets": [end, end + len(part)]}
            parts.append(part)
            end += len(part)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        write_bytes(Path(path), b"".join([len(text).to_bytes(8, "little"), text, *parts]))

    def check(self, source: str, vocab_size: int) -> None:
        """Raise DraftError, beginning with `source`, for values that no table has."""
        if not 1 <= len(self.keys) <= MOST_ENTRIES:
            raise DraftError(f"{source}: has {len(self.keys)} phrases; a table has 1 to {MOST_ENTRIES}.")
        if not (self.keys[1:] > self.keys[:-1]).all():
            raise DraftError(f"{source}: keys must be in ascending order, each once; the draft is damaged.")
        least, most = int(self.next.min()), int(self.next.max())
        if least < 0 or most >= vocab_size:
            wrong = least if least < 0 else most
            raise DraftError(f"{source}: proposes token {wrong}, but the target's are 0 to {vocab_size - 1}.")
        if not self.confidence.all():
            raise DraftError(f"{source}: a confidence is 0; the draft is damaged.")

    @property
    def nbytes(self) -> int:
        return sum(int(getattr(self, name).nbytes) for name in _LAYOUT)


class PhraseDraft:
    """A table that is ready to be used. domain: what it was made for, "" = no domain.

    Costs next to nothing to ask, so the planner scores it in every round, as it does lookup.
    """

    kind = "phrases"
    reads_hidden = False
    free = True

    def __init__(self, name: str, table: PhraseTable, *, domain: str = "") -> None:
        self.name = name
        self.domain = domain
        self.sizes = tuple(sorted(table.sizes, reverse=True))
        # Arrays of machine numbers: a dict would answer ten times as fast (0.1 us), and take ten times the memory.
        self._keys = array("Q", table.keys.astype(np.uint64).tobytes())
        self._next: Sequence[int] = array("i", table.next.astype(np.intc).tobytes())
        self._confidence = table.confidence.astype(np.uint8).tobytes()

    @property
    def nbytes(self) -> int:
        """Bytes of the table in memory."""
        return len(self._keys) * (8 + 4 + 1)

    def open(self, states: HiddenStates | None = None) -> PhraseSession:
        return PhraseSession(self)

    def close(self) -> None:
        """Forget the table; sessions find nothing any more."""
        self._keys = array("Q")

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(next token, confidence in 255ths) by the longest stored n-gram that `tokens` end with, or None."""
        key, hashes = 0, [0]
        for token in reversed(tokens[-self.sizes[0] :]):
            key = step(key, token)
            hashes.append(key)
        keys = self._keys
        for size in self.sizes:
            if size < len(hashes):
                place = bisect_left(keys, hashes[size])
                if place < len(keys) and keys[place] == hashes[size]:
                    return self._next[place], self._confidence[place]
        return None


class PhraseSession:
    """One conversation. All it keeps is what was found for the text's end, so that `propose` need not look again."""

    def __init__(self, draft: PhraseDraft) -> None:
        self._draft = draft
        self._found_at = -1  # the length of the text that `_found` belongs to
        self._found: tuple[int, int] | None = None

    def level(self, tokens: Sequence[int]) -> int:
        """0 without a match, else 2 to 6 by the confidence of the next token."""
        found = self._find(tokens)
        return 0 if found is None else LEVELS[found[1]]

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        proposal, chance = Proposal(), 1.0
        found = self._find(tokens)
        text = list(tokens[-self._draft.sizes[0] :])
        while found is not None:
            token, confidence = found[0], found[1] / CERTAIN
            chance *= confidence
            if chance < floor:
                break
            proposal.tokens.append(token)
            proposal.rows.append(None)
            proposal.confidences.append(confidence)
            if len(proposal) == gamma:
                break
            text.append(token)
            found = self._draft.find(text)
        return proposal

    def _find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        if len(tokens) != self._found_at:
            self._found, self._found_at = self._draft.find(tokens), len(tokens)
        return self._found

    def crop(self, length: int) -> None:
        self._found_at = -1

    def close(self) -> None:
        self.crop(0)


def _read(path: Path) -> tuple[tuple[int, ...], dict[str, npt.NDArray[Any]]]:
    """n-gram lengths and arrays of a file, checked as far as the header goes. Raises ModelError, DraftError."""
    opened = SafetensorsFile(path, types={kind: dtype.itemsize for kind, dtype in _LAYOUT.values()})
    try:
        sizes = _sizes(path, opened.metadata)
        unknown, missing = sorted(opened.tensors.keys() - _LAYOUT), sorted(_LAYOUT.keys() - opened.tensors)
        if unknown:
            raise DraftError(f"{path}: tensor {unknown[0][:200]} has no place in a table of phrases.")
        if missing:
            raise DraftError(f"{path}: tensor {missing[0]} is missing; the draft is incomplete.")
        shape, arrays = opened.tensors["keys"].shape, {}
        if len(shape) == 1 and not 1 <= shape[0] <= MOST_ENTRIES:
            raise DraftError(f"{path}: has {shape[0]} phrases; a table has 1 to {MOST_ENTRIES}.")
        for name, (kind, dtype) in _LAYOUT.items():
            entry = opened.tensors[name]
            if entry.kind != kind or entry.shape != shape or len(shape) != 1:
                raise DraftError(
                    f"{path}: tensor {name} is {entry.kind} {list(entry.shape)}, but must be {kind} with one number "
                    "for each key; the draft is damaged."
                )
            arrays[name] = np.empty(shape, dtype)
            opened.file.read_into(arrays[name].view(np.uint8), entry.offset, f"tensor {name}")
        return sizes, arrays
    finally:
        opened.close()


def _sizes(path: Path, metadata: dict[str, Any]) -> tuple[int, ...]:
    """The lengths of the n-grams from the header's metadata. Raises DraftError for what is no such header."""
    for key, wanted in _METADATA.items():
        if metadata.get(key) != wanted:
            raise DraftError(
                f"{path}: {key} is {str(metadata.get(key))[:40]!r} and must be {wanted!r}: this is no table of "
                "phrases, or one of another version of edgespec; make the draft again."
            )
    words = str(metadata.get("sizes")).split(",")[: LONGEST + 1]
    sizes = tuple(int(word) for word in words if word.isascii() and word.isdigit() and len(word) == 1)
    if len(sizes) != len(words) or list(sizes) != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1] <= LONGEST:
        raise DraftError(
            f"{path}: sizes is {str(metadata.get('sizes'))[:40]!r}; it must list lengths from 1 to {LONGEST}."
        )
    return sizes
