"""The image of a head: all that its ONNX session needs, in one piece, made once and then only read.

Making a session from `head.safetensors` means reading a few thousand rows of the target's tables one by one and
rounding them to 8 bits: most of a load, and with the interpreter lock held. So the outcome is kept in a file under the
home folder. Loading is then one read into the draft's slot, with a sha256 over it, and building the session from there.

File, and buffer: magic, two lengths (uint32), a description (JSON), and the graph (ONNX, without weights), together
padded to `HEADER_BYTES`; then the constants of `layout`, each at a multiple of 64 bytes. Little-endian.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from drafts.base import LoadControl
from drafts.head_file import FILE_NAME, HeadWeights
from drafts.head_spec import BLOCK, VECTORS, HeadSpec
from drafts.manifest import FileInfo, own_file
from drafts.reading import PIECE_BYTES, open_to_read, sha256_at_pace
from edgespec.errors import DraftError, ModelError
from edgespec.files import write_bytes
from edgespec.models.onnx.graph_version import GRAPH_VERSION

if TYPE_CHECKING:
    from edgespec.models.base import Decoder, FloatArray

_log = logging.getLogger(__name__)

IMAGE_VERSION = 1  # raise when the same weights would give another image: images of before are then made again
HEADER_BYTES = 32 << 10
_MAGIC = b"EDGEHEAD"
_LENGTHS = struct.Struct("<II")
_ALIGNMENT = 64
_PIECE_ROWS = 64  # of the target's tables, between two checkpoints: less than 2 ms with the interpreter lock
_U8, _F32, _I32 = np.dtype(np.uint8), np.dtype("<f4"), np.dtype("<i4")

Layout = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class HeadImage:
    """An image in a buffer. model: the graph; constants: views of the buffer by name; vocab: int32, a copy."""

    model: bytes
    constants: Arrays
    vocab: npt.NDArray[np.int32]


def layout(spec: HeadSpec, tied: bool) -> Layout:
    """Name -> (type, shape) of every constant. tied: the target's LM head is its embedding.

    Numbers are q + 128 in blocks of 32, scales lie in one line, as `MatMulNBits` takes them.
    """
    shapes = dict(spec.matrices)
    for table in ("embedding",) if tied else ("embedding", "head"):
        shapes[table] = (spec.vocab_rows, spec.hidden_size)
    found: Layout = {"vocab": (_I32, (spec.vocab_rows,))}
    for name, (rows, cols) in shapes.items():
        found[f"{name}/q"] = (_U8, (rows, cols // BLOCK, BLOCK))
        found[f"{name}/scale"] = (_F32, (rows * (cols // BLOCK),))
    return found | dict.fromkeys(VECTORS, (_F32, (spec.hidden_size,)))


def constant_bytes(spec: HeadSpec, tied: bool) -> int:
    """Bytes of all constants."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout(spec, tied).values())


def image_bytes(spec: HeadSpec, tied: bool) -> int:
    """Bytes of an image, as a file and in a slot."""
    return HEADER_BYTES + sum(
        _padded(dtype.itemsize * math.prod(shape)) for dtype, shape in layout(spec, tied).values()
    )


class HeadSource(Protocol):
    """Where the weights of a head come from."""

    def files(self, spec: HeadSpec, target: Decoder, temperature: float) -> tuple[Path, ...]:
        """The files that `fill` looks at."""

    def fill(
        self, buffer: memoryview, spec: HeadSpec, target: Decoder, temperature: float, control: LoadControl
    ) -> HeadImage:
        """Put the image into `buffer` (`image_bytes` long). Raises DraftError, OSError, LoadCancelled."""


class GivenHead:
    """Weights that are in memory."""

    def __init__(self, weights: HeadWeights) -> None:
        self._weights = weights

    def files(self, spec: HeadSpec, target: Decoder, temperature: float) -> tuple[Path, ...]:
        return ()

    def fill(
        self, buffer: memoryview, spec: HeadSpec, target: Decoder, temperature: float, control: LoadControl
    ) -> HeadImage:
        return make_image(buffer, self._weights, target, temperature, control)


