"""Traces: texts of the target on which *every* draft was scored at every position. What rankers are trained on.

A folder holds `index.json` (what was recorded with what, measured costs, and one entry a text with the sha256 of its
shard) and one safetensors file a text. Everything is written whole or not at all, and read strictly.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from predictor.files import write_whole

INDEX = "index.json"
FORMAT = 1  # raise when something changes its meaning
MAX_INDEX = 64 << 20  # bytes
MAX_SHARD = 256 << 20
MAX_DRAFTS = 256
MAX_GAMMA = 64
_FILE = re.compile(r"text-[0-9a-f]{16}\.safetensors")

Uint8 = npt.NDArray[np.uint8]


class TraceError(ValueError):
    """A trace folder cannot be read or written; the message names the file and says what to do."""


@dataclass(frozen=True, slots=True)
class TraceDraft:
    """A draft of the traces. fingerprint: sha256 (hex) of its weights. free: no weights, costs nothing to ask.

    expected: its first token's acceptance as its manifest has it, None if that says nothing.
    """

    name: str
    kind: str
    domain: str
    fingerprint: str
    nbytes: int
    free: bool = False
    expected: float | None = None


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What all texts of a folder have in common.

    target: what decides the target's answers (`fingerprint` and more). gamma_max: tokens of the longest block that was
    tried. stride: positions from one that was scored to the next. recent: rows of hidden states kept before the answer.
    prompt_window: at most so many of the prompt's last rows are in its mean. confidences: whether blocks were made
    whole and the drafts' confidences kept; else a block ends with its first wrong token.
    """

    target: Mapping[str, Any]
    hidden_size: int
    gamma_max: int
    stride: int
    max_new_tokens: int
    recent: int
    prompt_window: int
    confidences: bool
    drafts: tuple[TraceDraft, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "target": dict(self.target), "drafts": [asdict(draft) for draft in self.drafts]}

    @classmethod
    def from_json(cls, data: Any) -> TraceHeader:
        """Raises ValueError, KeyError or TypeError for anything that `to_json` would not write."""
        header = cls(**{**data, "drafts": tuple(TraceDraft(**draft) for draft in data["drafts"])})
        numbers = (header.hidden_size, header.gamma_max, header.stride, header.max_new_tokens, header.recent)
        if not all(isinstance(n, int) and n >= 1 for n in (*numbers, header.prompt_window)):
            raise ValueError("its sizes must be whole numbers from 1 up")
        if header.gamma_max > MAX_GAMMA or len(header.drafts) > MAX_DRAFTS:
            raise ValueError("its sizes are beyond all measure")
        names = [draft.name for draft in header.drafts]
        if len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
            raise ValueError("its drafts need names of their own")
        for draft in header.drafts:
            if not isinstance(draft.free, bool) or not (draft.expected is None or 0 <= draft.expected <= 1):
                raise ValueError(f"draft {draft.name} has an acceptance of {draft.expected!r}, free is {draft.free!r}")
        if not isinstance(header.target, dict) or not isinstance(header.target.get("fingerprint"), str):
            raise ValueError("its target has no fingerprint")
        return header

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(draft.name for draft in self.drafts)


