"""How many processor cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> float:
    """Cores by affinity, and by the quota of the control group if that is less (a container on a large machine)."""
    allowed = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    try:
        quota, _, period = (root / "sys/fs/cgroup/cpu.max").read_text().partition(" ")
    except (OSError, ValueError):
        return allowed
    if quota.isdigit() and period.strip().isdigit() and int(period):
        allowed = min(allowed, int(quota) / int(period))
    return allowed


def usable_threads() -> int:
    """Threads for an engine: one a usable core, at least one."""
    return max(1, math.ceil(usable_cores()))
