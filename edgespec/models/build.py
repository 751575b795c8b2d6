"""From weights to a running decoder: picks the engine for a device and imports only that one."""

from __future__ import annotations

import math
from pathlib import Path

from edgespec.errors import ConfigError
from edgespec.models.base import Decoder
from edgespec.models.weights import WeightFile

DEVICES = ("cpu", "torch", "torch-cpu", "cuda")


def build_decoder(
    weights: WeightFile,
    *,
    device: str = "cpu",
    weight_format: str = "exact",
    threads: int | None = None,
    positions: int | None = None,
    cache_dir: Path | None = None,
) -> Decoder:
    """The engine for `device`, ready to run: "cpu" is ONNX Runtime; "torch" (also "torch-cpu") and "cuda" are torch.

    weight_format: "exact", "int8" or "float32" on "cpu"; torch knows float32 alone, which is also its "exact".
    threads: None leaves the engine's default. positions: of the longest sequence, None for the engine's default.
    cache_dir: where the CPU engine keeps built graphs; torch has none.
    Raises ConfigError for a device or format that cannot be had here, ModelError for weights that cannot be read.
    """
    if device == "cpu":
        from edgespec.models.onnx_decoder import OnnxDecoder

        return OnnxDecoder(
            weights, weight_format=weight_format, threads=threads, positions=positions, cache_dir=cache_dir
        )
    if device not in DEVICES:
        raise ConfigError(f"device {device!r} is not known; use one of {', '.join(DEVICES)}")
    if weight_format not in ("exact", "float32"):
        raise ConfigError(f'weight format {weight_format!r} needs device "cpu"; the torch engine has only "float32"')
    try:
        from edgespec.models.torch_decoder import TorchDecoder
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(f'device {device!r} needs the package torch; install it or use device "cpu"') from error
    return TorchDecoder(weights, device="cuda" if device == "cuda" else "cpu", positions=positions, threads=threads)


_INT8_BYTES = 1 + 4 / 32  # a number and its share of a block's scale
_BLOCK_BYTES = {"Q4_0": 0.5 + 4 / 32, "Q4_1": 0.5 + 8 / 32, "Q8_0": _INT8_BYTES}


def planned_bytes(weights: WeightFile, device: str, weight_format: str) -> int:
    """Bytes that the weights will take in memory, known before any is read."""
    total = 0.0
    for name in weights.names():
        shape = weights.shape(name)
        total += math.prod(shape) * (4 if len(shape) < 2 else _bytes_of(weights.kind(name), device, weight_format))
    return int(total)


def _bytes_of(kind: str, device: str, weight_format: str) -> float:
    if device != "cpu" or weight_format == "float32":
        return 4.0
    return _BLOCK_BYTES.get(kind, _INT8_BYTES) if weight_format == "exact" else _INT8_BYTES
