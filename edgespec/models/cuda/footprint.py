"""What the CUDA engine takes in memory: the sizes of its parts, as these parts say them."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.kernels import paged, reference
from edgespec.models.cuda.copying import RING_BUFFERS, RING_BYTES
from edgespec.models.cuda.decoder import PREFILL_PIECE, staging_bytes
from edgespec.models.cuda.draft import MOST_DRAWN
from edgespec.models.cuda.kv import held_positions, table_shape
from edgespec.models.cuda.staging import BUFFERS
from edgespec.models.cuda.steps import WIDEST, logits_rows
from edgespec.models.footprint import CUDA_CONTEXT, CUDA_PROCESS, Footprint
from edgespec.models.spec import ModelSpec

# What the driver keeps of the captured graphs of one decoder. Assumed, from what vLLM reports of its own on an Orin
# Nano: 0.01 GiB (docs/jetson.md).
_GRAPHS = 10 << 20
_SMALL = 64 << 10  # counters, inputs of each shape of step, a block of guesses: a few KB, each rounded up by torch
_CHUNK = 256  # positions of a part of attention: the least that `tuning.toml` has for any device


@dataclass(frozen=True)
class CudaFootprint(Footprint):
    """itemsize: bytes of a number of the keys and values, and of activations. unified: see `footprint`.

    plain: kernels run in plain torch, which takes more. reading: bytes of the host's memory that reading the weights
    takes beside them (`cuda.weights.host_bytes`).
    """

    spec: ModelSpec
    itemsize: int
    unified: bool
    plain: bool = False
    reading: int = 0

    def held(self, positions: int) -> int:
        return held_positions(positions)

    def before(self) -> dict[str, int]:
        if self.unified:
            return {"CUDA, torch and Python (assumed)": CUDA_PROCESS}
        return {"CUDA context (assumed)": CUDA_CONTEXT}

    def beside(self, positions: int) -> dict[str, int]:
        workspace = self._steps(positions) + self._prompt(positions)
        graphs = {} if self.plain else {"CUDA graphs (assumed)": self._graphs(positions)}
        if not self.unified:
            return {"workspace": workspace, **graphs}
        # What a prompt needs is free while the weights are read.
        return {"workspace": max(workspace, self.reading), **graphs, "pinned buffers": self.pinned(positions)}

    def slot(self, positions: int) -> int:
        laws = 4 * MOST_DRAWN * self.spec.vocab_size
        host = BUFFERS * staging_bytes(positions) + self.reading if self.unified else 0
        parts = self._steps(positions) + self._prompt(positions) + self._graphs(positions) + laws
        return super().slot(positions) + parts + host

    def pinned(self, positions: int) -> int:
        """Of the target, and of the one load that may be under way."""
        return BUFFERS * staging_bytes(positions) + RING_BUFFERS * RING_BYTES

    def _steps(self, positions: int) -> int:
        """The tensors that stay where they are: rotary tables, tables of blocks, logits (and a copy that is kept)."""
        rows, width, entries = table_shape(1, positions)
        rotary = 4 * (positions + WIDEST) * self.spec.head_dim
        return rotary + 8 * rows * width * entries + 2 * self._logits() + _SMALL

    def _logits(self) -> int:
        return logits_rows(1) * self.spec.vocab_size * self.itemsize

    def _prompt(self, positions: int) -> int:
        """A piece of a prompt under way, and the states of all pieces, once apart and once as one."""
        states = 2 * positions * self.spec.hidden_size * self.itemsize
        return PREFILL_PIECE * self._row() + states + (self._references(positions) if self.plain else 0)

    def _graphs(self, positions: int) -> int:
        """What the widest captured step works in; all graphs share that. Without Triton nothing is captured."""
        if self.plain:
            return 0
        # Of attention, each part of the context before they are joined, in float32.
        parts = 4 * -(-self.held(positions) // _CHUNK) * WIDEST * self.spec.num_heads * (self.spec.head_dim + 2)
        return _GRAPHS + WIDEST * self._row() + 2 * self._logits() + parts

    def _references(self, positions: int) -> int:
        """What torch works in where Triton cannot run: a tile of a matrix, one layer's keys and values, scores."""
        heads = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        attention = paged.attention_bytes(PREFILL_PIECE, self.held(positions), *heads, self.itemsize)
        return reference.TILE_BYTES + attention + 2 * self._logits()

    def _row(self) -> int:
        """Bytes of the activations of one token within a layer, at most: some of them are float32."""
        spec = self.spec
        attention = 4 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        return 4 * (6 * spec.hidden_size + attention + 4 * spec.intermediate_size)
