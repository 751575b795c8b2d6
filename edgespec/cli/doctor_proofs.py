"""What `edgespec doctor` proves by running it: that drafts change no text, and whether they can flip a near tie.

It is proven of the engine that would run here. On a GPU that compiles kernels when it is done for the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from edgespec.cli.doctor_check import Check

Engine = Literal["cpu", "cuda"]
_ENGINES = {"cpu": "the CPU's engine", "cuda": "the GPU's engine"}
_REPORT = "Please report this with the output of edgespec doctor --json."


def lossless(load: Callable[..., Any], device: Engine) -> Check:
    """load: see `selftest.run`."""
    from edgespec import selftest

    start = time.perf_counter()
    result = selftest.run(load) if device == "cpu" else selftest.run(load, device=device)
    seconds = time.perf_counter() - start
    engine = _ENGINES[device]
    if result.problem is not None:
        return Check("lossless", "fail", f"{engine}: {result.problem}", _REPORT)
    equal = f"{result.tokens} tokens equal to plain decoding at every gamma, {result.accepted} drafted ones accepted"
    return Check("lossless", "ok", f"{engine}: {equal} ({seconds:.1f} s)")


def bits(threads: int | None, device: Engine) -> Check:
    """Whether a row of logits has the same bits however long its block is, in every format of weights."""
    from edgespec import selftest

    found = selftest.same_bits(threads) if device == "cpu" else gpu_bits(device)
    engine, differing = _ENGINES[device], [name for name, same in found.items() if not same]
    if differing:
        formats = ", ".join(differing)
        detail = f"{engine}: logits of {formats} weights depend on the block length in their last bits here"
        advice = "Drafts may flip near ties in these formats; use float32 to rule it out."
        return Check("bits", "warn", detail, advice)
    return Check("bits", "ok", f"{engine}: logits are the same bits for every block length, in every weight format")


def gpu_bits(device: str) -> dict[str, bool]:
    """Weight format -> whether rows of a random model are the same bits in steps of 1 to 16 tokens."""
    import numpy as np

    from edgespec.bench.gpu_check.random_models import TINY, RandomWeights
    from edgespec.models.cuda.decoder import CudaDecoder

    tokens = np.random.default_rng(3).integers(0, TINY.vocab_size, 48).tolist()
    found = {}
    for name, kept in (("float16", None), ("int8", 8), ("int4", 4)):
        decoder = CudaDecoder(RandomWeights(TINY, bits=kept).file, device=device, positions=64)
        rows = []
        for size in (1, 2, 3, 8, 16):
            cache = decoder.new_cache()
            blocks = [tokens[at : at + size] for at in range(0, len(tokens), size)]
            rows.append(np.concatenate([np.array(decoder.forward(block, cache).logits) for block in blocks]))
            cache.release()
        found[name] = all(np.array_equal(each, rows[0]) for each in rows)
        decoder.close()
    return found
