"""Slots whose weights are replaced in place, and running out of memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from drafts.base import LoadCancelled
from drafts.standalone import Checkpoint, StandaloneDraft
from edgespec.config import RuntimeConfig
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.errors import ModelError
from edgespec.loading import prepare_steps
from edgespec.memory.slots import MemorySlot
from edgespec.memory.working_set import WorkingSet
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.memory import out_of_memory
from edgespec.models.cuda.slots import form_of, load_into, refill
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from edgespec.models.weights.quantised import Layout, Mode
from predictor.planner import FixedPlanner
from tests.models.cuda.common import TOKENS, answer, load
from tests.models.cuda.scripted_capture import ScriptedCapture
from tests.support.tiny import write_tiny

# Slots


def fill(slot: MemorySlot, folder: Path, pause: Callable[[], None] = lambda: None, build: bool = True) -> CudaDecoder:
    with open_weights(folder) as weights:
        anew = (lambda: load(folder)) if build else (lambda: pytest.fail("a new decoder was built"))
        return load_into(slot, weights, weights.spec.max_positions, anew, pause)


def same_logits(decoder: CudaDecoder, folder: Path) -> bool:
    fresh = load(folder)
    rows = [np.array(each.forward(TOKENS[:4], each.new_cache()).logits) for each in (decoder, fresh)]
    return np.array_equal(*rows)


def test_a_slot_takes_the_next_draft_of_its_form(folders: list[Path]) -> None:
    slot = MemorySlot(0, 0)
    first = fill(slot, folders[0])
    assert same_logits(first, folders[0])
    addresses = [tensor.data_ptr() for tensor in first.model.tensors()]
    first.close()
    with pytest.raises(ModelError, match="closed"):
        first.forward([1], first.new_cache())
    second = fill(slot, folders[1], build=False)
    assert second is first
    assert [tensor.data_ptr() for tensor in second.model.tensors()] == addresses
    assert same_logits(second, folders[1])
    assert not same_logits(second, folders[0])
    assert second.graphs._capture.made == 1  # the graph of the first draft served the second one  # type: ignore
    second.close()
    slot.give_up_pages()  # memory is short: an idle decoder is what the slot takes
    assert slot.kept is None
    assert not hasattr(second, "model")
    second.free()


def test_a_load_that_is_called_off_leaves_the_slot_for_another(folders: list[Path]) -> None:
    slot = MemorySlot(0, 0)
    fill(slot, folders[0]).close()
    calls = iter(range(100))

    def pause() -> None:
        if next(calls) == 5:
            raise LoadCancelled

    with pytest.raises(LoadCancelled):
        fill(slot, folders[1], pause, build=False)
    with pytest.raises(ModelError, match="closed"):
        slot.kept.forward([1], None)  # type: ignore[union-attr]
    assert same_logits(fill(slot, folders[1], build=False), folders[1])


def test_ids_that_end_a_text_are_the_new_drafts_own(folders: list[Path], tmp_path: Path) -> None:
    slot = MemorySlot(0, 0)
    other = write_tiny(tmp_path / "other", "llama", seed=1, eos_token_id=7)
    fill(slot, folders[0]).close()
    decoder = fill(slot, other, build=False)
    assert decoder.spec.eos_token_ids == (7,)
    assert same_logits(decoder, other)


def test_what_headers_did_not_tell_costs_a_new_decoder(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    slot = MemorySlot(0, 0)
    first = fill(slot, folders[0])
    first.close()
    norm = first.model.norm
    object.__setattr__(first.model, "norm", norm.double())
    assert fill(slot, folders[1]) is not first
    assert slot.kept is not first
    assert not hasattr(first, "model")


def test_another_form_takes_the_place_of_what_was_there(folders: list[Path], tmp_path: Path) -> None:
    slot = MemorySlot(0, 0)
    other = write_tiny(tmp_path / "other", "llama", intermediate_size=96)
    first = fill(slot, folders[0])
    first.close()
    decoder = fill(slot, other)
    assert decoder.spec.intermediate_size == 96
    assert slot.kept is decoder
    assert not hasattr(first, "model")
    with open_weights(other) as weights, pytest.raises(ModelError, match="cannot take the place"):
        refill(load(folders[0]), weights)


def test_the_form_says_how_each_matrix_is_stored(folders: list[Path]) -> None:
    layouts = [None, *(Layout(bits, group, mode) for bits in (4, 8) for group in (32, 64) for mode in get_args(Mode))]
    forms = []
    with open_weights(folders[0]) as weights:
        for layout in layouts:
            told: Any = SimpleNamespace(
                spec=weights.spec,
                names=lambda: ["a"],
                shape=lambda _name: (8, 64),
                layout=lambda _name, layout=layout: layout,
            )
            forms.append(form_of(told, keep_blocks=True))
            assert form_of(told, keep_blocks=False) not in forms
    assert len(set(forms)) == 1 + 2 * 2 * 3


def test_drafts_of_one_form_take_turns_in_a_working_set(folders: list[Path]) -> None:
    """K = 1 of 2: what the first left is what the second has, and the end gives all of it back."""
    made: list[CudaDecoder] = []

    def draft(which: int) -> StandaloneDraft:
        def build(slot: Any, _control: Any) -> CudaDecoder:
            made.append(fill(slot, folders[which]))
            return made[-1]

        with open_weights(folders[which]) as weights:
            return StandaloneDraft(f"d{which}", Checkpoint(weights.spec, 1000, (), build), 280)

    drafts = [draft(0), draft(1)]
    with WorkingSet(drafts, slots=1) as working_set:
        for name in ("d0", "d1", "d0"):
            working_set.retarget([name], reason="test")
            assert working_set.wait_for(name, 10.0)
        assert len(made) == 3
        assert len({id(each) for each in made}) == 1
        assert same_logits(made[0], folders[0])
        working_set.set_capacity(0, "memory is short")
        assert working_set.wait_for_rest(5.0)
        assert not hasattr(made[0], "model")


def test_a_draft_of_another_kind_takes_the_slot_and_all_of_its_memory() -> None:
    """What an idle decoder holds would be beside the slot's budget."""
    freed: list[str] = []

    class Filling:
        name, kind, files, slot_bytes, buffer_bytes, loaded = "d", "head", (), 1, 0, False

        def load(self, slot: Any, _control: Any) -> None:
            assert slot.kept is None
            self.loaded = True

        def unload(self) -> None:
            self.loaded = False

    with WorkingSet([Filling()], slots=1) as working_set:
        slot = working_set._books.schedule.pool.slots[0]
        slot.kept = SimpleNamespace(free=lambda: freed.append("idle"))
        working_set.retarget(["d"], reason="test")
        assert working_set.wait_for("d", 10.0)
    assert freed == ["idle"]