class StoredHead:
    """`head.safetensors` of a draft, with its image beside the user's other things.

    folder: the draft's; its file must be as `info` (of its manifest) says. read: reads and checks the file.
    fingerprint: of the target's weights. images: folder for images; None = none are kept.
    """

    def __init__(
        self,
        folder: Path,
        info: FileInfo,
        read: Callable[[], HeadWeights],
        *,
        name: str,
        fingerprint: str,
        images: Path | None,
    ) -> None:
        self._folder = folder
        self._info = info
        self._read = read
        self._name = name
        self._fingerprint = fingerprint
        self._images = images
        self._mended = False

    def fill(
        self, buffer: memoryview, spec: HeadSpec, target: Decoder, temperature: float, control: LoadControl
    ) -> HeadImage:
        """The image from its file, else made from `head.safetensors` and kept.

        Where there is an image, it was made of the very file that the manifest names (its sha256 was compared then) and
        has a sha256 of its own. So that file is then only looked at: one that is gone, unreadable, or of another length
        is an error, because its draft is not what the user believes; bits that turned in it since harm nobody.
        """
        source = own_file(self._folder, FILE_NAME)
        status = self._check(source)
        made_of = self._made_of(spec, target, temperature)
        path, damaged = self._path(made_of), False
        if path is not None:
            try:
                image = read_image(path, buffer, spec, target.spec.tie_embeddings, made_of, control)
                if image is not None:
                    return image
            except (DraftError, OSError, ValueError) as error:
                damaged = True
                if self._mended:
                    raise DraftError(f"{path}: is damaged again after it was made anew ({error}); delete it") from error
                _log.info("%s is made anew: %s", path, error)
        self._verify(source, buffer, control)
        weights = self._read()
        if weights.spec != spec or _identity(os.stat(source)) != _identity(status):
            raise DraftError(f"{source}: was replaced while it was read; start again")
        image = make_image(buffer, weights, target, temperature, control, made_of)
        if path is not None:
            self._mended = _keep(path, buffer) and damaged
            control.checkpoint()
        return image

    def files(self, spec: HeadSpec, target: Decoder, temperature: float) -> tuple[Path, ...]:
        source, image = self._folder / FILE_NAME, self._path(self._made_of(spec, target, temperature))
        return (source,) if image is None or not image.exists() else (source, image)

    def _check(self, source: Path) -> os.stat_result:
        try:
            fd = open_to_read(source)
            try:
                status = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise DraftError(f"{source}: cannot be read ({error.strerror})") from error
        if status.st_size != self._info.bytes:
            raise DraftError(
                f"{source}: has {status.st_size} bytes and must have {self._info.bytes}; copy or make the draft again"
            )
        return status

    def _verify(self, source: Path, scratch: memoryview, control: LoadControl) -> None:
        """Compare the sha256 of `source` with the manifest's. What is in `scratch` is lost."""
        if sha256_at_pace(source, self._info.bytes, scratch, control) != self._info.sha256:
            raise DraftError(f"{source}: has another sha256 than its manifest says; copy or make the draft again")

    def _made_of(self, spec: HeadSpec, target: Decoder, temperature: float) -> dict[str, Any]:
        return {
            "version": IMAGE_VERSION,
            "architecture": spec.to_mapping(),
            "temperature": temperature,
            "weights": self._info.sha256,
            "target": [self._fingerprint, target.weight_format, GRAPH_VERSION],  # the values of the target's rows
        }

    def _path(self, made_of: Mapping[str, Any]) -> Path | None:
        if self._images is None:
            return None
        digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
        return self._images / f"{self._name}-{digest[:20]}.image"


def make_image(
    buffer: memoryview,
    weights: HeadWeights,
    target: Decoder,
    temperature: float,
    control: LoadControl,
    made_of: Mapping[str, Any] | None = None,
) -> HeadImage:
    """The image of a head for `target` in `buffer`, in pieces short enough not to be felt by other threads.

    Raises DraftError for rows of the target that cannot be used, LoadCancelled.
    """
    try:
        from drafts.head_graph import head_graph
    except ImportError as error:
        raise DraftError("a head needs ONNX Runtime: pip install 'edgespec[cpu]'.") from error
    spec, tied = weights.spec, target.spec.tie_embeddings
    arrays = _views(buffer, spec, tied)
    for name, matrix in weights.matrices.items():
        control.checkpoint()
        _store(arrays, name, matrix.q.view(np.uint8).reshape(arrays[f"{name}/q"].shape), matrix.scale)
        arrays[f"{name}/q"] ^= 0x80  # from two's complement to 128 more
    for name in VECTORS:
        arrays[name][...] = weights.vectors[name]
    arrays["vocab"][...] = weights.vocab
    _fill_table(arrays, "embedding", target.embed, control)
    if not tied:
        _fill_table(arrays, "head", target.head_rows, control)
    constants = {name: kind for name, kind in layout(spec, tied).items() if name != "vocab"}
    model = head_graph(spec, constants, temperature)
    control.checkpoint()
    if made_of is not None:
        _describe(buffer, model, made_of)
    return _image(model, arrays)


