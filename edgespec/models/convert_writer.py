"""Writes safetensors files of tensors that come piece by piece, several at a time, and whose types show only then.

The header stands in front and is known last: room is left for it, and what it does not fill stays blank, which the
format allows. It fills whole pages, so the first tensor begins on one.
"""

from __future__ import annotations

import json
import math
import os
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
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def add(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Place:
        nbytes = math.prod(shape) * dtype.itemsize
        self.tensors[name] = {
            "dtype": _TYPES[dtype.name],
            "shape": list(shape),
            "data_offsets": [self.size, self.size + nbytes],
        }
        place = Place(self, self._room + self.size, dtype, math.prod(shape[1:]) * dtype.itemsize)
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

    def add(self, arrays: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> dict[str, Place]:
        """Places of tensors (type and shape by name) that belong together, in one file."""
        need = sum(math.prod(shape) * dtype.itemsize for dtype, shape in arrays.values())
        if not self._shards or (self._shards[-1].size and self._shards[-1].size + need > self._limit):
            self._shards.append(_Shard(self._folder / f"part-{len(self._shards) + 1}", self._room))
        return {name: self._shards[-1].add(name, *form) for name, form in arrays.items()}

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


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path.parent}: cannot be written ({error.strerror or error}); give --out a disk with room.")
