"""A model's weights, one tensor at a time, under the same names whatever file they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import ModelError
from edgespec.models.spec import ModelSpec, required_tensors
from edgespec.models.weights.gguf_file import GGUFFile
from edgespec.models.weights.quantised import FloatArray, Layout, QuantisedTensor
from edgespec.models.weights.safetensors_file import SafetensorsFile
from edgespec.models.weights.stored import Stored, refuse_empty, rows_filled

_SAMPLE = 64 << 10


class WeightFile:
    """An opened model: its `spec`, and its tensors by canonical (Hugging Face) name and row order.

    Tensors are read on demand with positional reads; the file is never mapped nor read as a whole. Any damage is a
    ModelError that names file and tensor. Reading from several threads is safe.
    """

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        tensors: Mapping[str, Stored],
        files: Sequence[GGUFFile | SafetensorsFile],
        metadata: Mapping[str, Any],
        permuted: bool,
    ) -> None:
        self.path = path
        self.spec = spec
        self.metadata = metadata
        self._files = files
        self._permuted = permuted
        self._tensors = _checked(path, spec, tensors)
        self._fingerprint: str | None = None
        self._model_fingerprint: str | None = None

    def names(self) -> list[str]:
        """The names of all tensors, exactly those of `required_tensors(spec)`."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def kind(self, name: str) -> str:
        """The type the file stores: "F32", "BF16", "Q4_1", "int4" (edgespec's own), "GPTQ4", "AWQ4", ..."""
        return self._stored(name).kind

    def nbytes(self, name: str) -> int:
        """The bytes that the tensor takes in the file."""
        return sum(entry.nbytes for entry in self._stored(name).parts)

    def layout(self, name: str) -> Layout | None:
        """The form in which `quantised` gives the tensor, from the header alone; None if it gives nothing.

        A GPTQ or AWQ matrix may turn out symmetric when it is read, or to have its inputs out of order.
        """
        return self._stored(name).layout

    def by_rows(self, name: str) -> bool:
        """Whether `pieces` cuts a matrix into several: some files tell any of it only together with all the rest."""
        return self._stored(name).by_rows

    def read(self, name: str) -> FloatArray:
        """The tensor as float32 in C order, dequantised. Raises ModelError if its bytes are damaged or not finite."""
        stored = self._stored(name)
        tensor = stored.read()
        refuse_empty(stored, name, rows_filled(tensor))
        return self._half_split(name, tensor)

    def quantised(self, name: str) -> QuantisedTensor | None:
        """The tensor as the file has it, without rounding, if that is a form of `QuantisedTensor`; else None.

        `read` gives the same numbers. Raises ModelError as `read` does.
        """
        stored = self._stored(name)
        made = stored.quantised()
        if made is None:
            return None
        refuse_empty(stored, name, _rows_in_use(made))
        return self._with_rows_split(name, made)

    def pieces(self, name: str, numbers: int) -> Iterator[FloatArray]:
        """The tensor as `read` gives it, in pieces of some rows: about `numbers` each where the file allows that.

        The last piece may raise ModelError for what only the whole shows.
        """
        stored, filled = self._stored(name), 0
        for start, stop in self._ranges(stored, numbers):
            piece = stored.read(start, stop)
            used = rows_filled(piece)
            filled = start + used if used else filled
            if stop == stored.shape[0]:
                refuse_empty(stored, name, filled)
            yield self._half_split(name, piece)

    def quantised_pieces(self, name: str, numbers: int) -> Iterator[QuantisedTensor]:
        """The tensor as `quantised` gives it, in pieces as those of `pieces`; none at all if it gives nothing."""
        stored, filled = self._stored(name), 0
        for start, stop in self._ranges(stored, numbers):
            piece = stored.quantised(start, stop)
            if piece is None:
                return
            used = _rows_in_use(piece)
            filled = start + used if used else filled
            if stop == stored.shape[0]:
                refuse_empty(stored, name, filled)
            yield self._with_rows_split(name, piece)

    def fingerprint(self) -> str:
        """sha256 (hex) over all headers, file sizes, and the first and last 64 KiB of every tensor.

        A cache key: it changes with any other model, quantisation or download, at a fraction of the cost of reading
        everything. Edits in the middle of a large tensor alone do not change it. The path and times do not matter.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256(repr(self.spec).encode())
            for opened in self._files:
                digest.update(f"{opened.header_digest}:{opened.file.size}\n".encode())
            for name, stored in sorted(self._tensors.items()):
                digest.update(name.encode())
                for entry in stored.parts:
                    for start, count in _sample(entry.nbytes):
                        digest.update(entry.file.read(entry.offset + start, count, f"tensor {entry.name}"))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def model_fingerprint(self) -> str:
        """sha256 (hex) of the model, whatever file it is in and however its matrices are quantised there.

        Over the sizes of the architecture and all norm weights, rounded to bfloat16. No format and no quantiser but AWQ
        changes those (AWQ moves scales into them). A fine-tuned model has others, unless only adapters were trained.
        Reads those vectors alone. Raises ModelError if they are damaged.
        """
        if self._model_fingerprint is None:
            s = self.spec
            sizes = (s.hidden_size, s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim, s.intermediate_size)
            digest = hashlib.sha256(repr((*sizes, s.vocab_size)).encode())
            for name in sorted(self._tensors):
                if name.endswith("norm.weight"):
                    bits = self.read(name).view(np.uint32)
                    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # to the nearest, ties to even
                    digest.update(name.encode() + ((bits + half) >> np.uint32(16)).astype("<u2").tobytes())
            self._model_fingerprint = digest.hexdigest()
        return self._model_fingerprint

    def stamps(self) -> list[tuple[str, int, int]]:
        """(name, bytes, time of the last change in ns) of each file: they differ once one was written anew."""
        return sorted((f.file.path.name, f.file.size, f.file.modified_ns) for f in self._files)

    def close(self) -> None:
        for opened in self._files:
            opened.close()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(self, name: str) -> Stored:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelError(f"{self.path}: has no tensor {name}.") from None

    def _ranges(self, stored: Stored, numbers: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows: whole heads, within which the row order may have to be undone."""
        rows = stored.shape[0]
        step = rows
        if stored.by_rows and len(stored.shape) == 2:
            head = self.spec.head_dim
            step = max(1, numbers // stored.shape[1] // head) * head
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def _with_rows_split(self, name: str, made: QuantisedTensor) -> QuantisedTensor:
        fields = {key: self._half_split(name, array) for key, array in made.fields.items()}
        return QuantisedTensor(made.bits, made.group, **fields)

    def _half_split(self, name: str, tensor: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undo the row order that llama GGUF files give to q and k (rotary pairs side by side). Rows: whole heads."""
        if not self._permuted or name.split(".")[-2] not in ("q_proj", "k_proj"):
            return tensor
        rows = tensor.reshape(-1, self.spec.head_dim // 2, 2, *tensor.shape[1:])
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(tensor.shape)


def _rows_in_use(tensor: QuantisedTensor) -> int:
    filled = rows_filled(tensor.scale)
    return filled if tensor.shift is None else max(filled, rows_filled(tensor.shift))


def _checked(path: Path, spec: ModelSpec, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The required tensors in order; ModelError if one is missing, has another shape, or if one is left over."""
    required = required_tensors(spec)
    for name, shape in required.items():
        stored = tensors.get(name)
        if stored is None:
            raise ModelError(
                f"{path}: tensor {name} is missing; the model is incomplete or its config belongs to another."
            )
        if stored.shape != shape:
            entry = stored.parts[0]
            vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight") and stored.shape[1:] == shape[1:]
            wanted = f"vocab_size is {shape[0]}" if vocabulary else f"the config asks for {list(shape)}"
            has = f"{stored.shape[0]} rows" if vocabulary else f"shape {list(stored.shape)}"
            raise ModelError(
                f"{entry.file.path}: tensor {entry.name} has {has} but {wanted}; the files do not belong together."
            )
    unused = sorted(tensors.keys() - required.keys())
    if unused:
        entry = tensors[unused[0]].parts[0]
        raise ModelError(
            f"{entry.file.path}: tensor {entry.name} has no place in a {spec.architecture} model "
            f"({len(unused)} such tensors); this variant is not supported."
        )
    return {name: tensors[name] for name in required}


def _sample(nbytes: int) -> list[tuple[int, int]]:
    if nbytes <= 2 * _SAMPLE:
        return [(0, nbytes)]
    return [(0, _SAMPLE), (nbytes - _SAMPLE, _SAMPLE)]
