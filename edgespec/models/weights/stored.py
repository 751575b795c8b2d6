"""One tensor as a model file stores it: in a single piece of some type. `stored_packed` has those in several pieces."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgespec.errors import ModelError
from edgespec.models.weights.files import TensorEntry
from edgespec.models.weights.gguf_types import KINDS
from edgespec.models.weights.quantised import FloatArray, Layout, QuantisedTensor

_PIECE = 1 << 20  # weights decoded at a time: the temporaries of a piece stay in the processor's cache
_BLOCKS = {"Q4_0": Layout(4, 32, "symmetric"), "Q4_1": Layout(4, 32, "shift"), "Q8_0": Layout(8, 32, "symmetric")}


class Stored(Protocol):
    """A tensor in a file. Rows are counted along the first dimension; `stop` None means to the end.

    kind: the type as the file names it. parts: where its bytes lie. layout: of what `quantised` gives, None if it gives
    nothing; of packed files the mode may turn out simpler. by_rows: whether some rows cost no more than their share.
    """

    kind: str
    shape: tuple[int, ...]
    parts: tuple[TensorEntry, ...]
    layout: Layout | None
    by_rows: bool

    def read(self, start: int = 0, stop: int | None = None) -> FloatArray:
        """Rows as float32, dequantised. Raises ModelError if bytes are missing, damaged or not finite."""
        ...

    def quantised(self, start: int = 0, stop: int | None = None) -> QuantisedTensor | None:
        """Rows as they are in the file, without any rounding, or None if they have no such form."""
        ...


class PlainTensor:
    """A tensor of floats, or of GGUF's blocks."""

    by_rows = True

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.kind = entry.kind
        self.shape: tuple[int, ...] = entry.shape
        self.parts: tuple[TensorEntry, ...] = (entry,)
        self.layout: Layout | None = _BLOCKS.get(entry.kind) if len(entry.shape) == 2 else None

    def read(self, start: int = 0, stop: int | None = None) -> FloatArray:
        kind = KINDS[self.kind]
        rows, each, first = self._blocks(start, stop)
        count = rows * each
        result = np.empty(count * kind.block, np.float32)
        step = max(1, _PIECE // kind.block)
        buffer = np.empty(min(step, count) * kind.nbytes, np.uint8)
        for begin in range(0, count, step):
            blocks = min(step, count - begin)
            raw = buffer[: blocks * kind.nbytes]
            self.entry.file.read_into(
                raw, self.entry.offset + (first + begin) * kind.nbytes, f"tensor {self.entry.name}"
            )
            piece = result[begin * kind.block : (begin + blocks) * kind.block]
            with np.errstate(invalid="ignore", over="ignore"):
                piece[:] = kind.decode(raw.reshape(blocks, kind.nbytes)).reshape(-1)
            if not np.isfinite(piece).all():
                raise not_finite(self.entry)
        return result.reshape(-1, *self.shape[1:])

    def quantised(self, start: int = 0, stop: int | None = None) -> QuantisedTensor | None:
        if self.layout is None:
            return None
        kind = KINDS[self.kind]
        rows, each, first = self._blocks(start, stop)
        raw = np.empty((rows, each, kind.nbytes), np.uint8)
        self.entry.file.read_into(raw.reshape(-1), self.entry.offset + first * kind.nbytes, f"tensor {self.entry.name}")
        heads = 2 if self.layout.mode == "shift" else 1
        numbers = np.ascontiguousarray(raw[..., : 2 * heads]).view(np.float16)
        if not np.isfinite(numbers).all():
            raise not_finite(self.entry)
        q = np.ascontiguousarray(raw[..., 2 * heads :]).reshape(rows, -1)
        return QuantisedTensor(
            self.layout.bits,
            32,
            q.view(np.int8) if self.layout.bits == 8 else q,
            np.ascontiguousarray(numbers[..., 0]),
            shift=np.ascontiguousarray(numbers[..., 1]) if heads == 2 else None,
        )

    def _blocks(self, start: int, stop: int | None) -> tuple[int, int, int]:
        """(rows, blocks of each, the first block) of a range of rows; a vector is always read whole, as one row."""
        rows = (self.shape[0] if stop is None else stop) - start
        if len(self.shape) == 1:
            return 1, self.shape[0] // KINDS[self.kind].block, 0
        each = math.prod(self.shape[1:]) // KINDS[self.kind].block
        return rows, each, start * each


def refuse_empty(stored: Stored, name: str, filled: int) -> None:
    """Refuse what an interrupted download leaves: a file of full length whose tail was never written.

    filled: the number of rows up to the last one that is not zero. Biases may be zero, and matrices may end with rows
    of padding, but a quarter of a trained matrix is no padding.
    """
    rows = stored.shape[0]
    if not name.endswith(".bias") and filled <= rows - max(1, rows // (4 if len(stored.shape) > 1 else 16)):
        entry = stored.parts[0]
        raise ModelError(
            f"{entry.file.path}: tensor {entry.name} ends with zeros only; the download is incomplete, fetch it again."
        )


def rows_filled(values: npt.NDArray[Any]) -> int:
    """The number of rows up to the last one with a number that is not zero. Looks from the end."""
    for stop in range(len(values), 0, -1024):
        start = max(0, stop - 1024)
        found = np.flatnonzero(values[start:stop].reshape(stop - start, -1).any(axis=1))
        if found.size:
            return start + int(found[-1]) + 1
    return 0


def not_finite(entry: TensorEntry) -> ModelError:
    return ModelError(
        f"{entry.file.path}: tensor {entry.name} holds NaN or infinity; the file is damaged, fetch it again."
    )
