"""Which sets of models on the hub fit this device: what `edgespec doctor` and the scripts for Jetson boards say."""

from __future__ import annotations

from pathlib import Path

from drafts.hub_sets import SetFit, fitting
from edgespec.memory import topology
from edgespec.models.footprint import CUDA_PROCESS, WORKSPACE


def sets_here(root: Path = Path("/"), *, available: int | None = None, context: int = 2048) -> list[SetFit]:
    """How each set fits what is free now (or `available` bytes) on the machine whose files are under `root`.

    On a board with unified memory the GPU's engine is planned, which takes more than the CPU's before any weight.
    """
    free = topology.host_available_bytes(root) if available is None else available
    return fitting(free, workspace=CUDA_PROCESS if topology.is_integrated(root) else WORKSPACE, context=context)
