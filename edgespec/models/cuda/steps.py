"""Steps of up to 16 tokens of one sequence or several: a graph for each shape, and the static tensors around it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgespec.models.base import ForwardOutput
from edgespec.models.batching import SLOTS
from edgespec.models.checks import Ids
from edgespec.models.cuda import step as cuda_step
from edgespec.models.cuda.graphs import Body
from edgespec.models.cuda.guesses import DeviceTokens
from edgespec.models.cuda.kv import PagedCache, Tables
from edgespec.models.cuda.logits import DeviceLogits, Judgement, as_array, judged
from edgespec.models.cuda.looks import Stopwatch, to_numpy

if TYPE_CHECKING:
    from edgespec.models.cuda.decoder import CudaDecoder

WIDEST = 16  # tokens of a sequence in a captured step
_WIDTHS = (1, 2, 4, 8, WIDEST)  # of steps over several sequences (`SLOTS`); of one, every width has a graph of its own
# Rows of a step. From here on a second step costs little more: kernels take 16 rows at a time, and arithmetic, not
# memory, sets their pace. And rows of logits are what takes memory.
MOST_ROWS = 64


def logits_rows(slots: int) -> int:
    """Rows of logits that steps of up to `slots` sequences leave."""
    return min(slots * WIDEST, MOST_ROWS)


def _key(sequences: int, width: int) -> Hashable:
    """Of the graph of steps of this shape."""
    return "step", sequences, width


class Checked(NamedTuple):
    """A part that may run: ids int64 [n], how many rows of logits, whether hidden states.

    guesses: the last ids, taken from the device; what stands in their places in `ids` says nothing.
    """

    ids: Ids
    cache: PagedCache
    logits: int
    hidden: bool
    guesses: DeviceTokens | None = None


class _Inputs(NamedTuple):
    """What is written before a step of one shape, all views of `whole`.

    rows: of the tables. begins, ends: the first and the last row of logits that count, by sequence.
    """

    whole: Tensor
    ids: Tensor
    starts: Tensor
    rows: Tensor
    begins: Tensor
    ends: Tensor


class Steps:
    """The steps of one decoder, whose lock the caller holds."""

    def __init__(self, decoder: CudaDecoder, slots: int) -> None:
        """Static tensors for steps of up to `slots` sequences."""
        self._decoder = decoder
        self.slots = slots
        self.tables = Tables(slots, decoder.positions, decoder.pool, decoder.device, decoder.staging)
        # All steps leave their logits here. As wide as the product is: float32 would say no more.
        rows, columns = logits_rows(slots), sum(part.shape[0] for part in decoder.model.head.parts)
        self._logits = torch.zeros((rows, columns), device=decoder.device, dtype=decoder.dtype)
        self._inputs: dict[tuple[int, int], _Inputs] = {}
        self.prepared: list[int] = []  # widths of one sequence
        self._handed: list[weakref.ref[DeviceLogits]] = []  # of the step before: others may still hold them

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes + self._logits.nbytes

    def prepare(self, widths: Iterable[int]) -> None:
        """Capture steps of one sequence of these widths and, if there are any, of the widest; all of several ones.

        What is captured stays so. What the device raises when its memory is out is passed on; the next call goes on.
        """
        graphs = self._decoder.graphs
        known = {width for width in widths if 1 <= width <= WIDEST}
        wanted = [(1, width) for width in sorted(known | {WIDEST} if known else known)]
        several = [count for count in SLOTS if 1 < count <= self.slots]
        wanted += [(count, width) for count in several for width in _WIDTHS if count * width <= MOST_ROWS]
        self.prepared = [width for width in self.prepared if _key(1, width) in graphs]
        for count, width in wanted:
            if _key(count, width) not in graphs:
                inputs = self._inputs_of(count, width)
                inputs.whole.zero_()
                inputs.rows.fill_(self.tables.empty)
                self.settle()
                if not graphs.prepare(_key(count, width), self._body(inputs, width)):
                    return  # graphs were given up
            if count == 1 and width not in self.prepared:
                self.prepared.append(width)

    def run(self, parts: Sequence[Checked]) -> list[ForwardOutput]:
        """Outputs of parts of at most `WIDEST` tokens. Logits stay on the device; the next step keeps them first."""
        outputs: dict[int, ForwardOutput] = {}
        for places in self._groups([len(part.ids) for part in parts]):
            outputs.update(zip(places, self._together([parts[place] for place in places])))
        return [outputs[place] for place in range(len(parts))]

    def settle(self) -> None:
        """To be called before anything is replayed: that may write over the logits of the step before."""
        for handed in self._handed:
            logits = handed()
            if logits is not None:
                logits.keep()
        self._handed.clear()

    def _groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Places of parts that run in one step; the longest together, since each takes the width of the longest."""
        left = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        while left:
            width = next(count for count in _WIDTHS if count >= lengths[left[0]])
            most = min(self.slots, MOST_ROWS // width)
            yield left[:most]
            left = left[most:]

    def _together(self, parts: Sequence[Checked]) -> list[ForwardOutput]:
        """One step, filled up to the next shape there is a graph for."""
        widest = max(len(part.ids) for part in parts)
        sequences = next(count for count in SLOTS if count >= len(parts))
        if sequences == 1:  # as narrow as there is a graph for; where none is prepared, a new one of that very width
            prepared = self.prepared if self._decoder.graphs.enabled else ()
            width = min((count for count in prepared if count >= widest), default=widest)
        else:
            width = next(count for count in _WIDTHS if count >= widest)
        inputs = self._inputs_of(sequences, width)
        self._fill(inputs, parts, width)
        watch = Stopwatch(self._decoder.device)
        states, rows, found = self._run(inputs, width)
        watch.stop()
        judgement = Judgement(found, watch)
        hidden = to_numpy(states) if any(part.hidden for part in parts) else None
        outputs = []
        for index, part in enumerate(parts):
            end = index * width + len(part.ids)
            last = slice(end - part.logits, end)
            own = None if hidden is None or not part.hidden else hidden[index * width : end]
            begin = len(part.ids) - part.logits
            guesses = part.guesses if part.guesses is not None and part.logits == len(part.guesses) + 1 else None
            logits = DeviceLogits(rows[last], judgement, sequence=index, begin=begin, guesses=guesses)
            self._handed.append(weakref.ref(logits))
            outputs.append(ForwardOutput(as_array(logits), own))
        return outputs

    def _run(self, inputs: _Inputs, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Final hidden states, logits and what is found out about them, of a step whose inputs are written."""
        self.settle()
        key = _key(len(inputs.starts), width)
        made: tuple[Tensor, Tensor, Tensor] = self._decoder.graphs.run(key, self._body(inputs, width))
        return made

    def _body(self, inputs: _Inputs, width: int) -> Body:
        decoder, tables = self._decoder, self.tables

        def body() -> tuple[Tensor, Tensor, Tensor]:
            blocks, distances = tables.blocks[inputs.rows], tables.distances[inputs.rows]
            ids = inputs.ids.clamp(0, decoder.spec.vocab_size - 1)  # a damaged guess (-1) must not reach the embedding
            states = cuda_step.run(decoder.model, decoder.pool, ids, inputs.starts, blocks, distances, width)
            rows = self._logits[: len(states)].copy_(cuda_step.product(states, decoder.model.head))
            return states, rows, judged(rows, inputs.ids, inputs.begins, inputs.ends)

        return body

    def _inputs_of(self, sequences: int, width: int) -> _Inputs:
        inputs = self._inputs.get((sequences, width))
        if inputs is None:
            whole = torch.zeros(sequences * (width + 4), device=self._decoder.device, dtype=torch.int64)
            inputs = _Inputs(whole, *whole.split((sequences * width, *[sequences] * 4)))
            self._inputs[sequences, width] = inputs
        return inputs

    def _fill(self, inputs: _Inputs, parts: Sequence[Checked], width: int) -> None:
        """Sequences that only fill the shape up write to the scratch block, from position 0."""
        count = len(inputs.starts)
        ids = np.zeros((count, width), np.int64)
        starts, begins, ends = (np.zeros(count, np.int64) for _ in range(3))
        rows = np.full(count, self.tables.empty, np.int64)
        for index, (part, row) in enumerate(zip(parts, self.tables.place([part.cache for part in parts]))):
            ids[index, : len(part.ids)] = part.ids
            starts[index], rows[index] = part.cache.length, row
            begins[index], ends[index] = len(part.ids) - part.logits, len(part.ids) - 1
        self._decoder.staging.write(inputs.whole, np.concatenate((ids.reshape(-1), starts, rows, begins, ends)))
        for index, part in enumerate(parts):
            if part.guesses is not None:
                end = index * width + len(part.ids)
                inputs.ids[end - len(part.guesses) : end].copy_(part.guesses.ids)
