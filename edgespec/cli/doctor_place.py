"""Where `edgespec doctor` plans memory: the engine that would run here, and the memory that it would take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.doctor_gpu import TorchFacts, problem_of
from edgespec.errors import ConfigError
from edgespec.memory import topology
from edgespec.telemetry.board import Board

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig

MEMORY = {
    "cpu": "the machine's memory",
    "unified": "memory that CPU and GPU share",
    "discrete": "the GPU's own memory",
}


@dataclass(frozen=True)
class Place:
    """device: the engine's name. started: what the device's library takes for itself is gone from what is free.

    plain: kernels cannot be compiled there, None = as it is in this process.
    """

    device: str
    topology: topology.Topology
    started: bool = False
    plain: bool | None = None


def of_engine(config: RuntimeConfig) -> Place:
    """Of the engine that would be loaded in this process."""
    from edgespec import loading  # imports numpy, which a command line that only parses must not

    device = loading.device_of(config)
    return Place(device, loading.topology_of(config), device == "cuda")


def place(config: RuntimeConfig, board: Board, facts: TorchFacts | None, root: Path) -> Place:
    """By what torch said in a process of its own (None: it was not asked, or is not there), and the files under `root`.

    Raises ConfigError where the GPU's engine is asked for and cannot run.
    """
    from edgespec.models.build import CUDA_FORMATS

    problem = "torch is not installed, or there is no GPU" if facts is None else problem_of(board, facts)
    device = config.device
    if device == "auto":
        device = "cuda" if not problem and config.weight_format in CUDA_FORMATS else "cpu"
    if device != "cuda" or facts is None or problem:
        if device == "cuda":
            raise ConfigError(f'device "cuda" is asked for, but cannot be used here: {problem}')
        return Place(device, topology.detect(device, root=root))
    there = topology.detect(device, device_memory=lambda: (facts.free_bytes, facts.total_bytes), root=root)
    return Place(device, there, there.kind == "discrete")  # torch's process has ended: on a board its share is back
