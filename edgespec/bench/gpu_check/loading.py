"""Drafts that come and go: what a load costs the rounds beside it, and two slots for five drafts."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from drafts.standalone import Checkpoint, StandaloneDraft
from edgespec.bench.gpu_check.memory import planned
from edgespec.bench.gpu_check.random_models import QWEN_3B, TINY, RandomWeights
from edgespec.bench.gpu_check.report import Check
from edgespec.bench.gpu_check.steps import Rounds, models, random_decoder
from edgespec.bench.gpu_check.timing import wait
from edgespec.memory.working_set import WorkingSet
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.slots import load_into, refill
from edgespec.models.spec import ModelSpec

_SLOTS, _DRAFTS = 2, 5


def run(check: Check) -> None:
    _beside_a_load(check)
    _two_of_five(check)


def _beside_a_load(check: Check) -> None:
    """Round times of a 3B target with a resident draft, alone and while the loader's thread fills another slot."""
    small, count = models(check.tiny)[1], 10 if check.tiny else 300
    with (
        random_decoder(check, TINY if check.tiny else QWEN_3B) as target,
        random_decoder(check, small) as draft,
    ):
        rounds = Rounds(target, draft, 3, 0.7)
        for _ in range(3):
            rounds.one()
        alone = [rounds.one()[1] for _ in range(count)]
        with random_decoder(check, small, seed=1) as slot:
            slot.kept = True
            slot.close()  # idle, as in its slot
            _while(check, "a draft loads", partial(refill, slot, RandomWeights(small, seed=9).file), rounds, alone)
            slot.free()
        if check.left > 60:
            place = SimpleNamespace(kept=None)
            forms = itertools.cycle((4, 8))
            _while(check, "drafts of other forms load", lambda: _anew(check, place, small, next(forms)), rounds, alone)
            place.kept.free()


def _anew(check: Check, place: Any, model: ModelSpec, bits: int) -> None:
    """Fill a slot that holds nothing, or a draft of another form: with memory, graphs and all."""
    weights, positions = RandomWeights(model, seed=bits, bits=bits).file, 512 if check.tiny else 2048
    build = partial(CudaDecoder, weights, device=check.device, positions=positions)
    decoder = load_into(place, weights, positions, build)
    decoder.prepare_guesses(model.vocab_size, (3,))
    decoder.close()


def _while(check: Check, what: str, load: Callable[[], None], rounds: Rounds, alone: list[float]) -> None:
    """Rounds beside a thread that loads again and again, against those without."""
    loads, stop, failed = 0, threading.Event(), []

    def run_loads() -> None:
        nonlocal loads
        try:
            while not stop.is_set():
                load()
                loads += 1
        except Exception as error:
            failed.append(error)

    loader = threading.Thread(target=run_loads, name="edgespec-gpu-check-load")
    loader.start()
    beside: list[float] = []
    try:  # at least one load, however quick the rounds are
        while len(beside) < len(alone) or (loads == 0 and not failed and len(beside) < 100 * len(alone)):
            beside.append(rounds.one()[1])
    finally:
        stop.set()
        loader.join()
    if failed:
        check.found("loading", f"rounds while {what}", None, ok=False, note=str(failed[0]))
        return
    for name, share in (("median", 50), ("p99", 99)):
        before, after = (float(np.percentile(times, share)) * 1e3 for times in (alone, beside))
        check.found("loading", f"round, {name}, no load", before, "ms")
        check.found("loading", f"round, {name}, while {what}", after, "ms", note=f"{after / before:.2f} times")
    check.found("loading", f"loads completed while {what}", loads)


def _two_of_five(check: Check) -> None:
    """Five drafts of one form take turns in two slots: no decoder is built for the third, and no byte more is taken."""
    small = models(check.tiny)[1]
    positions = 512 if check.tiny else 2048
    built: list[CudaDecoder] = []

    def anew(seed: int) -> CudaDecoder:
        built.append(CudaDecoder(RandomWeights(small, seed=seed).file, device=check.device, positions=positions))
        return built[-1]

    def build(seed: int, slot: Any, control: Any) -> CudaDecoder:
        weights = RandomWeights(small, seed=seed)
        decoder = load_into(slot, weights.file, positions, partial(anew, seed), control.checkpoint)
        decoder.prepare_guesses(small.vocab_size, (3,))
        return decoder

    gc.collect()
    before = _allocated(check)
    slot_bytes = planned(check, RandomWeights(small)).slot(positions)
    drafts = [
        StandaloneDraft(f"d{seed}", Checkpoint(small, slot_bytes, (), partial(build, seed)), small.vocab_size)
        for seed in range(_DRAFTS)
    ]
    most, right = 0, 0
    with WorkingSet(drafts, slots=_SLOTS) as working_set:
        for turn in range(2 * _DRAFTS):
            names = [f"d{turn % _DRAFTS}", f"d{(turn + 1) % _DRAFTS}"]
            working_set.retarget(names, reason="gpu_check")
            right += all(working_set.wait_for(name, 30.0) for name in names)
            wait(check.device)
            most = max(most, _allocated(check) - before)
        loads = working_set.counters.loads
    budget = _SLOTS * slot_bytes
    check.found("drafts", "turns of 2 of 5 drafts", right, goal=f"{2 * _DRAFTS}", ok=right == 2 * _DRAFTS)
    check.found("drafts", "loads", loads)
    check.found("drafts", "decoders built", len(built), goal=f"<= {_SLOTS}", ok=len(built) <= _SLOTS)
    if check.device.type == "cuda":
        note = f"{most / 1e6:.0f} of {budget / 1e6:.0f} MB"
        check.found(
            "drafts",
            "most memory",
            most / budget * 100,
            "% of the budget",
            goal="<= 100%",
            ok=most <= budget,
            note=note,
        )
    del drafts
    for decoder in built:
        decoder.free()


def _allocated(check: Check) -> int:
    return int(torch.cuda.memory_allocated(check.device)) if check.device.type == "cuda" else 0
