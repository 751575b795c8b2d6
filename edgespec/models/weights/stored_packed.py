"""Quantised matrices in several pieces: edgespec's own, and the packings of GPTQ and AWQ checkpoints.

GPTQ (AutoGPTQ, GPTQModel), for a matrix [N, K] in groups of G: qweight int32 [K/8, N], number k of an output in bits
4 (k mod 8) of row k / 8; qzeros int32 [K/G, N/8], packed along N in the same way, each zero point less one (the
"gptq" format; "gptq_v2" stores it as it is); scales [K/G, N]; g_idx int32 [K], the group of each input. With 8 bits
four numbers share an int32. AWQ (AutoAWQ's "gemm"): qweight int32 [K, N/8], qzeros int32 [K/G, N/8], scales [K/G, N];
the bits from 4 i on of an int32 are output (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight. Weight = scale * (q - zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import ModelError
from edgespec.models.weights.files import TensorEntry
from edgespec.models.weights.gguf_types import KINDS
from edgespec.models.weights.quantised import GROUPS, FloatArray, Layout, Mode, QuantisedTensor, pack_halves
from edgespec.models.weights.stored import not_finite

IntArray = npt.NDArray[Any]
# What the "gptq" format takes from each int32 of zero points, by bits: one from every number in it, *as one
# subtraction*. A zero point of 0 becomes 15 (255) by borrowing from its neighbour, and one addition gives all back:
# so AutoGPTQ and GPTQModel write and read it ("qzeros.data -= 0b0001...0001", convert_gptq_v2_to_v1_format and back;
# of checkpoints without symmetry up to 13% of the numbers are such ones, AutoGPTQ pull request 640). Reading 15 as 16
# instead, number by number, would be wrong by the whole range and by one in the neighbour; and 16 itself is no zero
# point of any quantiser, all clamp to 0..15. Older packers shifted -1 with all its bits over the neighbours: what was
# there is lost, whoever reads it.
_LESS_ONE = {4: 0x11111111, 8: 0x01010101}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
COLUMNS = 512  # outputs unpacked at a time
_INTEGERS = {"I32": np.int32, "I64": np.int64, "U8": np.uint8, "I8": np.int8}


class OwnMatrix:
    """A matrix that `edgespec convert` wrote: `<name>.q`, `<name>.scale`, and `<name>.zero` or `<name>.shift`."""

    by_rows = True

    def __init__(self, name: str, parts: Mapping[str, TensorEntry]) -> None:
        self._parts = dict(parts)
        self.parts = tuple(parts.values())
        q, scale = parts.get("q"), parts.get("scale")
        if q is None or scale is None or ("zero" in parts and "shift" in parts):
            lost = "q" if q is None else "scale" if scale is None else "zero or shift alone"
            raise ModelError(f"{self.parts[0].file.path}: tensor {name}.{lost} is missing; convert the model again.")
        bits = {"U8": 4, "I8": 8}.get(q.kind)
        groups = scale.shape[1] if len(scale.shape) == 2 else 0
        rows, width = q.shape if len(q.shape) == 2 else (0, 0)
        columns = width * 8 // bits if bits else 0
        mode: Mode = "zeros" if "zero" in parts else "shift" if "shift" in parts else "symmetric"
        sound = bits and groups and columns % groups == 0 and columns // groups in GROUPS
        sound = sound and parts.get("shift", scale).kind == scale.kind
        kinds = {"scale": ("F16", "F32"), "shift": ("F16", "F32"), "zero": ("U8",)}
        for key, entry in parts.items():
            if key != "q" and (entry.shape != (rows, groups) or entry.kind not in kinds[key]):
                sound = False
        if not sound or not bits or (mode == "zeros" and bits == 8):
            raise ModelError(
                f"{q.file.path}: tensor {name}.q has type {q.kind} and shape {list(q.shape)}, which does not fit its "
                "scales; convert the model again."
            )
        self.shape: tuple[int, ...] = (rows, columns)
        self.layout: Layout | None = Layout(bits, columns // groups, mode, 2 if scale.kind == "F16" else 4)
        self.kind = f"int{bits}"

    def read(self, start: int = 0, stop: int | None = None) -> FloatArray:
        return self.quantised(start, stop).dequantise()

    def quantised(self, start: int = 0, stop: int | None = None) -> QuantisedTensor:
        stop = self.shape[0] if stop is None else stop
        arrays = {key: _rows(entry, start, stop) for key, entry in self._parts.items()}
        for key in ("scale", "shift"):
            if key in arrays and not np.isfinite(arrays[key]).all():
                raise not_finite(self._parts[key])
        assert self.layout is not None
        return QuantisedTensor(self.layout.bits, self.layout.group, **arrays)


class PackedMatrix:
    """A matrix of a GPTQ or AWQ checkpoint.

    bits, group: as the checkpoint's settings say (group -1: one for all inputs). plus_one: zero points are stored less
    one. acts: the settings say that inputs are grouped out of order, which the layout here has no place for: such a
    matrix can only be dequantised.
    """

    by_rows = False

    def __init__(
        self,
        name: str,
        parts: Mapping[str, TensorEntry],
        *,
        awq: bool,
        bits: int,
        group: int,
        plus_one: bool = False,
        acts: bool = False,
    ) -> None:
        self._awq, self._bits, self._group, self._plus_one = awq, bits, group, plus_one
        path = next(iter(parts.values())).file.path
        for key in ("qweight", "qzeros", "scales"):
            if key not in parts:
                raise ModelError(f"{path}: tensor {name}.{key} is missing; the checkpoint is incomplete.")
        self._parts = dict(parts)
        self.parts = tuple(parts[key] for key in sorted(parts))
        each = 32 // bits
        weight = parts["qweight"]
        if len(weight.shape) != 2:
            raise self._misfit(weight)
        rows, columns = weight.shape
        inputs, outputs = (rows, columns * each) if awq else (rows * each, columns)
        self._group = inputs if group == -1 else group
        groups = inputs // self._group
        if inputs % self._group:
            raise self._misfit(weight)
        if outputs % each:
            raise ModelError(
                f"{path}: tensor {name}.qweight has {outputs} outputs, which zero points packed by {each} do not fit; "
                "this padding is not supported."
            )
        shapes = {"qzeros": (groups, outputs // each), "scales": (groups, outputs), "g_idx": (inputs,)}
        for key, entry in parts.items():
            if key in shapes and entry.shape != shapes[key]:
                raise self._misfit(entry)
            if entry.kind not in (("F16", "BF16", "F32") if key == "scales" else ("I32", "I64")):
                raise ModelError(f"{path}: tensor {entry.name} has type {entry.kind}; the checkpoint is not supported.")
        self.shape: tuple[int, ...] = (outputs, inputs)
        self.kind = f"{'AWQ' if awq else 'GPTQ'}{bits}"
        fitting = next((g for g in reversed(GROUPS) if self._group % g == 0), None)
        # With 8 bits the shift takes more digits than float16 has, and scales are then as wide.
        mode: Mode = "zeros" if bits == 4 else "shift"
        wide = bits == 8 or parts["scales"].kind != "F16"
        self.layout: Layout | None = None
        if not acts and fitting is not None:
            self.layout = Layout(bits, fitting, mode, 4 if wide else 2)

    def read(self, start: int = 0, stop: int | None = None) -> FloatArray:
        q, zero, scale, order = self._unpacked()
        result = np.empty(self.shape, np.float32)
        for begin in range(0, self.shape[0], COLUMNS):
            rows = slice(begin, begin + COLUMNS)
            numbers = q[rows].astype(np.float32) - zero[rows].astype(np.float32)[:, order]
            result[rows] = scale[rows].astype(np.float32)[:, order] * numbers
        return result[start:stop]

    def quantised(self, start: int = 0, stop: int | None = None) -> QuantisedTensor | None:
        if self.layout is None:
            return None
        q, zero, scale, order = self._unpacked()
        if (np.diff(order) < 0).any():  # the settings did not say so
            return None
        group, outputs = self.layout.group, self.shape[0]
        repeat = self._group // group  # a longer group is several of ours that say the same
        zero, scale = np.repeat(zero, repeat, axis=1), np.repeat(scale, repeat, axis=1)
        if self._bits == 4:
            packed = pack_halves(q.reshape(outputs, -1, group)).reshape(outputs, -1)
            made = QuantisedTensor(4, group, packed, scale, zero=None if (zero == 8).all() else zero.astype(np.uint8))
        else:  # in float32 scale * (128 - zero) and the sum are exact: both factors are short
            centred = (q ^ np.uint8(128)).view(np.int8)
            wide = scale.astype(np.float32)
            moved = wide * (128 - zero).astype(np.float32)
            shifted = bool(moved.any())
            made = QuantisedTensor(8, group, centred, wide if shifted else scale, shift=moved if shifted else None)
        return made if start == 0 and stop in (None, outputs) else made.rows(start, outputs if stop is None else stop)

    def _unpacked(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """(q uint8 [N, K], zero int16 [N, K/G], scale float [N, K/G], group of each input int64 [K])."""
        outputs, inputs = self.shape
        each = 32 // self._bits
        weight = _rows(self._parts["qweight"], 0, None).astype(np.int32, copy=False).view(np.uint32)
        q = np.empty((outputs, inputs), np.uint8)
        if self._awq:
            for begin in range(0, weight.shape[1], COLUMNS // each):
                piece = self._along_outputs(weight[:, begin : begin + COLUMNS // each])
                q[begin * each : begin * each + piece.shape[1]] = piece.T
        else:
            for begin in range(0, outputs, COLUMNS):
                piece = np.ascontiguousarray(weight[:, begin : begin + COLUMNS].T)
                q[begin : begin + COLUMNS] = self._numbers(piece, range(each)).reshape(len(piece), inputs)
        zeros = _rows(self._parts["qzeros"], 0, None).astype(np.int32, copy=False).view(np.uint32)
        if self._plus_one:
            zeros = zeros + np.uint32(_LESS_ONE[self._bits])
        zero = np.ascontiguousarray(self._along_outputs(zeros).T).astype(np.int16)
        self._refuse_other_format(zero)
        return q, zero, self._scales(), self._order()

    def _refuse_other_format(self, zero: IntArray) -> None:
        """Refuse symmetric weights whose settings name the wrong format ("gptq", "gptq_v2"): all were off by one."""
        off = 2 ** (self._bits - 1) + (1 if self._plus_one else -1)
        if not self._awq and (zero == off).all():
            entry, (said, other) = self._parts["qzeros"], ("gptq", "gptq_v2")[:: 1 if self._plus_one else -1]
            raise ModelError(
                f"{entry.file.path}: tensor {entry.name} has zero points as the format {other} has them, but the "
                f'settings say {said}; set "checkpoint_format": "{other}" in quantization_config.'
            )

    def _along_outputs(self, packed: IntArray) -> npt.NDArray[np.uint8]:
        """uint32 [n, m] -> uint8 [n, 8 m] (4 m with 8 bits), where several outputs share an integer."""
        each = 32 // self._bits
        places = np.argsort(_AWQ_ORDER).tolist() if self._awq else range(each)
        return self._numbers(packed, places).reshape(len(packed), -1)

    def _numbers(self, packed: IntArray, places: Any) -> npt.NDArray[np.uint8]:
        """uint32 [n, m] -> uint8 [n, m, each]: number i lies in the bits of places[i]."""
        shifts = np.asarray(places, np.uint32) * np.uint32(self._bits)
        mask = np.uint32(2**self._bits - 1)
        numbers: npt.NDArray[np.uint8] = ((packed[..., None] >> shifts) & mask).astype(np.uint8)
        return numbers

    def _scales(self) -> npt.NDArray[Any]:
        """[N, K/G], float16 where the file says so, else float32."""
        scales = np.ascontiguousarray(_rows(self._parts["scales"], 0, None).T)
        if not np.isfinite(scales).all():
            raise not_finite(self._parts["scales"])
        return scales

    def _order(self) -> IntArray:
        groups = self.shape[1] // self._group
        entry = self._parts.get("g_idx")
        if entry is None:
            return np.arange(self.shape[1]) // self._group
        order = _rows(entry, 0, None).astype(np.int64)
        if order.min() < 0 or order.max() >= groups or (np.bincount(order, minlength=groups) != self._group).any():
            raise ModelError(
                f"{entry.file.path}: tensor {entry.name} does not give each of {groups} groups {self._group} inputs; "
                "the checkpoint is damaged."
            )
        return order

    def _misfit(self, entry: TensorEntry) -> ModelError:
        return ModelError(
            f"{entry.file.path}: tensor {entry.name} has shape {list(entry.shape)}, which does not fit {self._bits} "
            f"bits in groups of {self._group}, as the settings say; a checkpoint with mixed "
            "quantisation is not supported."
        )


def _rows(entry: TensorEntry, start: int, stop: int | None) -> npt.NDArray[Any]:
    """Rows of a tensor as its own type (bfloat16 as float32)."""
    stop = entry.shape[0] if stop is None else stop
    width = entry.nbytes // max(entry.shape[0], 1)
    raw = np.empty((stop - start) * width, np.uint8)
    entry.file.read_into(raw, entry.offset + start * width, f"tensor {entry.name}")
    shape = (stop - start, *entry.shape[1:])
    if entry.kind == "F16":
        return raw.view(np.float16).reshape(shape)
    if entry.kind in _INTEGERS:
        return raw.view(_INTEGERS[entry.kind]).reshape(shape)
    return KINDS[entry.kind].decode(raw.reshape(-1, KINDS[entry.kind].nbytes)).reshape(shape)
