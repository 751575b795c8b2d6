"""From weights to a running decoder: picks the engine for a device and imports only that one."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from edgespec.errors import ConfigError
from edgespec.models.base import Decoder
from edgespec.models.weights.opening import WeightFile
from edgespec.models.weights.quantised import Layout

DEVICES = ("cpu", "torch", "torch-cpu", "cuda")
CUDA_FORMATS = ("exact", "float32")

_log = logging.getLogger(__name__)
# What a driver for CUDA devices leaves on Linux (desktop and server, Jetson's older and newer kernels, WSL).
_NODES = ("dev/nvidiactl", "dev/nvhost-ctrl-gpu", "dev/nvgpu", "dev/dxg")


@cache
def cuda_works(root: Path = Path("/")) -> bool:
    """Whether torch finds a CUDA device here that computes; where it finds one that does not, one warning.

    torch is imported only where a driver is: a machine without a GPU does not wait for it.
    """
    if os.name != "nt" and not any((root / node).exists() for node in _NODES):
        return False
    try:
        import torch

        if not torch.cuda.is_available():
            return False
        if float((torch.ones(64, device="cuda") * 2).sum()) == 128.0:
            return True
        cause = "a small sum is wrong"
    except Exception as error:  # torch without kernels for this board, a driver that is too old, no torch
        cause = str(error).partition("\n")[0] or type(error).__name__
    _log.warning("the GPU is not used: %s; `edgespec doctor` says more", cause)
    return False


def build_decoder(
    weights: WeightFile,
    *,
    device: str = "cpu",
    weight_format: str = "exact",
    threads: int | None = None,
    positions: int | None = None,
    cache_dir: Path | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Decoder:
    """The engine for `device`, ready to run.

    "cpu" is ONNX Runtime, "torch" (also "torch-cpu") the float32 reference, "cuda" the engine of CUDA devices.

    weight_format: "exact", "int8" or "float32" on "cpu"; the reference knows float32 alone, which is also its "exact".
    On "cuda", "exact" keeps int4 and int8 as the file has them, and the rest is float16.
    threads: None leaves the engine's default. positions: of the longest sequence, None for the engine's default.
    cache_dir: where the CPU engine keeps built graphs; torch has none. pause: called now and then while weights move to
    a CUDA device, which may take seconds; what it raises ends that.
    Raises ConfigError for a device or format that cannot be had here, ModelError for weights that cannot be read.
    """
    if device == "cpu":
        from edgespec.models.onnx.decoder import OnnxDecoder

        return OnnxDecoder(
            weights, weight_format=weight_format, threads=threads, positions=positions, cache_dir=cache_dir
        )
    if device not in DEVICES:
        raise ConfigError(f"device {device!r} is not known; use one of {', '.join(DEVICES)}")
    if weight_format not in CUDA_FORMATS:
        raise ConfigError(f'weight format {weight_format!r} needs device "cpu"; the torch engine has only "float32"')
    try:
        if device == "cuda":
            from edgespec.models.cuda.decoder import CudaDecoder

            exact = weight_format == "exact"
            dtype = "float16" if exact else "float32"
            return CudaDecoder(weights, dtype=dtype, positions=positions, keep_blocks=exact, pause=pause)
        from edgespec.models.reference.decoder import TorchDecoder
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(f'device {device!r} needs the package torch; install it or use device "cpu"') from error
    return TorchDecoder(weights, positions=positions, threads=threads)


_INT8_BYTES = 1 + 4 / 32  # a number and its share of a block's scale


def planned_bytes(weights: WeightFile, device: str, weight_format: str) -> int:
    """Bytes that the weights will take in memory, known before any is read."""
    total = 0.0
    for name in weights.names():
        shape, own = weights.shape(name), weights.layout(name)
        if device == "cuda" and weight_format == "exact" and own is not None:
            total += own.nbytes(shape)
        else:
            total += math.prod(shape) * (4 if len(shape) < 2 else _bytes_of(own, device, weight_format))
    return int(total)


def _bytes_of(own: Layout | None, device: str, weight_format: str) -> float:
    """Of one number. On "cuda": of a matrix that is not kept as the file has it."""
    if device == "cuda" and weight_format == "exact":
        return 2.0
    if device != "cpu" or weight_format == "float32":
        return 4.0
    if own is None or weight_format != "exact":
        return _INT8_BYTES
    return own.bits / 8 + (4 if own.mode == "symmetric" else 8) / 32  # float32 scales, and shifts
