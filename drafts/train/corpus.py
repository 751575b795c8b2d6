"""The target's answers with its hidden states, on disk: parts of some hundred answers, each written whole.

`corpus.json` binds the parts to all they depend on. A part depends on its own requests only, so a corpus that was
interrupted goes on to the same bytes (on the same machine).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from drafts.train.errors import TrainingError, unwritable
from drafts.train.prompts import PromptSet, chosen
from edgespec.files import write_bytes, write_text

if TYPE_CHECKING:
    from drafts.train.fit import Example
    from drafts.train.writer import Request, Written

_log = logging.getLogger(__name__)

PART = 384  # requests of one part
SAMPLED_TEMPERATURE = 0.7
_FORMAT = 1
_INDEX = "corpus.json"
_RAM_SHARE = 0.8  # of the memory that is free; the fit needs the rest

# progress(stage, done, total, note): called often, cheap.
Progress = Callable[[str, float, float, str], None]
Tensors = dict[str, npt.NDArray[Any]]

_CHANGED = {
    "target": "was written by another target",
    "tokenizer": "was written before the target's tokenizer changed",
    "graph_version": "was written by another version of edgespec",
    "writer": "was written with other settings",
    "prompts": "was written for other prompts",
}


class Writer(Protocol):
    """What answers requests; `drafts.train.writer.BatchWriter`."""

    def write(self, requests: Sequence[Request], progress: Callable[[int], None] = ...) -> Iterator[Written]: ...


@dataclass(frozen=True, slots=True)
class Binding:
    """What the answers depend on. target, tokenizer: fingerprints; writer: settings that may change the answers."""

    target: str
    tokenizer: str
    graph_version: int
    writer: Mapping[str, Any]
    hidden_size: int
    window: int


def make_requests(prompts: PromptSet, *, max_new_tokens: int, sampled: float, seed: int) -> list[Request]:
    """Every prompt greedily; of the training prompts the share `sampled` once more at temperature 0.7."""
    from drafts.train.writer import Request

    requests = [Request(p.key, p.ids, max_new_tokens) for p in (*prompts.train, *prompts.held_out)]
    requests += [
        Request(f"{p.key}@{SAMPLED_TEMPERATURE}", p.ids, max_new_tokens, SAMPLED_TEMPERATURE, seed)
        for p in prompts.train
        if chosen(f"{seed}:{p.key}", sampled)
    ]
    return requests


class Corpus:
    """The answers to `requests`, in `folder`. hidden: whether `examples` gives their hidden states, or only texts."""

    def __init__(
        self, folder: Path, binding: Binding, requests: Sequence[Request], *, part: int = PART, hidden: bool = True
    ) -> None:
        self.folder = folder
        self._hidden = hidden
        self._hidden_size, self._window = binding.hidden_size, binding.window
        self._parts = [list(requests[i : i + part]) for i in range(0, len(requests), part)]
        self._bound = {
            "target": binding.target,
            "tokenizer": binding.tokenizer,
            "graph_version": binding.graph_version,
            "writer": {**binding.writer, "window": binding.window, "part": part},
            "prompts": _digest(requests),
        }
        self._done: dict[str, dict[str, Any]] = {}

    def write(self, writer: Callable[[], Writer], progress: Progress, *, restart: bool = False) -> None:
        """Make the parts that are missing or damaged. writer: makes the writer, if there is anything to write.

        Raises TrainingError for a corpus that belongs to something else (`restart` deletes it instead), for one that
        does not fit memory or disk, and when the disk is full; parts that were finished stay and count next time.
        """
        self._open(restart)
        missing = [n for n in range(len(self._parts)) if not self._intact(n)]
        self._check_room(missing)
        if not missing:
            return
        made = writer()
        report = _Report(progress, self._parts, missing)
        for number in missing:
            answers = []
            for written in made.write(self._parts[number], report.tokens):
                answers.append(written)
                report.answer()
            self._write_part(number, sorted(answers, key=lambda written: written.request.key))

    def examples(self, progress: Progress = lambda *seen: None) -> dict[str, Example]:
        """key -> answer, from all parts in order. Every part is checked against its hash."""
        found: dict[str, Example] = {}
        self._open(restart=False)
        for number in range(len(self._parts)):
            path = self._path(number)
            content = _content(path)
            if hashlib.sha256(content or b"").hexdigest() != self._done.get(path.name, {}).get("sha256"):
                raise TrainingError(f"{path}: is missing or damaged; run the same command again, it is made anew.")
            found |= read_part(content or b"", hidden=self._hidden)
            progress("read", number + 1, len(self._parts), "")
        return found

    @property
    def digest(self) -> str:
        """sha256 (hex) of all parts together."""
        parts = (self._done[self._path(n).name]["sha256"] for n in range(len(self._parts)))
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @property
    def answer_tokens(self) -> int:
        return sum(entry["tokens"] for entry in self._done.values())

    @property
    def largest_bytes(self) -> int:
        """Bytes of all answers if none ends before its limit."""
        return sum(self._part_bytes(n) for n in range(len(self._parts)))

    def _part_bytes(self, number: int) -> int:
        positions = sum(min(self._window, len(r.prompt)) + r.max_new_tokens for r in self._parts[number])
        return positions * self._hidden_size * 2 + sum(4 * len(r.prompt) for r in self._parts[number])

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"

    def _open(self, restart: bool) -> None:
        """Read the index, refuse (or with `restart` delete) a corpus of something else."""
        index = self.folder / _INDEX
        self._clear(".part-*", ".corpus.json.*")  # what a killed write left
        content = _content(index)
        if content is None:
            if any(self.folder.glob("part-*")):
                _log.warning("%s is missing; the answers beside it cannot be checked and are made again", index)
            return
        try:
            saved = json.loads(content)
            bound, parts = saved["bound"], saved["parts"]
            if saved["format"] != _FORMAT or not all(_is_entry(entry) for entry in parts.values()):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            _log.warning("%s is damaged; all answers are made again", index)
            return
        wrong = next((name for name, value in self._bound.items() if bound.get(name) != value), None)
        if wrong is None:
            self._done = parts
        elif restart:
            self._clear("part-*", _INDEX)
        else:
            raise TrainingError(
                f"{self.folder}: {_CHANGED[wrong]} ({wrong}: {_differing(bound.get(wrong), self._bound[wrong])}). "
                "Give another folder with --work, or --restart to write the answers anew."
            )

    def _clear(self, *patterns: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in [path for pattern in patterns for path in self.folder.glob(pattern)]:
                path.unlink()
        except OSError as error:
            raise unwritable(self.folder, error, "Nothing was written.") from error

    def _intact(self, number: int) -> bool:
        """Whether the part is there as it was written; else say so if it was there."""
        path = self._path(number)
        entry = self._done.get(path.name)
        content = _content(path)
        if entry is None or content is None:
            return False
        if hashlib.sha256(content).hexdigest() == entry["sha256"]:
            return True
        _log.warning("%s is damaged; it is made again", path)
        del self._done[path.name]
        return False

    def _check_room(self, missing: Sequence[int]) -> None:
        need, free = self.largest_bytes, free_memory()
        if self._hidden and need > free * _RAM_SHARE:
            raise TrainingError(
                f"the answers to {sum(map(len, self._parts))} requests take up to {_mib(need)}, and {_mib(free)} of "
                "memory are free: train on fewer prompts (--limit N), shorter answers (--max-new-tokens), or no "
                "sampled ones (--sampled 0)."
            )
        need, free = sum(map(self._part_bytes, missing)), shutil.disk_usage(self.folder).free
        if need > free:
            raise TrainingError(
                f"{self.folder}: up to {_mib(need)} of answers are still to be written and {_mib(free)} are free on "
                "its disk: make room, or give a folder on another disk with --work."
            )

    def _write_part(self, number: int, answers: Sequence[Written]) -> None:
        from safetensors.numpy import save

        path = self._path(number)
        tensors, keys = part_tensors(answers)
        content = save(tensors, metadata={"keys": json.dumps(keys)})
        entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "answers": len(keys)}
        done = {**self._done, path.name: {**entry, "tokens": int(tensors["answer_lengths"].sum())}}
        saved = {"format": _FORMAT, "bound": self._bound, "parts": dict(sorted(done.items()))}
        try:
            write_bytes(path, content)
            write_text(self.folder / _INDEX, json.dumps(saved, indent=1))
        except OSError as error:
            kept = f"{len(self._done)} of {len(self._parts)} parts are finished and stay."
            raise unwritable(path, error, kept) from error
        self._done = done


def part_tensors(answers: Sequence[Written]) -> tuple[Tensors, list[str]]:
    """Arrays of one part, and the keys of its answers in order. Lengths split the arrays that are put end to end."""

    def numbers(values: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.array(values, np.int32)

    tensors: Tensors = {
        "tokens": numbers([token for w in answers for token in (*w.request.prompt, *w.answer)]),
        "prompt_lengths": numbers([len(w.request.prompt) for w in answers]),
        "answer_lengths": numbers([len(w.answer) for w in answers]),
        "hidden_lengths": numbers([len(w.hidden) for w in answers]),
        "hidden": np.concatenate([w.hidden for w in answers]),
    }
    return tensors, [w.request.key for w in answers]


def read_part(content: bytes, *, hidden: bool = True) -> dict[str, Example]:
    """key -> answer of a part's bytes, without its hidden states if they are not wanted.

    Raises ValueError or KeyError for what is none; hashes are the caller's.
    """
    from safetensors.numpy import load

    from drafts.train.fit import Example

    length = int.from_bytes(content[:8], "little")
    keys = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["keys"])
    tensors = load(content)
    lengths = tensors["prompt_lengths"] + tensors["answer_lengths"]
    tokens = np.split(tensors["tokens"], np.cumsum(lengths)[:-1])
    states = np.split(tensors["hidden"], np.cumsum(tensors["hidden_lengths"])[:-1])
    starts = tensors["prompt_lengths"].tolist()
    if not hidden:
        states = [np.empty((0, tensors["hidden"].shape[-1]), np.float16)] * len(keys)
    return {key: Example(t, s, h) for key, t, s, h in zip(keys, tokens, starts, states, strict=True)}


class _Report:
    """Progress of the answers: answers done of all, and the speed of those written now."""

    def __init__(self, progress: Progress, parts: Sequence[Sequence[Request]], missing: Sequence[int]) -> None:
        self._progress = progress
        self._total = sum(map(len, parts))
        self._done = self._total - sum(len(parts[n]) for n in missing)
        self._tokens = 0
        self._begin = time.monotonic()

    def tokens(self, count: int) -> None:
        self._tokens += count

    def answer(self) -> None:
        self._done += 1
        speed = self._tokens / max(1e-3, time.monotonic() - self._begin)
        self._progress("answers", self._done, self._total, f"{speed:.0f} tokens/s")


def free_memory() -> int:
    """Bytes of memory that can be taken without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read ({error.strerror}).") from error


def _is_entry(entry: Any) -> bool:
    return isinstance(entry.get("sha256"), str) and type(entry.get("tokens")) is int


def _digest(requests: Sequence[Request]) -> str:
    digest = hashlib.sha256()
    for r in requests:
        digest.update(json.dumps([r.key, r.prompt, r.max_new_tokens, r.temperature, r.seed]).encode())
    return digest.hexdigest()


def _differing(saved: Any, now: Any) -> str:
    if isinstance(saved, dict) and isinstance(now, dict):
        names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
        return ", ".join(f"{name} {saved.get(name)} there, {now.get(name)} here" for name in names)
    return f"{str(saved)[:12]} there, {str(now)[:12]} here"


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.0f} MiB"