@dataclass(frozen=True, slots=True)
class TracedText:
    """One prompt, the target's plain greedy answer, and what every draft would have guessed on the way.

    Column i of the arrays belongs to the position at which `1 + i * stride` tokens of the answer are known (the first
    comes from the prompt's own forward), n columns up to the last position that has a next token.
    accepts: uint8 [drafts, n], how many guesses in a row are right, of at most gamma_max and never beyond the end.
    confidences: uint8 [drafts, n, gamma_max] in 255ths, 0 where no token was proposed; None if not recorded.
    lookup_level, lookup_accepts: uint8 [n], the same of prompt lookup, with the length of its match.
    hidden: float16 [rows, hidden_size], the target's states after the final norm of consecutive positions, the last row
    that of the answer's last token but one. prompt_hidden: float32 [hidden_size], the mean over the prompt's last rows.
    """

    key: str
    name: str
    domain: str
    prompt: npt.NDArray[np.int32]
    answer: npt.NDArray[np.int32]
    accepts: Uint8
    lookup_level: Uint8
    lookup_accepts: Uint8
    hidden: npt.NDArray[np.float16]
    prompt_hidden: npt.NDArray[np.float32]
    confidences: Uint8 | None = None

    def known(self, stride: int) -> npt.NDArray[np.int64]:
        """Tokens of the answer that are known at each column."""
        return np.arange(1, len(self.answer), stride)

    def replay(self) -> dict[str, Any]:
        """What a simulation of rounds needs, by the names of its arguments; only where every position was scored."""
        if self.accepts.shape[1] != len(self.answer) - 1:
            raise TraceError(f"text {self.name}: only every few positions were scored; record it with --stride 1")
        return {
            "domain": self.domain,
            "prompt_length": len(self.prompt),
            "accepts": self.accepts,
            "confidences": self.confidences,
            "lookup_level": self.lookup_level,
            "lookup_accepts": self.lookup_accepts,
        }

    def check(self, header: TraceHeader) -> None:
        """Raise ValueError for whatever does not fit the header, or itself."""
        columns = len(range(1, len(self.answer), header.stride))
        drafts, gamma = len(header.drafts), header.gamma_max
        wanted: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "prompt": ((len(self.prompt),), np.int32),
            "answer": ((len(self.answer),), np.int32),
            "accepts": ((drafts, columns), np.uint8),
            "lookup_level": ((columns,), np.uint8),
            "lookup_accepts": ((columns,), np.uint8),
            "hidden": ((len(self.hidden), header.hidden_size), np.float16),
            "prompt_hidden": ((header.hidden_size,), np.float32),
        }
        if self.confidences is not None:
            wanted["confidences"] = ((drafts, columns, gamma), np.uint8)
        for name, (shape, dtype) in wanted.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}")
        if not len(self.prompt) or columns < 1 or len(self.answer) > header.max_new_tokens:
            raise ValueError(f"a prompt of {len(self.prompt)} and an answer of {len(self.answer)} tokens")
        if header.confidences != (self.confidences is not None):
            raise ValueError("confidences are there, or not, against what the index says")
        if not len(self.answer) <= len(self.hidden) + 1 <= len(self.prompt) + len(self.answer):
            raise ValueError(f"{len(self.hidden)} rows of hidden states")
        left = np.minimum(len(self.answer) - self.known(header.stride), gamma)
        if (self.accepts > left).any() or (self.lookup_accepts > left).any():
            raise ValueError("more guesses are right than could be made")
        if not (np.isfinite(self.hidden).all() and np.isfinite(self.prompt_hidden).all()):
            raise ValueError("hidden states that are no numbers")


