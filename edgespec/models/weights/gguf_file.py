"""GGUF files: header, metadata and the tensor table. Tensor data is read later, one tensor at a time.

The header is untrusted: every count is checked against the bytes that are left in the file before memory is allocated.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ModelError
from edgespec.models.weights.files import Reader, ReadOnlyFile, TensorEntry, check_layout, refuse_wrong_content
from edgespec.models.weights.gguf_types import GGUF_TYPE_NAMES, KINDS

# Value types of metadata by number: (struct code, bytes).
_SCALARS: dict[int, tuple[str, int]] = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_HEADER = 512 << 20
_FIRST_READ = 1 << 20
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


class _Header:
    """A cursor over the start of a file; reads more of it, in doubling steps, when the cursor gets there."""

    def __init__(self, file: ReadOnlyFile) -> None:
        self.file = file
        self.data = b""
        self.position = 0
        self.context = "the header"  # what is being parsed, for errors

    def fail(self, problem: str) -> ModelError:
        return ModelError(
            f"{self.file.path}: {self.context} {problem}; the file is incomplete or corrupt, fetch it again."
        )

    def need(self, count: int) -> int:
        """Make `count` bytes available at the cursor, move the cursor behind them and return where they start."""
        start = self.position
        end = start + count
        if end > len(self.data):
            if end > min(self.file.size, _MAX_HEADER):
                raise self.fail(f"needs {end} header bytes but the file has {self.file.size}")
            self._grow(end)
        self.position = end
        return start

    def _grow(self, end: int) -> None:
        have = len(self.data)
        total = min(self.file.size, max(end, 2 * have, _FIRST_READ))
        self.data += self.file.read(have, total - have, "the header")

    def u32(self) -> int:
        start = self.need(4)  # before `self.data` is looked at: `need` may replace it
        return int(_U32(self.data, start)[0])

    def u64(self) -> int:
        start = self.need(8)
        return int(_U64(self.data, start)[0])

    def string(self) -> str:
        length = self.u64()
        start = self.need(length)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise self.fail("holds text that is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """`count` strings. One loop without calls: vocabularies have hundreds of thousands."""
        if count * 8 > self.file.size - self.position:
            raise self.fail(f"claims {count} strings, more than the file can hold")
        data, position, limit = self.data, self.position, len(self.data)
        result: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                if start > limit:
                    data, limit = self._more(position, 8)
                position = start + _U64(data, position)[0]
                if position > limit:
                    data, limit = self._more(start, position - start)
                result.append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError:
            raise self.fail("holds text that is not UTF-8") from None
        self.position = position
        return result

    def _more(self, position: int, count: int) -> tuple[bytes, int]:
        self.position = position
        self.need(count)
        return self.data, len(self.data)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self.fail(f"has the unknown value type {kind}")
        code, size = _SCALARS[kind]
        start = self.need(size)
        if kind == 7:
            return self.data[start] != 0
        value = struct.unpack_from("<" + code, self.data, start)[0]
        # A float32 becomes the number a person would write (1e-05, not 9.999999747e-06), as in the original config.
        return float(str(np.float32(value))) if kind == 6 else value

    def _array(self) -> list[Any]:
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise self.fail(f"is an array of the unsupported type {kind}")
        code, size = _SCALARS[kind]
        start = self.need(count * size)
        dtype = np.dtype(np.bool_ if kind == 7 else "<" + code)
        values: list[Any] = np.frombuffer(self.data, dtype, count, start).tolist()
        return values


class GGUFFile:
    """An opened GGUF file.

    metadata: key -> int, float, bool, str or list of those; tensors: name in the file -> `TensorEntry`.
    header_digest: sha256 (hex) of all bytes before the tensor data.
    reader: see `ReadOnlyFile`.
    """

    def __init__(self, path: Path, reader: Reader | None = None) -> None:
        self.path = path
        self.file = ReadOnlyFile(path, reader)
        try:
            header = _Header(self.file)
            self.version, tensor_count, pair_count = self._preamble(header)
            self.metadata = self._metadata(header, pair_count)
            self.tensors = self._tensors(header, tensor_count)
            self.header_digest = hashlib.sha256(memoryview(header.data)[: header.position]).hexdigest()
        except BaseException:
            self.file.close()
            raise

    def close(self) -> None:
        self.file.close()

    def _preamble(self, header: _Header) -> tuple[int, int, int]:
        head = self.file.read(0, min(512, self.file.size), "the header")
        refuse_wrong_content(self.path, head, self.file.size)
        if head[:4] != b"GGUF":
            raise ModelError(f"{self.path}: is not a GGUF file (it starts with {head[:4]!r}).")
        header.need(4)
        version = header.u32()
        if version & 0xFFFF == 0 and version:
            raise ModelError(f"{self.path}: is a big-endian GGUF file; only little-endian ones are supported.")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are).")
        tensors, pairs = header.u64(), header.u64()
        # A tensor entry takes at least 24 bytes, a key-value pair at least 13.
        if tensors * 24 + pairs * 13 > self.file.size:
            raise header.fail(f"claims {tensors} tensors and {pairs} metadata keys")
        return version, tensors, pairs

    def _metadata(self, header: _Header, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            header.context = f"metadata key number {index}"
            key = header.string()
            if key in metadata:
                raise ModelError(f"{self.path}: metadata key {key[:200]!r} appears twice; the file is corrupt.")
            header.context = f"metadata key {key[:200]!r}"
            metadata[key] = header.value(header.u32())
        return metadata

    def _tensors(self, header: _Header, count: int) -> dict[str, TensorEntry]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}, not a power of two.")
        found: list[tuple[str, str, tuple[int, ...], int, int]] = []
        for index in range(count):
            header.context = f"tensor number {index}"
            found.append(self._tensor(header, alignment))
        data_start = -(-header.position // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, kind, shape, offset, nbytes in found:
            if name in tensors:
                raise ModelError(f"{self.path}: tensor {name} is listed twice; the file is corrupt.")
            tensors[name] = TensorEntry(name, self.file, kind, shape, data_start + offset, nbytes)
        check_layout(self.path, list(tensors.values()), self.file.size)
        return tensors

    def _tensor(self, header: _Header, alignment: int) -> tuple[str, str, tuple[int, ...], int, int]:
        name = header.string()
        header.context = f"tensor {name[:200]}"
        dimensions = header.u32()
        if not 1 <= dimensions <= 4:
            raise header.fail(f"has {dimensions} dimensions")
        shape = tuple(header.u64() for _ in range(dimensions))[::-1]
        type_number, offset = header.u32(), header.u64()
        if 0 in shape or any(d > 1 << 40 for d in shape):
            raise header.fail(f"has the impossible shape {shape}")
        kind = KINDS.get(GGUF_TYPE_NAMES.get(type_number, ""))
        if kind is None:
            label = GGUF_TYPE_NAMES.get(type_number, f"number {type_number}")
            raise ModelError(
                f"{self.path}: tensor {name[:200]} has type {label}, which is not supported "
                f"(supported: {', '.join(KINDS)}); use another quantisation of this model."
            )
        if shape[-1] % kind.block:
            raise header.fail(f"has rows of {shape[-1]}, not a multiple of the {kind.name} block of {kind.block}")
        if offset % alignment:
            raise header.fail(f"lies at offset {offset}, which is not aligned to {alignment}")
        return name, kind.name, shape, offset, kind.size(shape)
