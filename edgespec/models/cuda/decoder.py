"""The CUDA engine: static tensors, one captured graph for each shape of step, results fetched when looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from edgespec.errors import ModelError
from edgespec.models.base import FloatArray, ForwardOutput, KVCache, KVPool, Part
from edgespec.models.batching import check_slots, ready_parts
from edgespec.models.checks import checked, closed, own_cache, positions_within, token_ids
from edgespec.models.cuda import step as cuda_step
from edgespec.models.cuda.copying import Copier, Pause, no_pause
from edgespec.models.cuda.devices import capture_on, device_named
from edgespec.models.cuda.draft import MOST_DRAWN, MOST_GUESSES, MOST_PENDING, DraftLoop, Guesses
from edgespec.models.cuda.graphs import Graphs
from edgespec.models.cuda.guesses import Continued, DeviceTokens
from edgespec.models.cuda.kv import BLOCK, MOVES_BYTES, PagedCache, PagedPool
from edgespec.models.cuda.logits import DeviceLogits, Judgement, as_array, judged
from edgespec.models.cuda.looks import Stopwatch, to_numpy
from edgespec.models.cuda.memory import out_of_memory, return_memory, suppress_out_of_memory
from edgespec.models.cuda.staging import Staging
from edgespec.models.cuda.steps import WIDEST, Checked, Steps
from edgespec.models.cuda.weights import load_model
from edgespec.models.spec import ModelSpec
from edgespec.models.weights.opening import WeightFile

PREFILL_PIECE = 256  # tokens of a longer part that run at once, kernel by kernel


def staging_bytes(positions: int) -> int:
    """Of one pinned buffer: it holds a row of the tables, what goes with a piece of a prompt, or moves of blocks."""
    return max(16 * (positions // BLOCK + 2), 8 * PREFILL_PIECE, MOVES_BYTES)


class CudaDecoder:
    """A `Decoder` on a CUDA device; every step but those of a long prompt is one graph launch.

    keep_blocks: int4 and int8 weights stay as the file has them; the rest, and keys and values, are `dtype`. graphs:
    False runs kernel by kernel, as do devices without graphs or without Triton. On the CPU (tests) kernels are their
    torch references.
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
        pause: Pause = no_pause,
    ) -> None:
        """Load all weights to `device`, beside what runs there. dtype: None = float16 on CUDA, float32 on the CPU.

        pause: called between two pieces of the weights; what it raises ends the load.
        Raises ConfigError for a device that is not there, ModelError for weights that cannot be read.
        """
        self.device = device_named(device)
        if dtype is None:
            dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self.dtype: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.spec = weights.spec
        self.weight_format = "exact" if keep_blocks else str(self.dtype).removeprefix("torch.")
        self.positions = positions_within(positions, self.spec.max_positions)
        self.keep_blocks = keep_blocks
        self.form: Hashable = None  # of its weights, see `slots.form_of`
        self.kept = False  # `close` leaves everything for the next draft's weights, until `free`
        self._lock = threading.Lock()
        self._closed = self._freed = False
        with torch.inference_mode():
            with Copier(self.device, pause) as copier:
                positions = self.positions + WIDEST
                self.model = load_model(
                    weights, self.device, self.dtype, keep_blocks=keep_blocks, positions=positions, sink=copier.place
                )
            self.pool = PagedPool(self.spec, self.device, self.dtype, positions=self.positions)
            self.staging = Staging(self.device, staging_bytes(self.positions))
            self.steps = Steps(self, 1)
        self.graphs = Graphs(capture_on(self.device) if graphs else None)
        self._compiled = False  # what graphs do not hold
        self._loops: dict[int, DraftLoop] = {}

    @property
    def batch_slots(self) -> int:
        return self.steps.slots

    @property
    def most_pending(self) -> int:
        """Tokens that `guess` takes before its first guess."""
        return MOST_PENDING

    @property
    def nbytes(self) -> int:
        return 0 if self._closed else self.model.nbytes

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values of one position."""
        return self.spec.position_bytes(self.dtype.itemsize)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the slabs of keys and values that are there now."""
        return 0 if self._closed else self.pool.nbytes

    def prepare_steps(self, widths: Iterable[int]) -> None:
        """Capture steps of one sequence of these widths, and of the widest, which takes all that lie between.

        So no round has to capture any. Nothing where there are no graphs. Raises what the device raises when its memory
        is out.
        """
        with self._lock, torch.inference_mode():
            self._check_open()
            self._prepare(widths)

    def _prepare(self, widths: Iterable[int]) -> None:
        if self.graphs.enabled:
            if not self._compiled:  # before it is needed
                self._try_long()
                self.steps.tables.carry([(self.pool.scratch, self.pool.scratch)])
                self._compiled = True
            self.steps.prepare(widths)

    def prepare_guesses(self, real: int, gammas: Iterable[int]) -> None:
        """The same for a draft: its blocks of these lengths (see `guess`), and how it reads what it missed."""
        self.prepare_steps((1, 2, MOST_PENDING))
        with self._lock, torch.inference_mode():
            self._check_open()
            if self.graphs.enabled:  # weights that were replaced need no other graphs
                self.steps.settle()
                self._loop(real).prepare(gammas)

    def new_cache(self, capacity: int | None = None) -> PagedCache:
        self._check_open()
        return PagedCache(self, self.pool, positions_within(capacity, self.positions), self.position_bytes)

    def new_pool(
        self, nbytes: int, *, sequences: int = 8, context: int | None = None, most_bytes: int | None = None
    ) -> KVPool:
        """Memory for several sequences (see `Decoder.new_pool`)."""
        from edgespec.models.cuda.pools import new_pool

        self._check_open()
        return new_pool(self, self._lock, nbytes, sequences, positions_within(context, self.positions), most_bytes)

    def prepare_batch(self, slots: int) -> int:
        """Room for `slots` sequences, and a graph for every shape of their steps, so that no round captures one.

        The bytes are those of tables and logits; what graphs work in is not known.
        """
        check_slots(slots)
        with self._lock, torch.inference_mode():
            if slots > self.batch_slots or slots == 1 < self.batch_slots:
                self._check_open()
                short = self._replace_steps(slots)
                if short is not None:
                    raise ModelError(f"there is no memory for steps of {slots} sequences: {short}") from short
            return 0 if self.batch_slots == 1 else self.steps.nbytes

    def _replace_steps(self, slots: int) -> MemoryError | None:
        """Steps of up to so many sequences, with their graphs; if memory runs out, steps of one, and why it did."""
        widths = self.steps.prepared
        self._forget_graphs()
        try:
            self.steps = Steps(self, slots)
            self._prepare(widths)
            return None
        except Exception as error:
            if not out_of_memory(error):
                raise
            short = MemoryError(str(error))  # the error itself may hold memory
        self._forget_graphs()
        return_memory(self.device)
        self.steps = Steps(self, 1)
        with suppress_out_of_memory():
            self._prepare(widths)
        return short

    def forward(
        self, tokens: Sequence[int], cache: KVCache, *, logits: int | None = None, hidden: bool = False
    ) -> ForwardOutput:
        return self.forward_batch([Part(tokens, cache, logits, hidden)])[0]

    def forward_batch(self, parts: Sequence[Part]) -> list[ForwardOutput]:
        with self._lock, torch.inference_mode():
            self._check_open()
            ready = ready_parts(parts, self._checked)
            outputs: list[ForwardOutput | None] = [None] * len(ready)
            short = [place for place, part in enumerate(ready) if len(part.ids) <= WIDEST]
            for place, part in enumerate(ready):
                if place not in short:
                    outputs[place] = self._long(part)
            for place, output in zip(short, self.steps.run([ready[place] for place in short])):
                outputs[place] = output
            for part in ready:  # last of all: what failed before leaves the caches as they were
                part.cache.length += len(part.ids)
            return [output for output in outputs if output is not None]

    def _checked(self, part: Part) -> Checked:
        guesses, tokens = _on_device(part.tokens, self.device)
        ids, cache, rows = checked(part._replace(tokens=tokens), PagedCache, self)
        return Checked(ids, cache, rows, part.hidden, guesses)

    def takes(self, guesses: object) -> bool:
        """Whether a part may end with these, of a draft's block, without a look at them before."""
        return isinstance(guesses, DeviceTokens) and guesses.device == self.device

    def stopwatch(self) -> Stopwatch:
        """That begins now, on the device."""
        return Stopwatch(self.device)

    def guess(
        self,
        pending: Sequence[int],
        cache: PagedCache,
        gamma: int,
        *,
        real: int,
        temperature: float = 0.0,
        uniforms: Sequence[float] = (),
        since: Stopwatch | None = None,
    ) -> Guesses | None:
        """A draft's block, see `DraftLoop.guess`; the cache then holds `pending` and all guesses but one.

        real: ids from here on are no tokens. since: a `stopwatch`, where what was read before is part of what the block
        takes. None if `pending` or the block is too long for the graphs. Nothing waits for the device: the guesses are
        `takes`n from there, or looked at. Raises as `forward`, and ValueError for a block of no guess.
        """
        with self._lock, torch.inference_mode():
            self._check_open()
            if len(pending) > MOST_PENDING or gamma > (MOST_DRAWN if temperature > 0 else MOST_GUESSES):
                return None
            if gamma < 1:
                raise ValueError(f"a block has 1 guess or more, not {gamma}")
            token_ids(pending, self.spec.vocab_size)  # on a GPU, what has no row ends the process's use of it
            loop, cache = self._loop(real), own_cache(cache, PagedCache, self)
            self.steps.settle()
            cache.reserve(cache.length + len(pending) + gamma - 1)
            guesses = loop.guess(cache, pending, gamma, temperature=temperature, uniforms=uniforms, since=since)
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

    def reopen(self, spec: ModelSpec) -> None:
        """Run again, with the weights that were put in place of the old ones; their `spec` has the same shapes."""
        self.spec = spec
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
            del self.model
        return_memory(self.device)

    def _forget_graphs(self) -> None:
        self.graphs.forget()
        self._loops.clear()

    def without_graphs(self, cause: str) -> None:
        """Run kernel by kernel from now on, and give back what captured steps took; the cause is in one warning."""
        with self._lock:
            self.graphs.give_up(cause)
            self._loops.clear()
        return_memory(self.device)

    def trim(self) -> None:
        """Move what sequences hold together, and hand slabs that are empty and cached memory back: it is short."""
        with self._lock:
            self.steps.tables.compact()
            self.pool.trim()
        return_memory(self.device)

    def _long(self, part: Checked) -> ForwardOutput:
        """A piece of a prompt, a few hundred tokens at a time, launched kernel by kernel: there the work hides it."""
        ids, start, total = part.ids, part.cache.length, len(part.ids)
        kept: list[Tensor] = []
        pieces: list[Tensor] = []
        watch = Stopwatch(self.device)
        keep = total if part.hidden else part.logits
        row = self.steps.tables.place([part.cache])[0]
        blocks, distances = self.steps.tables.blocks[row : row + 1], self.steps.tables.distances[row : row + 1]
        for begin in range(0, total, PREFILL_PIECE):
            piece = self.staging.placed(ids[begin : begin + PREFILL_PIECE])
            starts = self.staging.placed(np.array([start + begin]))
            width = piece.shape[0]
            states = cuda_step.run(
                self.model, self.pool, piece, starts, blocks, distances, width, span=start + begin + width
            )
            kept.append(states[max(0, total - keep - begin) :])
            pieces.append(piece)
        states = torch.cat(kept)
        rows = cuda_step.logits(self.model, states[len(states) - part.logits :], prompt=True)
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        found = judged(rows, torch.cat(pieces)[total - part.logits :], first, first + (part.logits - 1))
        watch.stop()
        hidden = to_numpy(states[len(states) - total :]) if part.hidden else None
        return ForwardOutput(as_array(DeviceLogits(rows, Judgement(found, watch))), hidden)

    def _try_long(self) -> None:
        """A short prompt that nobody asked for: kernels that only prompts take are compiled."""
        count = min(WIDEST + 1, self.positions)
        cache = self.new_cache(count)
        cache.reserve(count)
        self._long(Checked(np.zeros(count, np.int64), cache, 1, False))

    def _looked_up(self, ids: Sequence[int], rows: Callable[[Tensor], Tensor]) -> FloatArray:
        at = token_ids(ids, self.spec.vocab_size)
        with self._lock, torch.inference_mode():
            self._check_open()
            return to_numpy(rows(torch.from_numpy(at).to(self.device)))

    def _check_open(self) -> None:
        if self._closed:
            raise closed()


def _on_device(tokens: Sequence[int], device: torch.device) -> tuple[DeviceTokens | None, Sequence[int]]:
    """Guesses that a captured step takes from the device, and the tokens, with zeros in their places."""
    if not isinstance(tokens, Continued):
        return None, tokens
    known, guesses = tokens.known, tokens.guesses
    if guesses.device == device and len(tokens) <= WIDEST:
        return guesses, known + [0] * len(guesses)
    return None, known + [max(token, 0) for token in guesses.read()]  # a damaged one never stands
