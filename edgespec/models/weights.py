"""A model's weights, one tensor at a time, under the same names whatever file they come from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import ModelError
from edgespec.models.files import ReadOnlyFile, TensorEntry, read_json
from edgespec.models.gguf_file import GGUFFile
from edgespec.models.gguf_types import KINDS, half, unpack_nibbles
from edgespec.models.safetensors_file import SafetensorsFile, open_shards
from edgespec.models.spec import ModelSpec, check_consistency, required_tensors
from edgespec.models.spec_gguf import ROPE_FACTORS, canonical_name

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
_PIECE = 1 << 20  # weights decoded at a time: the temporaries of a piece stay in the processor's cache
_SAMPLE = 64 << 10
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn_rot_embd.weight")  # tables that older files carry; we compute them


@dataclass(frozen=True, slots=True)
class QuantBlocks:
    """A quantised matrix, in blocks of 32 along its rows: weight = scale * (q - zero) + minimum.

    q: uint8 [rows, cols / 32, 32] (bits 4: 0..15, one per byte; bits 8: 0..255, zero = 128); scale: float32
    [rows, cols / 32]; minimum: the same, or None for 0.
    """

    bits: int
    q: ByteArray
    scale: FloatArray
    minimum: FloatArray | None
    zero: int


class WeightFile:
    """An opened model: its `spec`, and its tensors by canonical (Hugging Face) name and row order.

    Tensors are read on demand with positional reads; the file is never mapped nor read as a whole. Any damage is a
    ModelError that names file and tensor. Reading from several threads is safe.
    """

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        tensors: Mapping[str, TensorEntry],
        files: list[GGUFFile | SafetensorsFile],
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

    def names(self) -> list[str]:
        """The names of all tensors, exactly those of `required_tensors(spec)`."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def kind(self, name: str) -> str:
        """The type the file stores: "F32", "BF16", "Q4_1", ..."""
        return self._entry(name).kind

    def read(self, name: str) -> FloatArray:
        """The tensor as float32 in C order, dequantised. Raises ModelError if its bytes are damaged or not finite."""
        entry = self._entry(name)
        kind = KINDS[entry.kind]
        result = np.empty(math.prod(entry.shape), np.float32)
        step = max(1, _PIECE // kind.block)
        count = entry.nbytes // kind.nbytes
        buffer = np.empty(min(step, count) * kind.nbytes, np.uint8)
        for start in range(0, count, step):
            blocks = min(step, count - start)
            raw = buffer[: blocks * kind.nbytes]
            entry.file.read_into(raw, entry.offset + start * kind.nbytes, f"tensor {entry.name}")
            piece = result[start * kind.block : (start + blocks) * kind.block]
            with np.errstate(invalid="ignore", over="ignore"):
                piece[:] = kind.decode(raw.reshape(blocks, kind.nbytes)).reshape(-1)
            if not np.isfinite(piece).all():
                raise _not_finite(entry)
        tensor = result.reshape(entry.shape)
        _refuse_empty(entry, name, tensor)
        return self._half_split(name, tensor)

    def blocks(self, name: str) -> QuantBlocks | None:
        """The tensor's own blocks if it is a Q4_0, Q4_1 or Q8_0 matrix, else None."""
        entry = self._entry(name)
        if entry.kind not in ("Q4_0", "Q4_1", "Q8_0") or len(entry.shape) != 2:
            return None
        kind = KINDS[entry.kind]
        rows, columns = entry.shape
        raw = np.empty((rows * columns // 32, kind.nbytes), np.uint8)
        entry.file.read_into(raw.reshape(-1), entry.offset, f"tensor {entry.name}")
        _refuse_empty(entry, name, raw.reshape(rows, -1))
        scale, minimum = half(raw[:, :2]), None
        if entry.kind == "Q8_0":
            bits, zero, q = 8, 128, raw[:, 2:] ^ np.uint8(128)  # two's complement + 128
        elif entry.kind == "Q4_0":
            bits, zero, q = 4, 8, unpack_nibbles(raw[:, 2:])
        else:
            bits, zero, q, minimum = 4, 0, unpack_nibbles(raw[:, 4:]), half(raw[:, 2:4])
        if not np.isfinite(scale).all() or (minimum is not None and not np.isfinite(minimum).all()):
            raise _not_finite(entry)
        shape = (rows, columns // 32)
        return QuantBlocks(
            bits,
            self._half_split(name, q.reshape(*shape, 32)),
            self._half_split(name, scale.reshape(shape)),
            None if minimum is None else self._half_split(name, minimum.reshape(shape)),
            zero,
        )

    def fingerprint(self) -> str:
        """sha256 (hex) over all headers, file sizes, and the first and last 64 KiB of every tensor.

        A cache key: it changes with any other model, quantisation or download, at a fraction of the cost of reading
        everything. Edits in the middle of a large tensor alone do not change it. The path and times do not matter.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256(repr(self.spec).encode())
            for opened in self._files:
                digest.update(f"{opened.header_digest}:{opened.file.size}\n".encode())
            for name, entry in sorted(self._tensors.items()):
                digest.update(name.encode())
                for start, count in _sample(entry.nbytes):
                    digest.update(entry.file.read(entry.offset + start, count, f"tensor {entry.name}"))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def close(self) -> None:
        for opened in self._files:
            opened.close()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelError(f"{self.path}: has no tensor {name}.") from None

    def _half_split(self, name: str, tensor: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undo the row order that llama GGUF files give to q and k (rotary pairs side by side)."""
        part = name.split(".")[-2]
        if not self._permuted or part not in ("q_proj", "k_proj"):
            return tensor
        heads = self.spec.num_heads if part == "q_proj" else self.spec.num_kv_heads
        rows = tensor.reshape(heads, self.spec.head_dim // 2, 2, *tensor.shape[1:])
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(tensor.shape)


def open_weights(path: Path) -> WeightFile:
    """Open a `.gguf` file, a `.safetensors` file beside its config.json, or a model folder with either.

    Reads headers only. Raises ModelError for whatever is missing, incomplete, corrupt, inconsistent or unsupported.
    """
    path = Path(path)
    try:
        return _open_folder(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened ({error.strerror}).") from error


def _open_file(path: Path) -> WeightFile:
    if not path.exists():
        raise ModelError(f"{path}: does not exist; give a .gguf file or a model folder.")
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    if path.suffix.lower() == ".safetensors":
        return _open_safetensors(path, path.parent, [SafetensorsFile(path)])
    if path.suffix.lower() in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(f"{path}: pickled checkpoints are not read, they can run code; use safetensors or GGUF.")
    raise ModelError(f"{path}: is neither a .gguf nor a .safetensors file.")


def _open_folder(folder: Path) -> WeightFile:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        return _open_safetensors(folder, folder, [SafetensorsFile(single)])
    if index.exists():
        return _open_safetensors(folder, folder, open_shards(index))
    return _open_gguf(only_gguf(folder))


def only_gguf(folder: Path) -> Path:
    """The one .gguf file of a folder; ModelError if there is none or more than one."""
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".gguf")
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"{folder}: holds {len(found)} .gguf files; give the path of one of them.")
    raise ModelError(f"{folder}: holds neither model.safetensors nor a .gguf file.")


def _open_gguf(path: Path) -> WeightFile:
    opened = GGUFFile(path)
    try:
        spec = ModelSpec.from_gguf(opened.metadata, {n: t.shape for n, t in opened.tensors.items()}, source=str(path))
        tensors: dict[str, TensorEntry] = {}
        for name, entry in opened.tensors.items():
            if name == ROPE_FACTORS:
                spec = _with_rope_factors(spec, entry)
            elif not name.endswith(_IGNORED_SUFFIXES):
                tensors[canonical_name(name) or name] = entry
        return WeightFile(path, spec, tensors, [opened], opened.metadata, permuted=spec.architecture == "llama")
    except BaseException:
        opened.close()
        raise


def _open_safetensors(path: Path, folder: Path, files: list[SafetensorsFile]) -> WeightFile:
    try:
        config_path = folder / "config.json"
        if not config_path.exists():
            raise ModelError(f"{config_path}: is missing; a safetensors model needs its config.json.")
        generation = folder / "generation_config.json"
        spec = ModelSpec.from_config(
            read_json(config_path),
            source=str(config_path),
            generation_config=read_json(generation) if generation.exists() else None,
        )
        tensors = {n: t for f in files for n, t in f.tensors.items() if not n.endswith(_IGNORED_SUFFIXES)}
        if spec.tie_embeddings and "lm_head.weight" in tensors:
            # A copy of the embedding is redundant; a different head wins over the flag, as in transformers.
            if _same_content(tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")):
                del tensors["lm_head.weight"]
            else:
                spec = replace(spec, tie_embeddings=False)
        return WeightFile(path, spec, tensors, list(files), {}, permuted=False)
    except BaseException:
        for opened in files:
            opened.close()
        raise


def _checked(path: Path, spec: ModelSpec, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The required tensors in order; ModelError if one is missing, has another shape, or if one is left over."""
    required = required_tensors(spec)
    for name, shape in required.items():
        entry = tensors.get(name)
        if entry is None:
            raise ModelError(
                f"{path}: tensor {name} is missing; the model is incomplete or its config belongs to another."
            )
        if entry.shape != shape:
            vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight") and entry.shape[1:] == shape[1:]
            wanted = f"vocab_size is {shape[0]}" if vocabulary else f"the config asks for {list(shape)}"
            has = f"{entry.shape[0]} rows" if vocabulary else f"shape {list(entry.shape)}"
            raise ModelError(
                f"{entry.file.path}: tensor {entry.name} has {has} but {wanted}; the files do not belong together."
            )
    unused = sorted(tensors.keys() - required.keys())
    if unused:
        entry = tensors[unused[0]]
        raise ModelError(
            f"{entry.file.path}: tensor {entry.name} has no place in a {spec.architecture} model "
            f"({len(unused)} such tensors); this variant is not supported."
        )
    return {name: tensors[name] for name in required}


def _with_rope_factors(spec: ModelSpec, entry: TensorEntry) -> ModelSpec:
    """llama-3 files carry the divisors of the rotary frequencies as a tensor."""
    source = f"{entry.file.path}: tensor {entry.name}"
    if entry.kind != "F32" or entry.shape != (spec.head_dim // 2,) or spec.rope.kind != "default":
        raise ModelError(
            f"{source} cannot be applied (type {entry.kind}, shape {list(entry.shape)}, rope {spec.rope.kind})."
        )
    raw = entry.file.read(entry.offset, entry.nbytes, f"tensor {entry.name}")
    factors = tuple(np.frombuffer(raw, "<f4").astype(float).tolist())
    return check_consistency(replace(spec, rope=replace(spec.rope, kind="factors", factors=factors)), source)


def _same_content(one: TensorEntry, other: TensorEntry | None) -> bool:
    if other is None or one.kind != other.kind or one.shape != other.shape:
        return False
    for start in range(0, one.nbytes, _PIECE * 8):
        count = min(_PIECE * 8, one.nbytes - start)
        pieces = [e.file.read(e.offset + start, count, f"tensor {e.name}") for e in (one, other)]
        if pieces[0] != pieces[1]:
            return False
    return True


def _sample(nbytes: int) -> list[tuple[int, int]]:
    if nbytes <= 2 * _SAMPLE:
        return [(0, nbytes)]
    return [(0, _SAMPLE), (nbytes - _SAMPLE, _SAMPLE)]


def _refuse_empty(entry: TensorEntry, name: str, values: npt.NDArray[Any]) -> None:
    """Refuse what an interrupted download leaves: a file of full length whose tail was never written.

    Biases may be zero, and matrices may end with rows of padding, but a quarter of a trained matrix is no padding.
    """
    if name.endswith(".bias"):
        return
    if not values[-max(1, len(values) // (4 if values.ndim > 1 else 16)) :].any():
        raise ModelError(
            f"{entry.file.path}: tensor {entry.name} ends with zeros only; the download is incomplete, fetch it again."
        )


def _not_finite(entry: TensorEntry) -> ModelError:
    return ModelError(
        f"{entry.file.path}: tensor {entry.name} holds NaN or infinity; the file is damaged, fetch it again."
    )


__all__ = ["QuantBlocks", "ReadOnlyFile", "WeightFile", "only_gguf", "open_weights"]
