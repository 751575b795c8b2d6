"""Reading model files: positional reads only, every failure a `ModelError` that names the file.

Weights are never memory-mapped: a file that is cut or replaced while mapped kills the process with SIGBUS, a short
`pread` is an ordinary error.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import ModelError

ByteArray = npt.NDArray[np.uint8]
Reader = Callable[[int, memoryview, int], None]  # fills the bytes from a position of an open file (its number)
# Of settings, and of lists that grow with a model or its vocabulary. Parsed, JSON takes up to twenty times its size.
MOST_SETTINGS, MOST_LISTS = 16 << 20, 64 << 20
_PIECE = 256 << 20  # Linux reads at most 2 GiB at once; smaller pieces also keep Ctrl-C responsive


class ReadOnlyFile:
    """An open file that is read by position. Safe to share between threads, if `reader` is.

    reader: reads instead of this class, as a load of a draft wants it (`LoadControl.read`); what it raises but OSError
    is passed on. size, modified_ns: its length, and when it was written last (ns since 1970), both when it was opened.
    """

    def __init__(self, path: Path, reader: Reader | None = None) -> None:
        self.path = path
        self._reader = reader
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._reads = 0  # in flight; the last one closes a file that was closed meanwhile
        self._closing = False
        try:
            # O_NONBLOCK: opening a named pipe must not hang; it has no effect on regular files.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be opened ({_reason(error)}).") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise ModelError(f"{path}: is not a regular file; give a model file or a model folder.")
        self._fd = fd
        self.size = status.st_size
        self.modified_ns = status.st_mtime_ns

    def read_into(self, buffer: ByteArray, offset: int, what: str) -> None:
        """Fill the contiguous uint8 `buffer` from `offset`. `what` names the content in errors ("tensor x")."""
        view = buffer.data.cast("B")
        fd = self._begin(what)
        try:
            if self._reader is None:
                self._read_now(fd, view, offset, what)
            else:
                self._reader(fd, view, offset)
        except OSError as error:
            raise ModelError(f"{self.path}: {what} cannot be read ({_reason(error)}).") from error
        finally:
            self._end()

    def _read_now(self, fd: int, view: memoryview, offset: int, what: str) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done : done + _PIECE]], offset + done)
            if count == 0:
                raise ModelError(
                    f"{self.path}: {what} is incomplete, the file ends at byte {offset + done} but "
                    f"{offset + len(view)} are needed; fetch the file again."
                )
            done += count

    def read(self, offset: int, count: int, what: str) -> bytes:
        """`count` bytes from `offset`; the caller has checked `count` against `size`."""
        buffer = np.empty(count, np.uint8)
        self.read_into(buffer, offset, what)
        return buffer.tobytes()

    def close(self) -> None:
        """Reads that other threads are doing end well; later ones raise ModelError."""
        with self._lock:
            self._closing = True
            self._release()

    def _begin(self, what: str) -> int:
        with self._lock:
            if self._fd is None or self._closing:
                raise ModelError(f"{self.path}: was closed before {what} was read.")
            self._reads += 1
            return self._fd

    def _end(self) -> None:
        with self._lock:
            self._reads -= 1
            self._release()

    def _release(self) -> None:
        """Close once nobody reads: the number of a closed file may at once belong to another file."""
        if self._closing and not self._reads and self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. shape: rows first; kind: a name of `gguf_types.KINDS`; offset: from the file's start."""

    name: str
    file: ReadOnlyFile
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def check_layout(path: Path, entries: list[TensorEntry], file_size: int) -> None:
    """Refuse tensors that reach beyond the file or overlap one another."""
    ordered = sorted(entries, key=lambda e: (e.offset, e.nbytes))
    needed = max((e.offset + e.nbytes for e in ordered), default=0)
    if needed > file_size:
        short = next(e for e in ordered if e.offset + e.nbytes > file_size)
        raise ModelError(
            f"{path}: incomplete, tensor {short.name} does not fit: expected {needed} bytes, the file has {file_size}; "
            "fetch it again."
        )
    for previous, entry in itertools.pairwise(ordered):
        if previous.offset + previous.nbytes > entry.offset:
            raise ModelError(f"{path}: tensors {previous.name} and {entry.name} overlap; the file is corrupt.")


def refuse_wrong_content(path: Path, head: bytes, size: int) -> None:
    """Name the usual things that are stored under a model's name without being one."""
    if size == 0:
        raise ModelError(f"{path}: the file is empty; fetch it again.")
    if head.startswith(b"version https://git-lfs"):
        expected = next((w for line in head.split(b"\n") if line.startswith(b"size ") for w in line[5:].split()), b"?")
        raise ModelError(
            f"{path}: is a Git LFS pointer, not the model: incomplete, expected "
            f"{expected[:20].decode('ascii', 'replace')} bytes; run `git lfs pull` or fetch the file itself."
        )
    if head.lstrip()[:15].lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise ModelError(f"{path}: is a web page, not a model; the download was refused or redirected, fetch it again.")
    if not head.strip(b"\0"):
        raise ModelError(f"{path}: starts with zeros only; the download is incomplete, fetch it again.")


def read_json(path: Path, most: int = MOST_SETTINGS) -> dict[str, Any]:
    """The JSON object in `path`, of `most` bytes."""
    file = ReadOnlyFile(path)
    try:
        if file.size > most:
            raise ModelError(f"{path}: {file.size} bytes are too many for such a file of a model; {most} may be.")
        raw = file.read(0, file.size, "its text")
    finally:
        file.close()
    refuse_wrong_content(path, raw[:512], len(raw))
    return parse_json_object(path, raw)


def parse_json_object(path: Path, raw: bytes) -> dict[str, Any]:
    """Parse UTF-8 JSON whose top level must be an object; duplicate keys are refused."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not a {type(value).__name__}.")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:200]!r} appears twice")
    return result


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
