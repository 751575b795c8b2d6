"""From any model that can be read to edgespec's own quantised folder, tensor by tensor, with bounded memory.

What becomes of a tensor:
- A matrix that the model has in the wanted number of bits already (GGUF Q4_0, Q4_1, Q8_0; GPTQ, AWQ; edgespec) is
  repacked: the same numbers, unless another group or mode is asked for.
- Other matrices are quantised by group. K that is no multiple of the group takes the largest smaller group that divides
  it, and float16 if none does.
- Embedding and LM head take 8 bits with int4 too: the head decides each token. In a model whose layers are quantised
  already, floats stay float16 there.
- Norms and biases stay floats: float16 where that changes nothing, else float32.

A journal (`convert.journal`) says which tensors are written. A conversion that was interrupted goes on behind the last
of those whose bytes are still what they were, and ends with the very files of one that was not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ConfigError, ModelError
from edgespec.models.convert import folder as convert_folder
from edgespec.models.convert import journal as convert_journal
from edgespec.models.convert.journal import Journal, Written
from edgespec.models.convert.writer import Form, Place, ShardWriter, header_room, unfinish
from edgespec.models.cpu import usable_threads
from edgespec.models.tokenizer import Tokenizer
from edgespec.models.weights.quantisation import OWN_VERSION
from edgespec.models.weights.quantised import GROUPS, FloatArray, Layout, Mode, QuantisedTensor, quantise
from edgespec.models.weights.weight_file import WeightFile

DEFAULT_GROUP = 32
SHARD_BYTES = 2_000_000_000
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_PIECE = 1 << 19  # numbers at work in one thread: 2 MB, and some twenty times that in temporaries
_FLOATS = ("F16", "BF16", "F32", "F64")
_PACKED = ("GPTQ", "AWQ")
_FLOAT16_MAX = 65504.0
Report = Callable[[str, int, int], None]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """bits 4 or 8. group, mode: None where what the model has is kept, else 32 and "zeros" (4 bits) or "symmetric".

    tables: bits of embedding and LM head, 16 for float16; None: as the module's text says.
    """

    bits: int
    group: int | None = None
    mode: Mode | None = None
    tables: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one tensor becomes: its own numbers repacked (`kept`), quantised in `layout`, or floats (layout None)."""

    name: str
    shape: tuple[int, ...]
    layout: Layout | None
    kept: bool
    nbytes: int  # at most


@dataclass(slots=True)
class Kind:
    """Sums over the tensors of one kind, such as all q_proj. Squared error and squares are of what was rounded."""

    tensors: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    error: float = 0.0
    squares: float = 0.0
    forms: set[str] = field(default_factory=set)

    def add(self, written: Written, nbytes: int) -> None:
        """Count a tensor of `nbytes` bytes in the source."""
        self.tensors += 1
        self.bytes_before += nbytes
        self.bytes_after += sum(math.prod(shape) * dtype.itemsize for dtype, shape in written.forms.values())
        self.error += written.error
        self.squares += written.squares
        self.forms.add(written.form)

    @property
    def relative_error(self) -> float:
        """Root of the squared error over the root of the squares; 0 where all numbers are as they were."""
        return float(np.sqrt(self.error / self.squares)) if self.squares else 0.0


def plan(weights: WeightFile, wanted: Wanted) -> list[Step]:
    """The steps of a conversion, from headers alone. Raises ModelError for a model of which nothing would change."""
    names = weights.names()
    packed = any(weights.layout(n) is not None or weights.kind(n).startswith(_PACKED) for n in names)
    steps = [_step(weights, name, wanted, packed=packed) for name in names]
    if not any(step.layout for step in steps):
        raise ModelError(f"{weights.path}: no matrix has inputs in groups of {GROUPS[0]}; it cannot be quantised.")
    return steps


def _step(weights: WeightFile, name: str, wanted: Wanted, *, packed: bool) -> Step:
    shape, own = weights.shape(name), weights.layout(name)
    if len(shape) != 2:
        return Step(name, shape, None, False, 4 * int(np.prod(shape)))
    bits = wanted.bits
    if name in TABLES:
        bits = wanted.tables or (16 if packed and weights.kind(name) in _FLOATS else 8)
        if wanted.tables is None and own is not None and own.bits == wanted.bits:
            bits = own.bits
    if own is not None and own.bits == bits and wanted.group in (None, own.group) and wanted.mode in (None, own.mode):
        return Step(name, shape, own, True, own.nbytes(shape))
    group = next((g for g in reversed(GROUPS) if g <= (wanted.group or DEFAULT_GROUP) and shape[1] % g == 0), None)
    if bits == 16 or group is None:
        return Step(name, shape, None, False, 2 * shape[0] * shape[1])
    layout = Layout(bits, group, "symmetric" if bits == 8 else wanted.mode or "zeros")
    return Step(name, shape, layout, False, layout.nbytes(shape))