def read_image(
    path: Path, buffer: memoryview, spec: HeadSpec, tied: bool, made_of: Mapping[str, Any], control: LoadControl
) -> HeadImage | None:
    """The image in `path`, read into `buffer`; None if there is none that can be opened.

    Raises LoadCancelled, and OSError, DraftError or ValueError for one that is damaged or was made of something else
    than `made_of` says.
    """
    size = image_bytes(spec, tied)
    try:
        fd = open_to_read(path)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise ValueError(f"it has {status.st_size} bytes and must have {size}")
        control.read(fd, buffer[:HEADER_BYTES], 0)
        sha256, model = _description(buffer, made_of)
        digest = hashlib.sha256(model)
        for begin in range(HEADER_BYTES, size, PIECE_BYTES):
            piece = buffer[begin : min(begin + PIECE_BYTES, size)]
            control.read(fd, piece, begin)
            digest.update(piece)
    finally:
        os.close(fd)
    if digest.hexdigest() != sha256:
        raise ValueError("its sha256 is another than it says")
    return _image(model, _views(buffer, spec, tied))


def _fill_table(arrays: Arrays, name: str, rows: Callable[[list[int]], FloatArray], control: LoadControl) -> None:
    """Round the target's rows for `vocab` to 8 bits."""
    from edgespec.models.onnx.linear import quantise_int8

    vocab: list[int] = arrays["vocab"].tolist()
    scales = arrays[f"{name}/scale"].reshape(len(vocab), -1)
    for begin in range(0, len(vocab), _PIECE_ROWS):
        control.checkpoint()
        end = begin + _PIECE_ROWS
        try:
            wanted = rows(vocab[begin:end])
        except (ModelError, ValueError) as error:
            raise DraftError(f"the target's rows cannot be read for a head: {error}") from error
        if not np.isfinite(wanted).all():
            raise DraftError(f"the target's {name} holds NaN or infinity, for token {vocab[begin]} or one after it")
        blocks = quantise_int8(wanted)
        arrays[f"{name}/q"][begin:end] = blocks.q
        scales[begin:end] = blocks.scale


def _store(arrays: Arrays, name: str, q: npt.NDArray[np.uint8], scale: npt.NDArray[Any]) -> None:
    arrays[f"{name}/q"][...] = q
    arrays[f"{name}/scale"][...] = scale.reshape(-1)


def _views(buffer: memoryview, spec: HeadSpec, tied: bool) -> dict[str, npt.NDArray[Any]]:
    """The constants of the image in `buffer`."""
    found, at = {}, HEADER_BYTES
    for name, (dtype, shape) in layout(spec, tied).items():
        count = math.prod(shape)
        found[name] = np.frombuffer(buffer, dtype, count, at).reshape(shape)
        at += _padded(count * dtype.itemsize)
    return found


def _image(model: bytes, arrays: Mapping[str, npt.NDArray[Any]]) -> HeadImage:
    constants = dict(arrays)
    return HeadImage(model, constants, constants.pop("vocab").astype(np.int32))


def _describe(buffer: memoryview, model: bytes, made_of: Mapping[str, Any]) -> None:
    """Write the header of the image in `buffer`."""
    digest = hashlib.sha256(model)
    for begin in range(HEADER_BYTES, len(buffer), PIECE_BYTES):
        digest.update(buffer[begin : begin + PIECE_BYTES])
    text = json.dumps({"made_of": made_of, "sha256": digest.hexdigest()}).encode()
    header = _MAGIC + _LENGTHS.pack(len(text), len(model)) + text + model
    if len(header) > HEADER_BYTES:
        raise DraftError(f"the graph of a head takes {len(model)} bytes, more than an image has room for.")
    buffer[:HEADER_BYTES] = header.ljust(HEADER_BYTES, b"\0")


def _description(buffer: memoryview, made_of: Mapping[str, Any]) -> tuple[str, bytes]:
    """The sha256 and the graph in the header, which must be of `made_of`; else ValueError."""
    start = len(_MAGIC) + _LENGTHS.size
    text_bytes, model_bytes = _LENGTHS.unpack(buffer[len(_MAGIC) : start])
    if buffer[: len(_MAGIC)] != _MAGIC or start + text_bytes + model_bytes > HEADER_BYTES:
        raise ValueError("it is no image of a head")
    try:
        told = json.loads(bytes(buffer[start : start + text_bytes]))
        made, sha256 = told["made_of"], told["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its description cannot be read ({error})") from error
    if made != made_of:
        raise ValueError("it was made of something else")
    return str(sha256), bytes(buffer[start + text_bytes : start + text_bytes + model_bytes])


_told: set[Path] = set()


def _keep(path: Path, buffer: memoryview) -> bool:
    """Write the image; whether that worked. Where it fails, loads take longer, which is worth one warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, cast(bytes, buffer))
        return True
    except OSError as error:
        if path.parent not in _told:
            _told.add(path.parent)
            reason = error.strerror or error
            _log.warning("%s: cannot be written (%s); drafts are prepared anew at every load", path.parent, reason)
        return False


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
