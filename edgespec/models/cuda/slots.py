"""Slots of standalone drafts on a CUDA device: weights are replaced in place, graphs stay.

A decoder whose draft goes is not taken apart; it waits for the next draft of the same architecture and form, whose
weights are copied over the old ones. So what was captured for one draft serves all of them, and device memory is never
returned and asked for again, which is how it fragments on a Jetson.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from edgespec.errors import ModelError
from edgespec.kernels.reference import Weight
from edgespec.kernels.weights import QuantisedTorch
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.weights import load_model
from edgespec.models.weights import WeightFile

RING_BYTES = 8 << 20  # of a pinned buffer; there are two: one is filled while the other one is copied
_POLL_SECONDS = 0.001

Pause = Callable[[], None]


class Place(Protocol):
    """Where decoders take turns (a slot of the working set): it holds the one that was there last."""

    kept: Any


def form_of(weights: WeightFile, keep_blocks: bool) -> Hashable:
    """What two checkpoints must share for one to take the other's place, known from headers alone."""
    kinds = tuple((name, weights.shape(name), weights.kind(name) if keep_blocks else "") for name in weights.names())
    return weights.spec, keep_blocks, tuple(sorted(kinds))


def load_into(
    place: Place,
    weights: WeightFile,
    positions: int,
    build: Callable[[], CudaDecoder],
    pause: Pause = lambda: None,
) -> CudaDecoder:
    """A decoder with these weights for texts of `positions`: the one that `place` keeps, refilled, or a new one.

    The one that is there is refilled if it has the same form, else it is freed first: a slot never holds two. `place`
    keeps what is returned; closing that only ends its use. pause: called between two pieces; what it raises ends the
    load, and the slot may be filled again.
    """
    there = place.kept
    if there is not None and (there.positions, there.form) != (positions, form_of(weights, there.keep_blocks)):
        place.kept = None
        there.free()
        there = None
    if there is None:
        made = build()
        made.form, made.kept = form_of(weights, made.keep_blocks), True
        place.kept = made
        return made
    refill(there, weights, pause)
    there.reopen()
    return there  # type: ignore[no-any-return]


def refill(decoder: CudaDecoder, weights: WeightFile, pause: Pause = lambda: None) -> None:
    """Copy `weights` over the decoder's own, tensor by tensor, on a stream beside the one that decodes.

    The decoder must not run meanwhile. Returns when the copies are complete, not when they are submitted. Raises
    ModelError if a tensor has another form than the one it replaces.
    """
    copier = _Copier(decoder.device, pause)
    with torch.inference_mode():
        targets = _in_order(decoder)
        load_model(
            weights,
            decoder.device,
            decoder.dtype,
            keep_blocks=decoder.keep_blocks,
            positions=1,
            sink=lambda weight: copier.replace(next(targets), weight),
        )
        copier.finish()


def _in_order(decoder: CudaDecoder) -> Iterator[Weight]:
    """The decoder's weights in the order in which they are read."""
    model = decoder.model
    yield model.embedding
    for layer in model.layers:
        if layer.head_norms is not None:
            yield from layer.head_norms
        yield layer.input_norm
        yield from layer.qkv.weights()
        yield from layer.output.weights()
        yield layer.mlp_norm
        yield from layer.gate_up.weights()
        yield from layer.down.weights()
    yield model.norm
    if not model.spec.tie_embeddings:
        yield from model.head.weights()


class _Copier:
    """Copies through a ring of pinned buffers on a side stream; on the CPU, directly."""

    def __init__(self, device: torch.device, pause: Pause) -> None:
        self._device = device
        self._pause = pause
        self._ring: list[Tensor] = []
        self._done: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None
        self._turn = 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._ring = [torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._done = [torch.cuda.Event() for _ in range(2)]

    def replace(self, target: Weight, source: Weight) -> Weight:
        for old, new in zip(_tensors(target), _tensors(source), strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise ModelError(
                    f"a weight of {new.dtype} {list(new.shape)} cannot take the place of {old.dtype} {list(old.shape)}"
                )
            self._copy(old, new)
        return target

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._pause()
        if self._stream is None:
            target.copy_(source)
            return
        into, out = target.view(-1).view(torch.uint8), source.contiguous().view(-1).view(torch.uint8)
        for begin in range(0, out.numel(), RING_BYTES):
            piece = out[begin : begin + RING_BYTES]
            buffer, done = self._ring[self._turn], self._done[self._turn]
            self._await(done)
            buffer[: piece.numel()].copy_(piece)
            with torch.cuda.stream(self._stream):
                into[begin : begin + piece.numel()].copy_(buffer[: piece.numel()], non_blocking=True)
                done.record(self._stream)
            self._turn = 1 - self._turn

    def _await(self, event: torch.cuda.Event) -> None:
        """Polled, not waited for: this thread may be called off, and must not hold the driver's lock meanwhile."""
        while not event.query():
            self._pause()
            time.sleep(_POLL_SECONDS)

    def finish(self) -> None:
        for event in self._done:
            self._await(event)


def _tensors(weight: Weight) -> list[Tensor]:
    return weight.tensors() if isinstance(weight, QuantisedTorch) else [weight]
