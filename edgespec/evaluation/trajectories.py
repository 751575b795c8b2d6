"""Recorded answers of the target, kept on disk."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from drafts.evaluate import Trajectory
from edgespec.files import write_bytes

_log = logging.getLogger(__name__)

_FORMAT = 1  # of the files; raise when they change
_DIGEST = 32


class TrajectoryStore:
    """Recorded answers in a folder, one file each; without a folder nothing is kept.

    binding: everything besides the prompt that decides what the target writes (its weights' fingerprint, their format,
    the graph's version, limits): another binding is another file. A file that is damaged is noticed, warned about once,
    and recorded anew. A folder that cannot be written costs one warning, nothing else.
    """

    def __init__(self, folder: Path | None, binding: Mapping[str, Any]) -> None:
        self.folder = folder
        self._binding = json.dumps({"format": _FORMAT, **binding}, sort_keys=True)
        self._told = {"damaged": False, "unwritable": False}
        self.reused = self.recorded = self.damaged = 0

    def get(self, prompt: Sequence[int], make: Callable[[], Trajectory]) -> Trajectory:
        """The kept answer to `prompt`, or what `make` records, which is then kept."""
        file = self._file(prompt)
        found = None if file is None else self._read(file, prompt)
        if found is not None:
            self.reused += 1
            return found
        made = make()
        self.recorded += 1
        if file is not None:
            self._write(file, made)
        return made

    def _file(self, prompt: Sequence[int]) -> Path | None:
        if self.folder is None:
            return None
        text = f"{self._binding}\n{','.join(map(str, prompt))}"
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.answer"

    def _read(self, file: Path, prompt: Sequence[int]) -> Trajectory | None:
        try:
            content = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn("damaged", "recorded answer %s cannot be read (%s); it is recorded anew", file, error)
            return None
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            with suppress(ValueError, KeyError, OSError, EOFError):
                found = _unpack(content[_DIGEST:])
                if found.prompt == tuple(prompt):
                    return found
        self.damaged += 1
        self._warn("damaged", "recorded answer %s is damaged; it is recorded anew", file)
        return None

    def _write(self, file: Path, trajectory: Trajectory) -> None:
        content = _pack(trajectory)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, hashlib.sha256(content).digest() + content)
        except OSError as error:
            self._warn("unwritable", "recorded answers cannot be kept in %s: %s", file.parent, error.strerror or error)

    def _warn(self, kind: str, message: str, *details: object) -> None:
        if not self._told[kind]:
            self._told[kind] = True
            _log.warning(message, *details)


def _pack(trajectory: Trajectory) -> bytes:
    stream = io.BytesIO()
    numbers = [trajectory.limit, trajectory.token_count, trajectory.start]
    arrays = {
        "prompt": np.array(trajectory.prompt, np.int32),
        "answer": np.array(trajectory.answer, np.int32),
        "numbers": np.array(numbers, np.int64),
    }
    if trajectory.hidden is not None:
        arrays["hidden"] = trajectory.hidden  # float32: what a live draft would see, to the last bit
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    return stream.getvalue()


def _unpack(content: bytes) -> Trajectory:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        limit, token_count, start = map(int, arrays["numbers"])
        hidden = arrays.get("hidden")
        prompt, answer = (tuple(map(int, arrays[name])) for name in ("prompt", "answer"))
    return Trajectory(prompt, answer, limit, token_count, hidden, start)