def convert(
    weights: WeightFile,
    tokenizer: Tokenizer,
    out: Path,
    wanted: Wanted,
    *,
    licence: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    threads: int | None = None,
    report: Report | None = None,
    note: Note | None = None,
    program: str = "",
) -> dict[str, Kind]:
    """Write `weights` into the folder `out`, which appears complete or not at all. Returns sums by kind of tensor.

    Goes on with what an interrupted call for the same source and settings left, see `convert_folder.work_folder`.
    report: called with (tensor, bytes written, bytes in all). note: called with what the user may want to know of an
    earlier conversion that is gone on with, or is not. program: the version of the caller's. Raises ConfigError for a
    folder that is there or cannot be written, ModelError for damaged weights.
    """
    steps = plan(weights, wanted)
    need = sum(step.nbytes for step in steps)
    convert_folder.check_target(out, weights.path, force=force)
    convert_folder.check_disk(out, need)
    settings = {**asdict(wanted), "shard_bytes": shard_bytes}
    with convert_folder.folder_in_progress(out, note) as folder:
        names = [f"{step.name}.{part}" for step in steps for part in ("scale", "shift", "zero")]
        writer = ShardWriter(folder, shard_bytes, header_room(names))
        try:
            identity = convert_journal.identity(weights, settings, program)
            kept = _restored(folder, identity, steps, writer, note)
            with Journal(folder, identity, kept) as journal, _Workers(threads or usable_threads()) as workers:
                written = list(kept)
                done = sum(step.nbytes for step in steps[: len(kept)])
                for step in steps[len(kept) :]:
                    if report is not None:
                        report(step.name, done, need)
                    written.append(_converted(weights, step, writer, workers))
                    journal.add(written[-1])
                    done += step.nbytes
            writer.finish()
        finally:
            writer.close()
        convert_folder.write_beside(weights, tokenizer, folder, _record(weights, steps, wanted, licence))
        convert_folder.check_result(weights, tokenizer, folder)
        if report is not None:
            report("complete", need, need)
    return _by_kind(weights, written)


