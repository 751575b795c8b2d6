"""Writes safetensors files of tensors that come piece by piece, several at a time, and whose types show only then.

The header stands in front and is known last: room is left for it, and what it does not fill stays blank, which the
format allows. It fills whole pages, so the first tensor begins on one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import ConfigError

_PAGE = 4096
_ENTRY_BYTES = 160  # of a tensor in the header, without its name: type, shape and offsets of up to 13 digits
_TYPES = {"float16": "F16", "float32": "F32", "uint8": "U8", "int8": "I8"}
_METADATA = {"format": "edgespec"}
_PART = re.compile(r"part-(\d+)")
_FINISHED = re.compile(r"model(?:-(\d{5})-of-\d{5})?\.safetensors")
_PIECE = 1 << 20  # bytes read at once for a checksum
Form = tuple[np.dtype[Any], tuple[int, ...]]  # type and shape of a tensor


def header_room(names: list[str]) -> int:
    """Bytes that the header of tensors with these names is given."""
    need = 8 + len(json.dumps(_METADATA)) + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
    return -(-need // _PAGE) * _PAGE


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes. Rows may be written in any order and from several threads."""

    shard: _Shard
    offset: int
    dtype: np.dtype[Any]
    row_bytes: int
    nbytes: int

    def write(self, row: int, values: npt.NDArray[Any]) -> None:
        """`values` are the tensor's rows from `row` on. Raises ConfigError if they cannot be written."""
        assert values.dtype == self.dtype
        self.shard.write(self.offset + row * self.row_bytes, np.ascontiguousarray(values))


class _Shard:
    def __init__(self, path: Path, room: int) -> None:
        self.path = path
        self.tensors: dict[str, dict[str, Any]] = {}
        self.size = 0  # of the tensors
        self._room = room
        try:  # what an interrupted conversion left in it is kept: `ShardWriter.restore` looks which of it is whole
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def add(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Place:
        nbytes = math.prod(shape) * dtype.itemsize
        self.tensors[name] = {
            "dtype": _TYPES[dtype.name],
            "shape": list(shape),
            "data_offsets": [self.size, self.size + nbytes],
        }
        place = Place(self, self._room + self.size, dtype, math.prod(shape[1:]) * dtype.itemsize, nbytes)
        self.size += nbytes
        return place

    def write(self, offset: int, values: npt.NDArray[Any]) -> None:
        view = values.reshape(-1).view(np.uint8).data
        try:
            while view:
                done = os.pwrite(self._fd, view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def checksum(self, offset: int, nbytes: int, value: int) -> int | None:
        """crc32 of bytes of the file, going on from `value`; None if they cannot be read."""
        for start in range(offset, offset + nbytes, _PIECE):
            want = min(_PIECE, offset + nbytes - start)
            try:
                block = os.pread(self._fd, want, start)
            except OSError:
                return None
            if len(block) != want:
                return None
            value = zlib.crc32(block, value)
        return value

    def trim(self) -> None:
        """Cut off what lies behind the tensors."""
        try:
            os.ftruncate(self._fd, self._room + self.size)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def drop(self, name: str) -> None:
        """Forget the tensor that was added last."""
        start, stop = self.tensors.pop(name)["data_offsets"]
        assert stop == self.size
        self.size = start

    def finish(self) -> None:
        text = json.dumps({"__metadata__": _METADATA, **self.tensors}, separators=(",", ":")).encode()
        assert len(text) <= self._room - 8
        head = (self._room - 8).to_bytes(8, "little") + text.ljust(self._room - 8)
        self.write(0, np.frombuffer(head, np.uint8))
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class ShardWriter:
    """model.safetensors in `folder`, or several files with an index where they would grow beyond `shard_bytes`."""

    def __init__(self, folder: Path, shard_bytes: int, room: int) -> None:
        """room: see `header_room`."""
        self._folder = folder
        self._limit = shard_bytes
        self._room = room
        self._shards: list[_Shard] = []

    def add(self, arrays: Mapping[str, Form]) -> dict[str, Place]:
        """Places of tensors (type and shape by name) that belong together, in one file."""
        need = sum(math.prod(shape) * dtype.itemsize for dtype, shape in arrays.values())
        if not self._shards or (self._shards[-1].size and self._shards[-1].size + need > self._limit):
            self._shards.append(_Shard(self._folder / f"part-{len(self._shards) + 1}", self._room))
        return {name: self._shards[-1].add(name, *form) for name, form in arrays.items()}

    @staticmethod
    def checksum(places: Mapping[str, Place]) -> int | None:
        """crc32 of the bytes of tensors as they lie in their file, one after the other; None if they are not there."""
        value: int | None = 0
        for place in places.values():
            value = None if value is None else place.shard.checksum(place.offset, place.nbytes, value)
        return value

    def restore(self, arrays: Mapping[str, Form], checksum: int) -> bool:
        """As `add`, of tensors that an earlier writer wrote; False, and nothing added, if their bytes are others now.

        Places follow from the order of the calls alone, so they are the earlier writer's.
        """
        places = self.add(arrays)
        if self.checksum(places) == checksum:
            return True
        for name in reversed(list(arrays)):
            self._shards[-1].drop(name)
        return False

    def trim(self) -> None:
        """Remove what lies in the files, and in further ones, beside the tensors of `add` and `restore`."""
        for shard in self._shards:
            shard.trim()
        for path in list(self._folder.iterdir()):
            part = _PART.fullmatch(path.name)
            if part and int(part.group(1)) > len(self._shards):
                path.unlink()

    def finish(self) -> int:
        """Complete all files, durably, under their final names; returns the bytes of all tensors."""
        for shard in self._shards:
            shard.finish()
        count = len(self._shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for shard, name in zip(self._shards, names):
            os.rename(shard.path, self._folder / name)
        total = sum(shard.size for shard in self._shards)
        if count > 1:
            weight_map = {tensor: name for shard, name in zip(self._shards, names) for tensor in shard.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        return total

    def close(self) -> None:
        for shard in self._shards:
            shard.close()


def unfinish(folder: Path, *keep: str) -> None:
    """Give files that `ShardWriter.finish` completed their earlier names back; of others only `keep` stay."""
    for path in list(folder.iterdir()):
        finished = _FINISHED.fullmatch(path.name)
        if finished and path.is_file():
            os.rename(path, folder / f"part-{int(finished.group(1) or 1)}")
        elif path.name not in keep and not _PART.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path.parent}: cannot be written ({error.strerror or error}); give --out a disk with room.")
