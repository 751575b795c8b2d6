"""What the engine takes of the device, against what is planned for it (`CudaFootprint`)."""

from __future__ import annotations

import gc

import torch

from edgespec.bench.gpu_check.random_models import RandomWeights
from edgespec.bench.gpu_check.report import Check
from edgespec.bench.gpu_check.steps import models
from edgespec.kernels import ops
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.memory import out_of_memory, return_memory
from edgespec.models.footprint import Footprint, footprint
from edgespec.models.spec import ModelSpec

_GAMMAS = range(1, 9)


def planned(check: Check, weights: RandomWeights) -> Footprint:
    """For a GPU with memory of its own: pinned buffers are not there."""
    return footprint(weights.file, "cuda", "exact", plain=ops.backend(check.device) == "torch")


def run(check: Check) -> None:
    targets, small = models(check.tiny)
    name, model = next(iter(targets.items()))
    for what, chosen, draft in ((f"target {name}", model, False), ("draft", small, True)):
        try:
            _one(check, what, chosen, draft)
        except Exception as error:
            if not out_of_memory(error):
                raise
            check.found("memory", what, None, note="does not fit into the memory of this device")


def _one(check: Check, what: str, model: ModelSpec, draft: bool) -> None:
    """A decoder with all its graphs, and one text that fills it, against its plan."""
    positions, weights = 256 if check.tiny else 2048, RandomWeights(model)
    size = planned(check, weights)
    parts = {"weights": size.weights, "KV": size.cache(positions), **size.beside(positions)}
    plan = size.slot(positions) if draft else sum(parts.values())
    return_memory(check.device)
    gc.collect()
    before = _taken(check)
    decoder = CudaDecoder(weights.file, device=check.device, positions=positions)
    try:
        if draft:
            decoder.prepare_guesses(model.vocab_size, _GAMMAS)
        else:
            decoder.prepare_steps(range(1, max(_GAMMAS) + 2))
        cache = decoder.new_cache(positions)
        hidden = decoder.forward([1] * (positions - 16), cache, hidden=not draft).hidden
        for _ in range(2):
            decoder.forward([1] * 8, cache)
        held = decoder.nbytes + decoder.pool.nbytes
        known = size.weights + size.cache(positions)
        ok = None if check.device.type == "cpu" else held <= known  # which has float32 where 2 bytes are planned
        check.found("memory", f"{what}: weights, keys and values", held / known * 100, "% of the plan", ok=ok)
        if check.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(check.device) - before[0]
            taken = _taken(check)[1] - before[1]
            for kind, nbytes in (("most allocated", peak), ("taken from the device", taken)):
                check.found(
                    "memory",
                    f"{what}: {kind}",
                    nbytes / plan * 100,
                    "% of the plan",
                    goal="<= 100%",
                    ok=nbytes <= plan,
                    note=f"{nbytes / 1e6:.0f} of {plan / 1e6:.0f} MB",
                )
        del hidden
    finally:
        decoder.close()


def _taken(check: Check) -> tuple[int, int]:
    """Bytes that torch has given out, and that the device has given to anybody."""
    if check.device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(check.device)
    torch.cuda.reset_peak_memory_stats(check.device)
    free, total = torch.cuda.mem_get_info(check.device)
    return torch.cuda.memory_allocated(check.device), total - free
