"""The CUDA engine: static tensors, one captured graph for each shape of step, results fetched when looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgespec.errors import ConfigError, ModelError
from edgespec.kernels import ops
from edgespec.models.base import FloatArray, ForwardOutput, KVCache, KVPool, Part
from edgespec.models.batching import check_distinct
from edgespec.models.cuda import step as cuda_step
from edgespec.models.cuda.draft import MOST_DRAWN, MOST_GUESSES, MOST_PENDING, DraftLoop, Guesses
from edgespec.models.cuda.graphs import Graphs, TorchCapture
from edgespec.models.cuda.kv import PagedCache, PagedPool, Tables
from edgespec.models.cuda.logits import DeviceLogits
from edgespec.models.cuda.memory import return_memory
from edgespec.models.cuda.weights import load_model
from edgespec.models.weights import WeightFile

WIDEST = 16  # tokens of a sequence in a captured step: what the small-M kernels take
_SEQUENCES = (1, 2, 4, 8, 16)  # a step over several sequences is captured for these
_WIDTHS = (1, 2, 4, 8, WIDEST)  # and for these widths; for one sequence every width has a graph of its own
PREFILL_PIECE = 256  # tokens of a longer part that run at once, kernel by kernel


class _Step(NamedTuple):
    """The static tensors of one shape of step: what is written before it, and what it leaves."""

    ids: Tensor
    starts: Tensor
    rows: Tensor


class _Checked(NamedTuple):
    """A part that may run: ids int64 [n], how many rows of logits, whether hidden states."""

    ids: npt.NDArray[np.int64]
    cache: PagedCache
    logits: int
    hidden: bool


class CudaDecoder:
    """A `Decoder` on a CUDA device; every step but those of a long prompt is one graph launch.

    keep_blocks: int4 and int8 weights stay as the file has them; the rest, and keys and values, are `dtype`. graphs:
    False runs kernel by kernel, as do devices without graphs. On the CPU (tests) kernels are their torch references.
    """

    def __init__(
        self,
        weights: WeightFile,
        *,
        device: str | torch.device = "cuda",
        dtype: torch.dtype | str | None = None,
        positions: int | None = None,
        keep_blocks: bool = True,
        graphs: bool = True,
    ) -> None:
        """Load all weights to `device`. dtype: None = float16 on CUDA, float32 on the CPU.

        Raises ConfigError for a device that is not there, ModelError for weights that cannot be read.
        """
        self.device = _there(device)
        if dtype is None:
            dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self.dtype: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.spec = weights.spec
        self.weight_format = "exact" if keep_blocks else str(self.dtype).removeprefix("torch.")
        self.positions = min(positions or self.spec.max_positions, self.spec.max_positions)
        self.keep_blocks = keep_blocks
        self.batch_slots = 1
        self.form: Hashable = None  # of its weights, see `slots.form_of`
        self.kept = False  # `close` leaves everything for the next draft's weights, until `free`
        self._lock = threading.Lock()
        self._closed = self._freed = False
        with torch.inference_mode():
            self.model = load_model(
                weights, self.device, self.dtype, keep_blocks=keep_blocks, positions=self.positions + WIDEST
            )
            self.pool = PagedPool(self.spec, self.device, self.dtype, positions=self.positions)
            self.tables = Tables(1, self.positions, self.pool, self.device)
        self.graphs = Graphs(TorchCapture(self.device) if graphs and self.device.type == "cuda" else None)
        self._steps: dict[tuple[int, int], _Step] = {}
        self._prepared: list[int] = []  # widths
        self._loops: dict[int, DraftLoop] = {}

    @property
    def nbytes(self) -> int:
        return 0 if self._closed else self.model.nbytes

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values of one position."""
        spec = self.spec
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize

    @property
    def growth(self) -> int:
        """What a graph's key needs beside its shape: nothing where kernels follow a table of addresses to all slabs.

        torch's references work slab by slab, so that another slab is another graph.
        """
        return 0 if ops.backend(self.device) == "triton" else len(self.pool.slabs)

    def prepare_steps(self, widths: Iterable[int]) -> None:
        """Capture steps of one sequence of these widths, and of the widest, which takes all that lie between.

        So no round has to capture any. Nothing where there are no graphs. Raises what the device raises when its memory
        is out.
        """
        with self._lock, torch.inference_mode():
            self._check_open()
            for width in sorted({*widths, WIDEST}) if self.graphs.enabled else ():
                if 1 <= width <= WIDEST and width not in self._prepared:
                    step = self._step(1, width)
                    for tensor in (step.ids, step.starts):
                        tensor.zero_()
                    step.rows.fill_(self.tables.empty)
                    self._run_step(step, width)
                    self._prepared.append(width)

    def prepare_guesses(self, real: int) -> None:
        """The same for a draft: its blocks (see `guess`), and how it reads what it missed."""
        self.prepare_steps((1, 2, MOST_PENDING))
        with self._lock, torch.inference_mode():
            self._check_open()
            if self.graphs.enabled and real not in self._loops:  # weights that were replaced need no other graphs
                self._loop(real).prepare()

    def new_cache(self, capacity: int | None = None) -> PagedCache:
        capacity = self.positions if capacity is None else min(capacity, self.positions)
        if capacity < 1:
            raise ValueError(f"a cache needs a capacity of at least 1, not {capacity}")
        self._check_open()
        return PagedCache(self, self.pool, capacity, self.position_bytes)

    def new_pool(
        self, nbytes: int, *, sequences: int = 8, context: int | None = None, most_bytes: int | None = None
    ) -> KVPool:
        """Memory for several sequences (see `Decoder.new_pool`)."""
        from edgespec.models.cuda.pools import new_pool

        context = min(context or self.positions, self.positions)
        return new_pool(self, self._lock, nbytes, sequences, context, most_bytes)

    def prepare_batch(self, slots: int) -> int:
        """Room for the tables of `slots` sequences; 0, the bytes are negligible."""
        if slots > _SEQUENCES[-1]:
            raise ModelError(f"{slots} sequences in one forward are too many; {_SEQUENCES[-1]} is the most")
        with self._lock, torch.inference_mode():
            prepared = list(self._prepared)
            if slots > self.batch_slots:
                self.tables = Tables(slots, self.positions, self.pool, self.device)
                self._forget_graphs()
                self.batch_slots = slots
        if prepared:
            self.prepare_steps(prepared)
        return 0

    def forward(
        self, tokens: Sequence[int], cache: KVCache, *, logits: int | None = None, hidden: bool = False
    ) -> ForwardOutput:
        return self.forward_batch([Part(tokens, cache, logits, hidden)])[0]

    def forward_batch(self, parts: Sequence[Part]) -> list[ForwardOutput]:
        with self._lock, torch.inference_mode():
            self._check_open()
            checked = self._checked(parts)
            for part in checked:
                part.cache.reserve(part.cache.length + len(part.ids))
            outputs: list[ForwardOutput | None] = [None] * len(checked)
            short = [place for place, part in enumerate(checked) if len(part.ids) <= WIDEST]
            for place, part in enumerate(checked):
                if place not in short:
                    outputs[place] = self._long(part)
            for at in range(0, len(short), self.batch_slots):
                places = short[at : at + self.batch_slots]
                for place, output in zip(places, self._short([checked[place] for place in places])):
                    # What the next step would overwrite is fetched before it runs.
                    outputs[place] = output if at + len(places) == len(short) else _fetched(output)
            for part in checked:  # last of all: what failed before leaves the caches as they were
                part.cache.length += len(part.ids)
            return [output for output in outputs if output is not None]

    def _checked(self, parts: Sequence[Part]) -> list[_Checked]:
        check_distinct(parts)
        checked = []
        for tokens, cache, logits, hidden in parts:
            if not isinstance(cache, PagedCache) or cache.owner is not self:
                raise ValueError("this cache belongs to another decoder")
            ids = np.asarray(tokens)
            if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
                raise ValueError("token ids must be a flat, non-empty sequence of integers")
            if ids.min() < 0 or ids.max() >= self.spec.vocab_size:
                raise ValueError(f"token ids must be in 0..{self.spec.vocab_size - 1}, got {ids.min()}..{ids.max()}")
            rows = len(ids) if logits is None else logits
            if not 0 <= rows <= len(ids):
                raise ValueError(f"asked for logits of the last {rows} of {len(ids)} tokens")
            checked.append(_Checked(ids.astype(np.int64), cache, rows, hidden))
        return checked

    def guess(
        self,
        pending: Sequence[int],
        cache: PagedCache,
        gamma: int,
        *,
        real: int,
        temperature: float = 0.0,
        uniforms: Sequence[float] = (),
    ) -> Guesses | None:
        """A draft's block, see `DraftLoop.guess`; the cache then holds `pending` and all guesses but one.

        real: ids from here on are no tokens. None if `pending` or the block is too long for the graphs.
        """
        with self._lock, torch.inference_mode():
            self._check_open()
            if len(pending) > MOST_PENDING or gamma > (MOST_DRAWN if temperature > 0 else MOST_GUESSES):
                return None
            loop = self._loop(real)
            cache.reserve(cache.length + len(pending) + gamma - 1)
            guesses = loop.guess(cache, pending, gamma, temperature=temperature, uniforms=uniforms)
            cache.length += len(pending) + gamma - 1
            return guesses

    def _loop(self, real: int) -> DraftLoop:
        if real not in self._loops:
            self._loops[real] = DraftLoop(self, real)
        return self._loops[real]

    def embed(self, ids: Sequence[int]) -> FloatArray:
        return self._looked_up(ids, lambda at: cuda_step.embed(self.model, at))

    def head_rows(self, ids: Sequence[int]) -> FloatArray:
        if self.spec.tie_embeddings:
            return self.embed(ids)
        return self._looked_up(ids, lambda at: cuda_step.weight_rows(self.model.head, at, self.dtype))

    def reopen(self) -> None:
        """Run again, with the weights that were put in place of the old ones."""
        self._closed = False

    def close(self) -> None:
        """Release weights, keys and values, and graphs; or, if `kept`, leave them for `reopen`. Further calls raise."""
        with self._lock:
            self._closed = True
        if not self.kept:
            self.free()

    def free(self) -> None:
        """Give everything back, also what a decoder that is `kept` still holds. Idempotent."""
        with self._lock:
            self._closed = True
            if self._freed:
                return
            self._freed = True
            self._forget_graphs()
            self.pool.close()
            del self.model, self.tables
        return_memory(self.device)

    def _forget_graphs(self) -> None:
        self.graphs.forget()
        self._steps.clear()
        self._loops.clear()
        self._prepared.clear()

    def trim(self) -> None:
        """Hand memory that is cached for later back to the device: somebody is short of it."""
        return_memory(self.device)

    def _long(self, part: _Checked) -> ForwardOutput:
        """A piece of a prompt, a few hundred tokens at a time, launched kernel by kernel: there the work hides it."""
        ids, start, total = part.ids, part.cache.length, len(part.ids)
        kept: list[Tensor] = []
        keep = total if part.hidden else part.logits
        row = self.tables.place([part.cache])
        blocks, distances = self.tables.blocks[row], self.tables.distances[row]
        for begin in range(0, total, PREFILL_PIECE):
            piece = torch.from_numpy(ids[begin : begin + PREFILL_PIECE]).to(self.device)
            starts = torch.tensor([start + begin], device=self.device)
            width = piece.shape[0]
            states = cuda_step.run(
                self.model, self.pool, piece, starts, blocks, distances, width, span=start + begin + width
            )
            kept.append(states[max(0, total - keep - begin) :])
        states = torch.cat(kept)
        rows = cuda_step.logits(self.model, states[len(states) - part.logits :])
        hidden = _to_numpy(states[len(states) - total :]) if part.hidden else None
        return ForwardOutput(_lazy(rows, cuda_step.best(rows)), hidden)

    def _short(self, parts: Sequence[_Checked]) -> list[ForwardOutput]:
        """Parts of at most `WIDEST` tokens in one captured step: filled up to the next shape there is a graph for."""
        widest = max(len(part.ids) for part in parts)
        sequences = next(count for count in _SEQUENCES if count >= len(parts))
        if sequences == 1:  # as narrow as there is a graph for; where none is prepared, a new one of that very width
            width = min((count for count in self._prepared if count >= widest), default=widest)
        else:
            width = next(count for count in _WIDTHS if count >= widest)
        step = self._step(sequences, width)
        self._fill(step, parts, width)
        states, rows, best = self._run_step(step, width)
        hidden = _to_numpy(states) if any(part.hidden for part in parts) else None
        outputs = []
        for index, part in enumerate(parts):
            end = index * width + len(part.ids)
            last = slice(end - part.logits, end)
            own = None if hidden is None or not part.hidden else hidden[index * width : end]
            outputs.append(ForwardOutput(_lazy(rows[last], best[last]), own))
        return outputs

    def _run_step(self, step: _Step, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Final hidden states, logits and best tokens of a step whose inputs are written."""

        def body() -> tuple[Tensor, Tensor, Tensor]:
            tables = self.tables
            blocks, distances = tables.blocks[step.rows], tables.distances[step.rows]
            states = cuda_step.run(self.model, self.pool, step.ids, step.starts, blocks, distances, width)
            rows = cuda_step.logits(self.model, states)
            return states, rows, cuda_step.best(rows)

        made: tuple[Tensor, Tensor, Tensor] = self.graphs.run((len(step.starts), width, self.growth), body)
        return made

    def _step(self, sequences: int, width: int) -> _Step:
        step = self._steps.get((sequences, width))
        if step is None:
            zeros = partial(torch.zeros, device=self.device, dtype=torch.int64)
            step = _Step(zeros(sequences * width), zeros(sequences), zeros(sequences))
            self._steps[sequences, width] = step
        return step

    def _fill(self, step: _Step, parts: Sequence[_Checked], width: int) -> None:
        """Write a step's inputs. Sequences that only fill the shape up write to the scratch block, from position 0."""
        count = len(step.starts)
        ids = np.zeros((count, width), np.int64)
        starts = np.zeros(count, np.int64)
        rows = np.full(count, self.tables.empty, np.int64)
        for index, (part, row) in enumerate(zip(parts, self.tables.place([part.cache for part in parts]))):
            ids[index, : len(part.ids)] = part.ids
            starts[index], rows[index] = part.cache.length, row
        for tensor, values in ((step.ids, ids.reshape(-1)), (step.starts, starts), (step.rows, rows)):
            tensor.copy_(torch.from_numpy(values), non_blocking=True)  # staged at once; nobody waits for the device

    def _looked_up(self, ids: Sequence[int], rows: Callable[[Tensor], Tensor]) -> FloatArray:
        at = np.asarray(ids, np.int64)
        if at.size and (at.min() < 0 or at.max() >= self.spec.vocab_size):
            raise ValueError(f"token ids must be in 0..{self.spec.vocab_size - 1}, got {at.min()}..{at.max()}")
        with self._lock, torch.inference_mode():
            self._check_open()
            return _to_numpy(rows(torch.from_numpy(at).to(self.device)))

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("the model has been closed; load it again")


def _there(device: str | torch.device) -> torch.device:
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device "cuda" was asked for, but torch finds no CUDA device here; use device "cpu"')
    return chosen


def _lazy(rows: Tensor, best: Tensor) -> FloatArray:
    """The rows as what callers index like an array."""
    return DeviceLogits(rows, best)  # type: ignore[return-value]


def _fetched(output: ForwardOutput) -> ForwardOutput:
    return ForwardOutput(np.array(output.logits), output.hidden)


def _to_numpy(tensor: Tensor) -> FloatArray:
    return tensor.float().cpu().numpy()
