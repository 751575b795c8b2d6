"""Shapes of steps, and how numbers get to the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.errors import ModelError
from edgespec.models.base import Part
from edgespec.models.cuda import staging
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.slots import refill
from edgespec.models.cuda.staging import Staging
from edgespec.models.cuda.steps import MOST_ROWS
from edgespec.models.weights.opening import open_weights
from tests.models.cuda.common import TOKENS, load
from tests.models.cuda.scripted_capture import ScriptedCapture


def captures(decoder: CudaDecoder) -> ScriptedCapture:
    return decoder.graphs._capture  # type: ignore[return-value]


def test_no_batch_captures(folders: list[Path]) -> None:
    """Every number of sequences and width, also of mixed ones, has its graph before the first round; and is right."""
    decoder, alone = load(folders[0]), load(folders[0], graphs=False)
    for cache in [decoder.new_cache() for _ in range(3)]:  # torch's references would have graphs for each new slab
        cache.reserve(cache.capacity)
    del cache
    decoder.prepare_steps([1, 2])
    taken = decoder.prepare_batch(8)
    assert taken >= MOST_ROWS * decoder.spec.vocab_size * 4
    made = captures(decoder).made
    assert decoder.prepare_batch(4) == taken  # what takes eight takes four
    for widths in ([1], [1, 1], [3, 3, 1], [4] * 5, [16] * 8, [16, *[1] * 7], [5, 9, 2, 16, 30, 1]):
        caches = [decoder.new_cache(40) for _ in widths]
        parts = [Part(TOKENS[at : at + width], cache) for at, (width, cache) in enumerate(zip(widths, caches))]
        for part, output in zip(parts, decoder.forward_batch(parts)):
            wanted = alone.forward(part.tokens, alone.new_cache(40))
            assert np.allclose(np.array(output.logits), np.array(wanted.logits), rtol=1e-4, atol=1e-4)
        assert [cache.length for cache in caches] == widths
    assert captures(decoder).made == made
    assert decoder.prepare_batch(1) == 0
    assert decoder.batch_slots == 1
    decoder.forward([1, 2], decoder.new_cache(10))
    assert captures(decoder).made == made + 3  # widths 1, 2 and the widest were prepared again


def test_without_memory_for_batches_sequences_run_alone(folders: list[Path]) -> None:
    decoder = load(folders[0], graphs=False)
    decoder.graphs._capture = ScriptedCapture(RuntimeError("CUDA error: out of memory"))
    with pytest.raises(ModelError, match="no memory for steps of 4"):
        decoder.prepare_batch(4)
    assert decoder.batch_slots == 1
    decoder.graphs._capture = None
    outputs = decoder.forward_batch([Part([token], decoder.new_cache(9)) for token in (3, 4)])
    assert not np.array_equal(np.array(outputs[0].logits), np.array(outputs[1].logits))
    decoder.close()
    assert decoder.prepare_batch(1) == 0
    with pytest.raises(ModelError, match="closed"):
        decoder.prepare_batch(2)


# Staging


class Events:
    """A device that has read nothing until it is waited for, and notes what was written meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        self.pending = 0
        owner = self

        class Event:
            def __init__(self) -> None:
                self.open = False

            def record(self, stream: Any = None) -> None:
                assert not self.open, "a buffer was written before the device had read it"
                self.open = True
                owner.pending += 1

            def query(self) -> bool:
                self.synchronize()
                return True

            def synchronize(self) -> None:
                if self.open:
                    self.open = False
                    owner.pending -= 1
                    owner.waits += 1

        monkeypatch.setattr(staging, "make_event", lambda _device: Event())


def test_a_buffer_is_written_again_when_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(monkeypatch)
    stage = Staging(torch.device("cpu"), 64)
    target = torch.zeros(2, 2, dtype=torch.int64)
    for turn in range(40):
        stage.write(target, np.array([turn, 1, 2, 3]))
        assert target.tolist() == [[turn, 1], [2, 3]]
        assert events.waits == max(0, turn + 1 - 16)  # it may be 16 copies behind
    numbers = torch.zeros(3, dtype=torch.float64)
    stage.write(numbers, np.array([0.5, 0.25, 0.125]))
    assert numbers.tolist() == [0.5, 0.25, 0.125]
    assert stage.placed(np.array([7])).tolist() == [7]


def test_steps_and_blocks_begin_with_few_copies_and_no_wait(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From pinned memory: a step one copy, a block of guesses one (two where tokens are drawn), a new block one."""
    decoder = load(folders[0])
    cache = decoder.new_cache(60)
    decoder.forward(TOKENS[:10], cache)
    decoder.guess([1], cache, 2, real=280)
    writes = []
    write = Staging.write

    def watched(self: Staging, target: torch.Tensor, values: Any) -> None:
        writes.append(values.size)
        write(self, target, values)

    monkeypatch.setattr(Staging, "write", watched)
    monkeypatch.setattr(torch, "from_numpy", lambda _array: pytest.fail("memory that is not pinned"))
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("memory that is not pinned"))
    decoder.forward([4], cache)
    assert len(writes) == 1
    decoder.guess([1, 2], cache, 5, real=280)
    assert len(writes) == 2
    decoder.guess([1, 2], cache, 5, real=280, temperature=0.5, uniforms=[0.5] * 5)
    assert len(writes) == 4
    decoder.forward(TOKENS[:20], cache)
    assert len(writes) == 6  # ids and start of a prompt's piece


@pytest.mark.parametrize("called_off", [True, False])
def test_a_load_leaves_no_copy_under_way(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, called_off: bool
) -> None:
    """Else an old piece could fall on the next load's, which has a stream of its own."""
    decoder, events = load(folders[0]), Events(monkeypatch)
    turns = iter(range(1000))

    def pause() -> None:
        if called_off and next(turns) >= 5:
            raise InterruptedError

    with open_weights(folders[1]) as weights:
        if called_off:
            with pytest.raises(InterruptedError):
                refill(decoder, weights, pause)
        else:
            refill(decoder, weights, pause)
    assert events.waits > 0
    assert events.pending == 0
