"""Slots of standalone drafts on a CUDA device: weights are replaced in place, graphs stay.

A decoder whose draft goes is not taken apart; it waits for the next draft of the same architecture and form, whose
weights are copied over the old ones. So what was captured for one draft serves all of them, and device memory is never
returned and asked for again, which is how it fragments on a Jetson.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from edgespec.errors import ModelError
from edgespec.kernels.reference import Weight
from edgespec.kernels.weights import QuantisedTorch
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.staging import Event, Ring
from edgespec.models.cuda.weights import load_model
from edgespec.models.weights.opening import WeightFile

RING_BYTES = 8 << 20  # of a pinned buffer
RING_BUFFERS = 2  # one is filled while the other one is copied
_POLL_SECONDS = 0.001

Pause = Callable[[], None]


class Place(Protocol):
    """Where decoders take turns (a slot of the working set): it holds the one that was there last."""

    kept: Any


def form_of(weights: WeightFile, keep_blocks: bool) -> Hashable:
    """What two checkpoints must share for one to take the other's place, known from headers alone.

    Which ids end a text, and how long one may be, changes no tensor.
    """
    spec = replace(weights.spec, bos_token_id=None, eos_token_ids=(), max_positions=1)
    forms = ((name, weights.shape(name), str(weights.layout(name)) if keep_blocks else "") for name in weights.names())
    return spec, keep_blocks, tuple(sorted(forms))


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
    there: CudaDecoder | None = place.kept
    if there is not None:
        if (there.positions, there.form) == (positions, form_of(weights, there.keep_blocks)):
            with suppress(ModelError):  # headers do not tell everything, such as how wide scales are
                refill(there, weights, pause)
                there.reopen(weights.spec)
                return there
        place.kept = None
        there.free()
    made = build()
    made.form, made.kept = form_of(weights, made.keep_blocks), True
    place.kept = made
    return made


def refill(decoder: CudaDecoder, weights: WeightFile, pause: Pause = lambda: None) -> None:
    """Copy `weights` over the decoder's own, tensor by tensor, on a stream beside the one that decodes.

    The decoder must not run meanwhile. Returns when the copies are complete, not when they are submitted. Raises
    ModelError if a tensor has another form than the one it replaces.
    """
    copier = _Copier(decoder.device, pause)
    with torch.inference_mode(), copier:
        targets = _in_order(decoder)
        load_model(
            weights,
            decoder.device,
            decoder.dtype,
            keep_blocks=decoder.keep_blocks,
            positions=1,
            sink=lambda weight: copier.replace(next(targets, None), weight),
        )


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
    """Copies through a ring of pinned buffers on a side stream, behind what the thread's own stream has to do.

    At its end as a context no copy is under way, however it ends: the next load has another stream, and an old piece
    must not fall on a new one.
    """

    def __init__(self, device: torch.device, pause: Pause) -> None:
        self._pause = pause
        self._ring = Ring(device, RING_BYTES, RING_BUFFERS)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        if kind is None:
            self._ring.finish(self._await)
        else:  # two pieces at most: a matter of milliseconds
            self._ring.finish()

    def replace(self, target: Weight | None, source: Weight) -> Weight:
        olds, news = [] if target is None else _tensors(target), _tensors(source)
        if target is None or len(olds) != len(news):
            raise ModelError(f"a weight of {len(news)} tensors cannot take the place of one of {len(olds)}")
        for old, new in zip(olds, news):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise ModelError(
                    f"a weight of {new.dtype} {list(new.shape)} cannot take the place of {old.dtype} {list(old.shape)}"
                )
            self._copy(old, new)
        return target

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._pause()
        into, out = target.view(-1).view(torch.uint8), source.contiguous().view(-1).view(torch.uint8)
        for begin in range(0, out.numel(), RING_BYTES):
            piece = out[begin : begin + RING_BYTES]
            buffer = self._ring.next(self._await)[: piece.numel()]
            buffer.copy_(piece)
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                into[begin : begin + piece.numel()].copy_(buffer, non_blocking=True)
                self._ring.sent(self._stream)

    def _await(self, event: Event) -> None:
        """Polled, not waited for: this thread may be called off, and must not hold the driver's lock meanwhile."""
        while not event.query():
            self._pause()
            time.sleep(_POLL_SECONDS)


def _tensors(weight: Weight) -> list[Tensor]:
    return weight.tensors() if isinstance(weight, QuantisedTorch) else [weight]