_ARRAYS = ("prompt", "answer", "accepts", "lookup_level", "lookup_accepts", "hidden", "prompt_hidden")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A text of the index."""

    key: str
    name: str
    domain: str
    file: str
    bytes: int
    sha256: str


@dataclass
class _Index:
    header: TraceHeader
    costs: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, _Entry] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        texts = [asdict(entry) for entry in self.entries.values()]
        return {"format": FORMAT, "header": self.header.to_json(), "costs": self.costs, "texts": texts}


def text_key(prompt: Sequence[int]) -> str:
    """What a prompt is known by in a folder: 16 hex digits."""
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()[:16]


class TraceWriter:
    """Adds texts to a folder. What was added is on storage, and in the index, when `add` returns.

    resume: go on with a folder that has traces of the same drafts and settings; those of its texts that are damaged are
    dropped and listed in `damaged`. Raises TraceError for a folder with other traces, or that cannot be written.
    """

    def __init__(self, folder: Path, header: TraceHeader, *, resume: bool = False) -> None:
        self.folder = folder
        self.damaged: list[str] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            exists = (folder / INDEX).exists()
        except OSError as error:
            raise TraceError(f"{folder}: cannot be written ({error.strerror or error})") from error
        self._index = _Index(header)
        if exists:
            if not resume:
                raise TraceError(f"{folder}: has traces already; go on with --resume, or choose another folder")
            self._index = self._taken_up(header)
        self._write_index()

    def _taken_up(self, header: TraceHeader) -> _Index:
        index = _read_index(self.folder)
        if index.header.to_json() != json.loads(json.dumps(header.to_json())):
            found, wanted = index.header.to_json(), header.to_json()
            differs = ", ".join(key for key in wanted if found.get(key) != json.loads(json.dumps(wanted[key])))
            raise TraceError(
                f"{self.folder / INDEX}: its texts were recorded with other settings ({differs}); "
                "choose another folder, or remove this one"
            )
        for key, entry in list(index.entries.items()):
            try:
                _read_shard(self.folder, entry)
            except TraceError:
                self.damaged.append(entry.file)
                del index.entries[key]
        return index

    def __contains__(self, key: str) -> bool:
        return key in self._index.entries

    def __len__(self) -> int:
        return len(self._index.entries)

    def add(self, text: TracedText) -> None:
        """Keep a text; one of the same key is replaced. Raises ValueError if it does not fit, TraceError."""
        text.check(self._index.header)
        arrays = {name: np.ascontiguousarray(getattr(text, name)) for name in _ARRAYS}
        if text.confidences is not None:
            arrays["confidences"] = np.ascontiguousarray(text.confidences)
        content = save(arrays)
        digest = hashlib.sha256(content).hexdigest()
        file = f"text-{text.key}.safetensors"
        _write(self.folder / file, content)
        entry = _Entry(text.key, text.name, text.domain, file, len(content), digest)
        self._index.entries[text.key] = entry
        self._write_index()

    @property
    def costs(self) -> Mapping[str, Any]:
        """What was measured on this device; empty until then."""
        return self._index.costs

    def set_costs(self, costs: Mapping[str, Any]) -> None:
        """Keep what was measured on this device: JSON values."""
        self._index.costs = dict(costs)
        self._write_index()

    def _write_index(self) -> None:
        _write(self.folder / INDEX, (json.dumps(self._index.to_json(), indent=1) + "\n").encode())


class TraceReader:
    """The texts of a folder, one at a time; each is checked when it is read.

    Raises TraceError for an index, and while iterating for a text, that is damaged or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = _read_index(folder)
        if not self._index.entries:
            raise TraceError(f"{folder}: holds no text; record some with 'edgespec bench record'")

    @property
    def header(self) -> TraceHeader:
        return self._index.header

    @property
    def costs(self) -> Mapping[str, Any]:
        return self._index.costs

    def __len__(self) -> int:
        return len(self._index.entries)

    def __iter__(self) -> Iterator[TracedText]:
        for entry in self._index.entries.values():
            yield self._text(entry)

    def _text(self, entry: _Entry) -> TracedText:
        arrays = _read_shard(self.folder, entry)
        extra = {*arrays} - {*_ARRAYS, "confidences"}
        missing = {*_ARRAYS} - {*arrays}
        if extra or missing:
            raise _damaged(self.folder / entry.file, f"arrays {sorted(extra | missing)} are missing or unknown")
        text = TracedText(entry.key, entry.name, entry.domain, **arrays)
        try:
            text.check(self.header)
        except ValueError as error:
            raise _damaged(self.folder / entry.file, str(error)) from None
        return text


def _damaged(path: Path, reason: str) -> TraceError:
    return TraceError(f"{path}: is damaged ({reason}); record again with --resume")


def _read_index(folder: Path) -> _Index:
    path = folder / INDEX
    if not path.exists():
        raise TraceError(f"{folder}: there are no traces (no {INDEX}); give the folder of 'edgespec bench record'")
    content = _read(path, MAX_INDEX)
    try:
        data = json.loads(content)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r} is not known, only {FORMAT}")
        entries = [_Entry(**entry) for entry in data["texts"]]
        for entry in entries:
            words = (entry.key, entry.name, entry.domain, entry.file, entry.sha256)
            if not all(isinstance(word, str) for word in words) or not _FILE.fullmatch(entry.file):
                raise ValueError(f"no text is kept in {entry.file!r}")
        costs = data["costs"]
        if not isinstance(costs, dict):
            raise ValueError("its costs are no table")
        return _Index(TraceHeader.from_json(data["header"]), costs, {entry.key: entry for entry in entries})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"{type(error).__name__}: {error}"[:200]
        raise TraceError(f"{path}: is no index of traces, or damaged ({detail}); record anew") from None


def _read_shard(folder: Path, entry: _Entry) -> dict[str, npt.NDArray[Any]]:
    path = folder / entry.file
    content = _read(path, MAX_SHARD)
    if len(content) != entry.bytes or hashlib.sha256(content).hexdigest() != entry.sha256:
        raise _damaged(path, f"{len(content)} bytes with another sha256 than the index has")
    try:
        return dict(load(content))
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, str(error)[:200]) from None


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(content) > limit:
        raise TraceError(f"{path}: has more than {limit} bytes, which no trace has")
    return content


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from error


def quantised(confidence: float) -> int:
    """A confidence of 0 to 1 as 255ths, at least 1 so that 0 means that nothing was proposed."""
    if not (math.isfinite(confidence) and 0 <= confidence <= 1):
        raise ValueError(f"a confidence of {confidence}")
    return max(round(255 * confidence), 1)
