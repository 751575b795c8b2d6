"""Weights on their way to a device, beside what decodes there: pinned buffers, and a stream of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor

from edgespec.errors import ModelError
from edgespec.kernels.reference import Weight
from edgespec.kernels.weights import QuantisedTorch
from edgespec.models.cuda.staging import Event, Ring
from edgespec.models.cuda.weights import Source, in_rows, tensors_of

RING_BYTES = 8 << 20  # of a pinned buffer
RING_BUFFERS = 2  # one is filled while the other one is copied
_POLL_SECONDS = 0.001

Pause = Callable[[], None]


def no_pause() -> None:
    """Where a load is not to be called off."""


class Copier:
    """Copies through a ring of pinned buffers on a side stream, behind what the thread's own stream has to do.

    At its end as a context no copy is under way, however it ends: the next load has another stream, and an old piece
    must not fall on a new one.
    """

    def __init__(self, device: torch.device, pause: Pause = no_pause) -> None:
        """pause: called between two pieces; what it raises ends the load."""
        self._device = device
        self._pause = pause
        self._ring = Ring(device, RING_BYTES, RING_BUFFERS)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __enter__(self) -> Copier:
        self._follow()
        return self

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        if kind is None:
            self._ring.finish(self._await)
        else:  # two pieces at most: a matter of milliseconds
            self._ring.finish()

    def place(self, source: Source) -> Weight:
        """The weight in new memory of the device."""
        pieces = iter(source.pieces)
        first = next(pieces)
        if isinstance(first, QuantisedTorch):
            made: Weight = first.unset(source.rows, self._device)
        else:
            made = torch.empty((source.rows, *first.shape[1:]), dtype=first.dtype, device=self._device)
        self._follow()  # others may have given that memory back a moment ago, and their work on it is still under way
        return self.replace(made, Source(source.rows, chain((first,), pieces)))

    def replace(self, target: Weight | None, source: Source) -> Weight:
        """The weight over `target`. Raises ModelError if that has another form."""
        if target is None or target.shape[0] != source.rows:
            there = 0 if target is None else target.shape[0]
            raise ModelError(f"a weight of {source.rows} rows cannot take the place of one of {there}")
        for rows, piece in in_rows(target, source.pieces):
            olds, news = tensors_of(rows), tensors_of(piece)
            was, now = ([(each.dtype, list(each.shape)) for each in tensors] for tensors in (olds, news))
            if was != now:
                raise ModelError(f"a weight of {now} cannot take the place of one of {was}")
            for old, new in zip(olds, news):
                self._copy(old, new)
        return target

    def _follow(self) -> None:
        """Copies from now on come after all that the thread's own stream was given before."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

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
