"""`head.safetensors`: the weights of a head draft on disk, in 8-bit blocks.

Matrices are stored as `<name>.q` int8 [rows, cols] and `<name>.scale` float16 [rows, cols / 32] with w = scale * q,
vectors as float32 [hidden_size], and `vocab` int32 [vocab_rows]: the ids of the target's tokens that it can propose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafts.head_spec import BLOCK, VECTORS, HeadSpec
from edgespec.errors import DraftError, ModelError
from edgespec.files import write_bytes
from edgespec.models.weights.safetensors_file import SafetensorsFile

FloatArray = npt.NDArray[np.float32]
FILE_NAME = "head.safetensors"
_TYPES: dict[str, np.dtype[Any]] = {
    "I8": np.dtype(np.int8),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """w = scale * q in blocks of 32 along the columns. q: int8 [rows, cols]; scale: float16 [rows, cols / 32]."""

    q: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float16]

    @classmethod
    def quantised(cls, matrix: FloatArray) -> Int8Matrix:
        """Symmetric, rounded to nearest with the very scale that is stored. Raises DraftError for what has no scale."""
        blocks = np.asarray(matrix, np.float32).reshape(len(matrix), -1, BLOCK)
        with np.errstate(over="ignore"):
            scale = (np.abs(blocks).max(axis=-1) / 127).astype(np.float16)
        if not np.isfinite(scale).all():
            raise DraftError("a matrix of a head holds NaN, infinity, or numbers too large for 8-bit blocks.")
        wide = scale.astype(np.float32)[..., None]
        q = np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide > 0)
        return cls(np.rint(q).clip(-127, 127).astype(np.int8).reshape(matrix.shape), scale)

    def dequantised(self) -> FloatArray:
        """float32 [rows, cols]."""
        blocks = self.q.reshape(*self.scale.shape, BLOCK) * self.scale.astype(np.float32)[..., None]
        return blocks.reshape(self.q.shape)


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """All tensors of a head. matrices, vectors: by the names of `HeadSpec`; vocab: int32 [vocab_rows], ascending."""

    spec: HeadSpec
    matrices: Mapping[str, Int8Matrix]
    vectors: Mapping[str, FloatArray]
    vocab: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        found = {name: array.shape for name, array in self.tensors().items()}
        for name, (_, shape) in _layout(self.spec).items():
            if found.pop(name, None) != shape:
                raise DraftError(f"tensor {name} of a head is missing or not of shape {list(shape)}.")
        if found:
            raise DraftError(f"a head has no tensor {min(found)}.")

    @classmethod
    def quantised(cls, spec: HeadSpec, tensors: Mapping[str, npt.NDArray[Any]]) -> HeadWeights:
        """From float32 arrays by name ("fc", ..., "embed_norm", ..., and "vocab"), as training makes them."""
        missing = [name for name in (*spec.matrices, *VECTORS, "vocab") if name not in tensors]
        if missing or len(tensors) > len(spec.matrices) + len(VECTORS) + 1:
            raise DraftError(f"a head needs the tensors {', '.join((*spec.matrices, *VECTORS, 'vocab'))}.")
        for name, shape in spec.matrices.items():
            if tensors[name].shape != shape:
                raise DraftError(f"tensor {name} of a head has shape {list(tensors[name].shape)}, not {list(shape)}.")
        weights = cls(
            spec,
            {name: Int8Matrix.quantised(tensors[name]) for name in spec.matrices},
            {name: np.array(tensors[name], np.float32) for name in VECTORS},
            np.array(tensors["vocab"], np.int32),
        )
        weights.check("a head")
        return weights

    def check(self, source: str) -> None:
        """Raise DraftError, beginning with `source`, for values that cannot be used."""
        for name, matrix in self.matrices.items():
            if not np.isfinite(matrix.scale).all():
                raise DraftError(f"{source}: tensor {name}.scale holds NaN or infinity; the draft is damaged.")
        for name, vector in self.vectors.items():
            if not np.isfinite(vector).all():
                raise DraftError(f"{source}: tensor {name} holds NaN or infinity; the draft is damaged.")
        if self.vocab[0] < 0 or not (np.diff(self.vocab.astype(np.int64)) > 0).all():
            raise DraftError(f"{source}: vocab must list token ids in ascending order, each once.")

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays under their names in the file."""
        named: dict[str, npt.NDArray[Any]] = {}
        for name, matrix in self.matrices.items():
            named |= {f"{name}.q": matrix.q, f"{name}.scale": matrix.scale}
        return named | dict(self.vectors) | {"vocab": self.vocab}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.tensors().values())


class HeadFile:
    """Reading and writing `head.safetensors`."""

    @staticmethod
    def read(path: Path, spec: HeadSpec) -> HeadWeights:
        """The weights in `path`, which must be exactly those of `spec`. Positional reads, nothing is mapped.

        Raises DraftError for a file that is missing, cut, has other tensors, shapes or types, or useless values.
        """
        try:
            tensors = _read(Path(path), spec)
        except ModelError as error:
            raise DraftError(str(error)) from error
        matrices = {name: Int8Matrix(tensors[f"{name}.q"], tensors[f"{name}.scale"]) for name in spec.matrices}
        weights = HeadWeights(spec, matrices, {name: tensors[name] for name in VECTORS}, tensors["vocab"])
        weights.check(str(path))
        return weights


def write_head_file(path: Path, weights: HeadWeights) -> None:
    """Write `weights` to `path` in one durable step; a failure leaves the old file. Raises DraftError, OSError."""
    from safetensors.numpy import save

    weights.check(str(path))
    layout = _layout(weights.spec)
    arrays = {n: np.ascontiguousarray(a, _TYPES[layout[n][0]]) for n, a in weights.tensors().items()}
    write_bytes(Path(path), save(arrays, metadata={"format": "edgespec-head"}))


def _layout(spec: HeadSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (type, shape) of every tensor in the file."""
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (rows, cols) in spec.matrices.items():
        layout[f"{name}.q"] = ("I8", (rows, cols))
        layout[f"{name}.scale"] = ("F16", (rows, cols // BLOCK))
    for name in VECTORS:
        layout[name] = ("F32", (spec.hidden_size,))
    layout["vocab"] = ("I32", (spec.vocab_rows,))
    return layout


def _read(path: Path, spec: HeadSpec) -> dict[str, npt.NDArray[Any]]:
    opened = SafetensorsFile(path, types={name: dtype.itemsize for name, dtype in _TYPES.items()})
    try:
        layout, tensors = _layout(spec), {}
        unknown = sorted(opened.tensors.keys() - layout.keys())
        if unknown:
            raise DraftError(f"{path}: tensor {unknown[0][:200]} has no place in a head.")
        for name, (kind, shape) in layout.items():
            entry = opened.tensors.get(name)
            if entry is None:
                raise DraftError(f"{path}: tensor {name} is missing; the draft is incomplete.")
            if (entry.kind, entry.shape) != (kind, shape):
                raise DraftError(
                    f"{path}: tensor {name} is {entry.kind} {list(entry.shape)}, but the draft's architecture asks for "
                    f"{kind} {list(shape)}; the files do not belong together."
                )
            array = np.empty(shape, _TYPES[kind])
            opened.file.read_into(array.view(np.uint8).reshape(-1), entry.offset, f"tensor {name}")
            tensors[name] = array
        return tensors
    finally:
        opened.close()
