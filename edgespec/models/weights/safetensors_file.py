"""safetensors files: the JSON header, validated, and the tensor table. Data is read later, one tensor at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError
from edgespec.models.weights.files import (
    MOST_LISTS,
    Reader,
    ReadOnlyFile,
    TensorEntry,
    check_layout,
    parse_json_object,
    read_json,
    refuse_wrong_content,
)
from edgespec.models.weights.gguf_types import KINDS

# A third of the format's own bound: 300,000 tensors. What is parsed of it takes up to twenty times as much memory.
_MAX_HEADER = 32 << 20
FLOAT_TYPES = {name: KINDS[name].nbytes // KINDS[name].block for name in ("F64", "F32", "F16", "BF16")}


class SafetensorsFile:
    """An opened safetensors file. tensors: name -> `TensorEntry`; metadata: the header's `__metadata__` texts.

    types: the number types that are expected, with their bytes; others are refused. reader: see `ReadOnlyFile`.
    """

    def __init__(self, path: Path, *, types: Mapping[str, int] = FLOAT_TYPES, reader: Reader | None = None) -> None:
        self.path = path
        self._types = types
        self.file = ReadOnlyFile(path, reader)
        try:
            raw = self._header()
            self.header_digest = hashlib.sha256(raw).hexdigest()
            header = parse_json_object(path, raw)
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict):
                raise ModelError(f"{path}: __metadata__ in the header must be an object; the file is corrupt.")
            self.metadata: dict[str, Any] = metadata
            start = 8 + len(raw)
            self.tensors = {name: self._tensor(name, entry, start) for name, entry in header.items()}
            check_layout(path, list(self.tensors.values()), self.file.size)
            self._refuse_gaps(start)
        except BaseException:
            self.file.close()
            raise

    def close(self) -> None:
        self.file.close()

    def _header(self) -> bytes:
        size = self.file.size
        head = self.file.read(0, min(512, size), "the header")
        refuse_wrong_content(self.path, head, size)
        length = int.from_bytes(head[:8], "little")
        if size < 8 or head[8:9] not in (b"{", b"") or not 2 <= length <= _MAX_HEADER:
            raise ModelError(f"{self.path}: is not a safetensors file, or its start is corrupt; fetch it again.")
        if 8 + length > size:
            raise ModelError(
                f"{self.path}: incomplete, the header needs {8 + length} bytes and the file has {size}; fetch it again."
            )
        return self.file.read(8, length, "the header")

    def _tensor(self, name: str, entry: Any, data_start: int) -> TensorEntry:
        where = f"{self.path}: tensor {name[:200]}"
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise ModelError(f"{where} has a damaged header entry; fetch the file again.") from None
        if not isinstance(dtype, str) or dtype not in self._types:
            raise ModelError(
                f"{where} has type {str(dtype)[:40]}, which is not supported ({', '.join(self._types)} are); "
                "use an unquantised checkpoint or a GGUF file."
            )
        numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers) or len(shape) > 8 or begin > end:
            raise ModelError(f"{where} has a damaged shape or position; fetch the file again.")
        nbytes = prod(shape) * self._types[dtype]
        if end - begin != nbytes:
            raise ModelError(f"{where} has shape {shape} ({nbytes} bytes as {dtype}) but occupies {end - begin} bytes.")
        return TensorEntry(name, self.file, dtype, tuple(shape), data_start + begin, nbytes)

    def _refuse_gaps(self, data_start: int) -> None:
        used = sum(entry.nbytes for entry in self.tensors.values())
        if data_start + used != self.file.size:
            raise ModelError(
                f"{self.path}: the tensors need {data_start + used} bytes but the file has {self.file.size}; "
                "it is corrupt, fetch it again."
            )


def open_shards(
    index: Path, *, types: Mapping[str, int] = FLOAT_TYPES, reader: Reader | None = None
) -> list[SafetensorsFile]:
    """All files that a `model.safetensors.index.json` lists, each holding at least the tensors the index says."""
    weight_map = read_json(index, MOST_LISTS).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map; fetch it again.")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        # A shard is a file beside the index: nothing that an index says may lead elsewhere.
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", "..") or "\0" in shard:
            raise ModelError(
                f"{index}: tensor {tensor[:200]} points to {str(shard)[:200]!r}, which is not a file of this folder."
            )
        shards.setdefault(shard, set()).add(tensor)
    opened: list[SafetensorsFile] = []
    try:
        for shard, names in shards.items():
            path = index.parent / shard
            if not path.exists():
                raise ModelError(f"{path}: is missing, although {index.name} lists it; fetch the model again.")
            file = SafetensorsFile(path, types=types, reader=reader)
            opened.append(file)
            if not names <= file.tensors.keys():
                lost = min(names - file.tensors.keys())
                raise ModelError(
                    f"{path}: has no tensor {lost[:200]}, although {index.name} says so; fetch the model again."
                )
            twice = [name for other in opened[:-1] for name in other.tensors if name in file.tensors]
            if twice:
                raise ModelError(
                    f"{path}: tensor {twice[0][:200]} is in another file of the model too; fetch the model again."
                )
    except BaseException:
        for file in opened:
            file.close()
        raise
    return opened
