"""Which CUDA device is meant, and whether its steps are captured."""

from __future__ import annotations

import torch

from edgespec.errors import ConfigError
from edgespec.kernels import ops
from edgespec.models.cuda.graphs import TorchCapture


def device_named(device: str | torch.device) -> torch.device:
    """The device that is meant, as its tensors name it. Raises ConfigError for a CUDA device where there is none."""
    meant = torch.device(device)
    if meant.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device "cuda" was asked for, but torch finds no CUDA device here; use device "cpu"')
    return placed(meant)


def placed(device: torch.device) -> torch.device:
    """With its index: tensors made on "cuda" lie on "cuda:0", say, and to torch these two are not the same device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def capture_on(device: torch.device) -> TorchCapture | None:
    """What captures steps on `device`, None where they run kernel by kernel.

    torch's references, which run where Triton cannot, work slab by slab: each new slab would be another graph, captured
    in the middle of a round.
    """
    return TorchCapture(device) if device.type == "cuda" and ops.backend(device) == "triton" else None
