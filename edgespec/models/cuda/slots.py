"""Slots of standalone drafts on a CUDA device: weights are replaced in place, graphs stay.

A decoder whose draft goes is not taken apart; it waits for the next draft of the same architecture and form, whose
weights are copied over the old ones. So what was captured for one draft serves all of them, and device memory is never
returned and asked for again, which is how it fragments on a Jetson.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch

from edgespec.errors import ModelError
from edgespec.kernels.reference import Weight
from edgespec.models.cuda.copying import Copier, Pause, no_pause
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.weights import load_model
from edgespec.models.weights.opening import WeightFile


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
    pause: Pause = no_pause,
) -> CudaDecoder:
    """A decoder with these weights for texts of `positions`: the one that `place` keeps, refilled, or a new one.

    The one that is there is refilled if it has the same form, else it is freed first: a slot never holds two. `place`
    keeps what is returned; closing that only ends its use. pause: called between two pieces (`build` may know
    it too); what it raises ends the load, and the slot may be filled again.
    """
    there: CudaDecoder | None = place.kept
    if there is not None:
        if (there.positions, there.form) == (positions, form_of(weights, there.keep_blocks)):
            with suppress(ModelError):  # headers do not tell all: zero points may turn out to be all the middle
                refill(there, weights, pause)
                there.reopen(weights.spec)
                return there
        place.kept = None
        there.free()
    made = build()
    made.form, made.kept = form_of(weights, made.keep_blocks), True
    place.kept = made
    return made


def refill(decoder: CudaDecoder, weights: WeightFile, pause: Pause = no_pause) -> None:
    """Copy `weights` over the decoder's own, tensor by tensor, on a stream beside the one that decodes.

    The decoder must not run meanwhile. Returns when the copies are complete, not when they are submitted. Raises
    ModelError if a tensor has another form than the one it replaces.
    """
    with torch.inference_mode(), Copier(decoder.device, pause) as copier:
        targets = _in_order(decoder)
        load_model(
            weights,
            decoder.device,
            decoder.dtype,
            keep_blocks=decoder.keep_blocks,
            positions=1,
            sink=lambda source: copier.replace(next(targets, None), source),
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