def _by_kind(weights: WeightFile, written: Sequence[Written]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for each in written:
        kinds.setdefault(kind_of(each.name), Kind()).add(each, weights.nbytes(each.name))
    return kinds


def _restored(
    folder: Path, identity: dict[str, Any], steps: Sequence[Step], writer: ShardWriter, note: Note | None
) -> list[Written]:
    """The first tensors of `steps`, as far as an earlier conversion wrote them whole; nothing else stays there."""
    entries, reason = convert_journal.read(folder, identity)
    if reason and note is not None:
        note(f"the conversion that was interrupted is not gone on with: {reason}; starting anew.")
    if not entries:
        convert_folder.clear(folder)
        return []
    unfinish(folder, convert_journal.NAME)
    kept = []
    for step, entry in zip(steps, entries):
        if entry.name != step.name or not writer.restore(entry.forms, entry.checksum):
            break
        kept.append(entry)
    writer.trim()
    if note is not None:
        note(f"going on with the conversion that was interrupted: {len(kept)} of {len(steps)} tensors are written.")
    return kept


def kind_of(name: str) -> str:
    """What a tensor is, whatever its layer: "q_proj", "embed_tokens", "input_layernorm"; biases by "q_proj.bias"."""
    part, suffix = name.split(".")[-2:]
    return part if suffix == "weight" else f"{part}.{suffix}"


def _record(weights: WeightFile, steps: Sequence[Step], wanted: Wanted, licence: str | None) -> dict[str, Any]:
    matrices = [step.layout for step in steps if step.layout is not None and step.name not in TABLES]
    main = max(set(matrices), key=matrices.count) if matrices else None
    return {
        "version": OWN_VERSION,
        "bits": wanted.bits,
        "group": main.group if main else DEFAULT_GROUP,
        "source": {
            "name": weights.path.name,
            "fingerprint": weights.fingerprint(),
            "stored": sorted({weights.kind(name) for name in weights.names()}),
            "licence": licence,
        },
    }


def _converted(weights: WeightFile, step: Step, writer: ShardWriter, workers: _Workers) -> Written:
    """Convert one tensor."""
    kept = _kept(weights, step, writer) if step.kept else None
    if kept is not None:
        return kept
    forms: dict[str, Form] = {}
    places: dict[str, Place] = {}
    layout = step.layout
    if step.kept and layout is not None and layout.mode == "shift":  # its inputs turned out to be out of order
        layout = Layout(layout.bits, layout.group, "symmetric")
    row = 0
    for piece in _small(weights.pieces(step.name, _PIECE)):
        if not places:
            forms = _forms(step.name, step.shape, layout, _float_type(step, piece))
            places = writer.add(forms)
        workers.do(_write_piece, piece, row, layout, places, weights, step.name)
        row += len(piece)
    error, squares = workers.sums()
    form = str(layout) if layout else next(iter(places.values())).dtype.name
    return Written(step.name, forms, _checksum(writer, places), form, error, squares)


def _kept(weights: WeightFile, step: Step, writer: ShardWriter) -> Written | None:
    """Repack a tensor; None if it has no such form after all."""
    forms: dict[str, Form] = {}
    places: dict[str, Place] = {}
    form, row = "", 0
    for piece in weights.quantised_pieces(step.name, _PIECE):
        if not places:
            forms = {f"{step.name}.{k}": (a.dtype, (step.shape[0], *a.shape[1:])) for k, a in piece.fields.items()}
            places, form = writer.add(forms), f"{piece.layout}, kept"
        _write_fields(piece, row, places, step.name)
        row += piece.shape[0]
    return Written(step.name, forms, _checksum(writer, places), form) if places else None


def _checksum(writer: ShardWriter, places: dict[str, Place]) -> int:
    """Of a tensor, read back: pieces were written in any order."""
    found = writer.checksum(places)
    if found is None:
        path = next(iter(places.values())).shard.path
        raise ConfigError(f"{path.parent}: cannot be read again; give --out another disk.")
    return found


def _forms(name: str, shape: tuple[int, ...], layout: Layout | None, floats: type[np.floating[Any]]) -> dict[str, Form]:
    """Types and shapes of the arrays that a tensor becomes, by name."""
    if layout is None:
        return {name: (np.dtype(floats), shape)}
    rows, columns = shape
    groups = (rows, columns // layout.group)
    forms: dict[str, Form] = {
        f"{name}.q": (np.dtype(np.uint8 if layout.bits == 4 else np.int8), (rows, columns * layout.bits // 8)),
        f"{name}.scale": (np.dtype(np.float16), groups),
    }
    if layout.mode == "zeros":
        forms[f"{name}.zero"] = (np.dtype(np.uint8), groups)
    elif layout.mode == "shift":
        forms[f"{name}.shift"] = (np.dtype(np.float16), groups)
    return forms


def _float_type(step: Step, first: FloatArray) -> type[np.floating[Any]]:
    """float16 for matrices, and for vectors, which come whole, where that changes no number."""
    if len(step.shape) == 2:
        return np.float16
    with np.errstate(over="ignore"):
        return np.float16 if (first.astype(np.float16).astype(np.float32) == first).all() else np.float32


def _small(pieces: Iterator[FloatArray]) -> Iterator[FloatArray]:
    """Pieces that the file could not give smaller, cut."""
    for piece in pieces:
        step = len(piece) if piece.ndim == 1 else max(1, _PIECE // piece.shape[1])
        for start in range(0, len(piece), step):
            yield piece[start : start + step]


def _write_piece(
    piece: FloatArray, row: int, layout: Layout | None, places: dict[str, Place], weights: WeightFile, name: str
) -> tuple[float, float]:
    """(squared error, squares) of some rows, which are written."""
    if layout is None:
        place = places[name]
        if np.abs(piece).max(initial=0.0) > _FLOAT16_MAX and place.dtype == np.float16:
            raise ModelError(f"{weights.path}: tensor {name} has numbers that float16 cannot hold; quantise it too.")
        rounded = piece.astype(place.dtype)
        place.write(row, rounded)
        restored = rounded.astype(np.float32)
    else:
        try:
            made = quantise(piece, layout.bits, layout.group, layout.mode)
        except ValueError as error:
            raise ModelError(f"{weights.path}: tensor {name} cannot be quantised: {error}.") from error
        _write_fields(made, row, places, name)
        restored = made.dequantise()
    restored -= piece
    flat, difference = piece.reshape(-1), restored.reshape(-1)
    return float(np.dot(difference, difference)), float(np.dot(flat, flat))


def _write_fields(made: QuantisedTensor, row: int, places: dict[str, Place], name: str) -> None:
    for key, array in made.fields.items():
        places[f"{name}.{key}"].write(row, array)


class _Workers:
    """Threads with a bounded queue; what a job raises is raised at the next call."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="convert")
        self._limit = threads + 1
        self._running: deque[Future[tuple[float, float]]] = deque()
        self._sums = (0.0, 0.0)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def do(self, job: Callable[..., tuple[float, float]], *arguments: Any) -> None:
        """Run `job` in a thread; its two numbers go to `sums`."""
        while len(self._running) >= self._limit:
            self._take()
        self._running.append(self._pool.submit(job, *arguments))

    def sums(self) -> tuple[float, float]:
        """Wait for all jobs; the sums of what those since the last call returned."""
        while self._running:
            self._take()
        found, self._sums = self._sums, (0.0, 0.0)
        return found

    def _take(self) -> None:
        error, squares = self._running.popleft().result()
        self._sums = (self._sums[0] + error, self._sums[1] + squares)