def test_what_a_slot_keeps_may_fail_to_go(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    slot = MemorySlot(3, 0)
    slot.kept = SimpleNamespace(free=broken)  # type: ignore[assignment]
    slot.let_go()
    assert slot.kept is None
    assert "slot 3" in caplog.text


# Memory


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 1.07 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131'
        ),
        RuntimeError("NvMapMemAllocInternalTagged: 1075072515 error 12"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cudaErrorMemoryAllocation"),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception) -> None:
    assert out_of_memory(error)
    wrapped = ModelError("the step failed")
    wrapped.__cause__ = error
    assert out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: device-side assert triggered"), OSError(5, "Input/output error"), ValueError()]
)
def test_what_does_not(error: Exception) -> None:
    assert not out_of_memory(error)


class Shrinkable:
    """A working set as a session sees it, which notes when it is asked for memory."""

    def __init__(self) -> None:
        self.asked = 0
        self.held = 0

    @contextlib.contextmanager
    def acquire(self) -> Iterator[Any]:
        self.held += 1
        yield SimpleNamespace(names=frozenset({"d"} if not self.asked else ()))
        self.held -= 1

    def shrink(self, _reason: str) -> None:
        assert not self.held, "a draft cannot leave while a lease holds it"
        self.asked += 1


@pytest.mark.parametrize("times", [1, 2])
def test_a_target_without_memory_goes_on_plainly(folders: list[Path], times: int) -> None:
    """The round is made again with no draft and the text is the same; what fails again is passed on."""
    plain = answer(load(folders[0]), folders[0], [], 0).result
    target, room = load(folders[0]), Shrinkable()
    forward, calls = target.forward_batch, itertools.count()

    def short(parts: Any) -> Any:
        if 4 <= next(calls) < 4 + times:
            raise RuntimeError("NvMapMemAllocInternalTagged: 1075072515 error 12")
        return forward(parts)

    target.forward_batch = short  # type: ignore[method-assign]
    draft = StandaloneDraft("d", load(folders[0]), 280)
    session = Session(
        target, load_tokenizer(folders[0]), [draft], planner=FixedPlanner("d", 3), residency=room, eos_ids=()
    )
    generation = Generation(session, TOKENS[:10], SamplingParams(max_new_tokens=40))
    if times == 1:
        while generation.step():
            pass
        assert generation.result.token_ids == plain.token_ids
        assert generation.stats.draft_share["d"] > 0  # it did run before
    else:
        with pytest.raises(RuntimeError, match="error 12"):
            all(generation.step() for _ in range(100))
        assert generation.result.token_ids == plain.token_ids[: len(generation.result.token_ids)]
    assert room.asked == 1


def test_a_prompt_without_memory_is_read_again(folders: list[Path]) -> None:
    target, room = load(folders[0]), Shrinkable()
    forward, calls = target.forward_batch, itertools.count()

    def short(parts: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError("CUDA error: out of memory")
        return forward(parts)

    target.forward_batch = short  # type: ignore[method-assign]
    session = Session(target, load_tokenizer(folders[0]), [], residency=room, eos_ids=())
    generation = Generation(session, TOKENS[:10], SamplingParams(max_new_tokens=3))
    while generation.step():
        pass
    assert generation.finished
    assert room.asked == 1


def test_a_draft_without_memory_is_given_up(folders: list[Path]) -> None:
    plain = answer(load(folders[0]), folders[0], [], 0).result
    decoder = load(folders[1])

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("NvMapMemAllocInternalTagged: 622000000 error 12")

    patched: Callable[..., Any] = fail
    decoder.guess = patched  # type: ignore[method-assign]
    draft = StandaloneDraft("d", decoder, 280)
    made = answer(load(folders[0]), folders[0], [draft], 3)
    assert made.result.token_ids == plain.token_ids
    status = made.session.statuses["d"]
    assert status.reason is not None
    assert "error 12" in status.reason
    assert not status.active


def test_a_target_without_memory_for_graphs_does_without(folders: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """At its start, after one warning; what rounds then take is theirs to get."""
    plain = answer(load(folders[0]), folders[0], [], 0).result.token_ids
    decoder = load(folders[0])
    decoder.graphs._capture = ScriptedCapture(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"))
    prepare_steps(RuntimeConfig(model="tiny"), decoder)
    assert not decoder.graphs.enabled
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graphs are not used, each step is launched kernel by kernel (slow): "
        "there is no memory to capture them (CUDA out of memory. Tried to allocate 2.00 GiB.)"
    ]
    assert answer(decoder, folders[0], [], 0).result.token_ids == plain


def test_a_target_whose_kernels_are_broken_does_not_start(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load(folders[0])

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(decoder, "_try_long", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        prepare_steps(RuntimeConfig(model="tiny"), decoder)
