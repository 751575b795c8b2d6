"""The CUDA engine against the float32 reference, on random models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from edgespec.bench.gpu_check.random_models import TINY, RandomWeights, spec
from edgespec.bench.gpu_check.report import Check
from edgespec.kernels import ops
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.reference.decoder import TorchDecoder
from edgespec.models.spec import ModelSpec


class _Case(NamedTuple):
    name: str
    model: ModelSpec
    bits: int | None
    dtype: torch.dtype
    most: float  # of the largest logit


# Rounding of half precision grows through the layers; float32 leaves what another order of additions leaves.
_FLOAT, _HALF = 1e-4, 3e-2
_QWEN3 = {"architecture": "qwen3", "qk_norm": True, "qkv_bias": False, "windows": (None, 24, None, 24)}
_MIDDLE = spec(512, 4, 8, 2, 64, 1408, 4096, max_positions=1024)
_MIDDLE_3 = spec(512, 4, 8, 4, 64, 1408, 4096, max_positions=1024, **_QWEN3)
_LARGER = spec(1024, 8, 16, 2, 64, 2816, 8192, max_positions=1024, tie_embeddings=False)


def _cases(tiny: bool) -> list[_Case]:
    half = torch.float32 if tiny else torch.float16  # torch's products of half on a CPU are slow
    cases = [
        _Case("tiny float32", TINY, None, torch.float32, _FLOAT),
        _Case("tiny int4", TINY, 4, torch.float32, _FLOAT),
    ]
    if tiny:
        return cases
    return cases + [
        _Case("tiny int8 half", TINY, 8, half, _HALF),
        _Case("middle int4 half", _MIDDLE, 4, half, _HALF),
        _Case("middle int8 half, windows", _MIDDLE_3, 8, half, _HALF),
        _Case("middle half", _MIDDLE, None, half, _HALF),
        _Case("larger int4 half", _LARGER, 4, half, _HALF),
    ]


def run(check: Check) -> None:
    for case in _cases(check.tiny):
        weights = RandomWeights(case.model, seed=1, bits=case.bits, group=32)
        decoder = CudaDecoder(weights.file, device=check.device, dtype=case.dtype, positions=512)
        try:
            error, same = _compared(decoder, TorchDecoder(weights.file), 40 if check.tiny else 200)
            goal = f"<= {case.most:g}"
            check.found("parity", f"{case.name}: off by, of the largest logit", error, goal=goal, ok=error <= case.most)
            # torch's own products promise nothing of the kind
            ok = same == 0.0 if ops.backend(check.device) == "triton" else None
            check.found("parity", f"{case.name}: a row alone and in a block differ by", same, goal="0", ok=ok)
        finally:
            decoder.close()


def _compared(decoder: CudaDecoder, wanted: TorchDecoder, prompt: int) -> tuple[float, float]:
    """(largest error of a logit against the reference, of the largest; largest difference of a row by its company)."""
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, decoder.spec.vocab_size, prompt + 60)]
    one, two, errors, apart = wanted.new_cache(), decoder.new_cache(), [], 0.0
    begin = 0
    for width in (prompt, 1, 2, 3, 5, 9, 16):
        part = tokens[begin : begin + width]
        exact = np.array(wanted.forward(part, one, logits=min(width, 16)).logits)
        made = np.array(decoder.forward(part, two, logits=min(width, 16)).logits)
        errors.append(float(np.abs(made - exact).max() / np.abs(exact).max()))
        if 1 < width <= 16:
            two.crop(begin)
            alone = np.concatenate([np.array(decoder.forward([token], two).logits) for token in part])
            apart = max(apart, float(np.abs(alone - made).max()))
        begin += width
    return max(errors), apart
