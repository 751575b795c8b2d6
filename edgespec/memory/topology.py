"""Where bytes live on this device, and what "free" means there.

"cpu": the engine's memory is the process's own. "unified": CPU and GPU share one memory (Jetson), so the free memory
is the system's. "discrete": the GPU has its own memory, whose free bytes its driver tells.

Free system memory is the least of what the kernel calls available, what the control groups of this process still
allow, and what its own address-space limit (ulimit -v) still allows: a container is killed at its limit, however much
the machine has.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from edgespec.telemetry.system_files import SYSTEM_ROOT as _SYSTEM_ROOT
from edgespec.telemetry.system_files import text as _read

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Kind = Literal["cpu", "unified", "discrete"]
DeviceMemory = Callable[[], "tuple[int, int]"]


@dataclass(frozen=True)
class Topology:
    """What memory there is for models.

    total_bytes: what may ever be used: the machine's memory, or the least limit set on this process, or the GPU's own.
    device_memory: for "discrete", returns (free bytes, total bytes) of the GPU, as torch.cuda.mem_get_info does.
    root: where /proc and /sys are looked for (tests use another one). name: of the device, "" where it has none.
    """

    kind: Kind
    total_bytes: int
    device_memory: DeviceMemory | None = None
    root: Path = _SYSTEM_ROOT
    name: str = ""

    def available_bytes(self) -> int:
        """How many more bytes can be taken now."""
        if self.kind == "discrete" and self.device_memory is not None:
            return self.device_memory()[0]
        return host_available_bytes(self.root)

    def used_bytes(self) -> int:
        """What this process has taken where the budget counts: resident memory, and on a Jetson what its GPU holds.

        Resident memory does not show the GPU's allocations there (nvmap); those of all processes are counted, since
        only root can tell them apart.
        """
        return process_memory() + (nvmap_bytes(self.root) or 0 if self.kind == "unified" else 0)


def detect(
    device: str = "cpu",
    *,
    device_memory: DeviceMemory | None = None,
    integrated: bool | None = None,
    root: Path = _SYSTEM_ROOT,
) -> Topology:
    """The topology seen by an engine on `device` ("cuda" or any CPU engine's name).

    device_memory: (free, total) bytes of the GPU, used where it has memory of its own. integrated: what the GPU's
    driver says about that (`is_integrated` of its properties), None = found from the system.
    """
    name = device_name(root)
    if device.startswith("cuda"):
        if is_integrated(root) if integrated is None else integrated:
            return Topology("unified", host_total_bytes(root), root=root, name=name)
        if device_memory is not None:
            return Topology("discrete", device_memory()[1], device_memory, root, name)
    return Topology("cpu", host_total_bytes(root), root=root, name=name)


def is_integrated(root: Path = _SYSTEM_ROOT) -> bool:
    """Whether this is a Tegra (Jetson), whose GPU has no memory of its own."""
    if (root / "etc/nv_tegra_release").exists():
        return True
    compatible = _read(root / "proc/device-tree/compatible") or ""
    if "nvidia,tegra" in compatible or "Jetson" in device_name(root):
        return True
    return "tegra" in (_read(root / "proc/sys/kernel/osrelease") or "")  # all that some containers tell


def device_name(root: Path = _SYSTEM_ROOT) -> str:
    """What the board or the computer calls itself, "" if it does not say.

    Boards say it in the device tree (which containers for Jetson copy to /tmp), computers in the tables of their BIOS.
    """
    for place in ("proc/device-tree/model", "tmp/nv_jetson_model", "sys/class/dmi/id/product_name"):
        name = (_read(root / place) or "").strip("\0 \n")
        if name:
            return name
    return ""


def soc(root: Path = _SYSTEM_ROOT) -> str:
    """The Tegra chip: "tegra234" (Orin), "tegra264" (Thor); "" on anything else."""
    found = re.search(r"nvidia,(tegra\d+)", _read(root / "proc/device-tree/compatible") or "")
    return found[1] if found else ""


def l4t_version(root: Path = _SYSTEM_ROOT) -> str:
    """The release of Jetson Linux, such as "36.4.3"; "" where it is not that."""
    found = re.search(r"R(\d+).*REVISION:\s*([\d.]+)", _read(root / "etc/nv_tegra_release") or "")
    return f"{found[1]}.{found[2]}" if found else ""


def nvmap_bytes(root: Path = _SYSTEM_ROOT) -> int | None:
    """What GPU and codecs of a Jetson hold of the one memory, all processes together; None where it is not told.

    /proc/meminfo has it on most releases; the clients' table needs root, and says 0 on Thor.
    """
    used = _meminfo(root, "NvMapMemUsed")
    if used is not None:
        return used
    for line in (_read(root / "sys/kernel/debug/nvmap/iovmm/clients") or "").splitlines():
        name, _, size = line.strip().rpartition(" ")
        if name.strip() == "total" and re.fullmatch(r"\d+K", size):
            return int(size[:-1]) * 1024
    return None


def storage_name(path: Path, root: Path = _SYSTEM_ROOT, *, device: int | None = None) -> str:
    """What holds the file or folder `path`: "NVMe", "SD or eMMC card", "SSD", "hard disk", or "" if it is not seen.

    device: its device number, None = looked up.
    """
    with suppress(OSError):
        number = os.stat(path).st_dev if device is None else device
        block = (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
        if block.name.startswith("nvme"):
            return "NVMe"
        if block.name.startswith("mmcblk"):
            return "SD or eMMC card"
        for folder in (block, block.parent):  # a partition lies in the folder of its disk
            rotational = _number(folder / "queue/rotational")
            if rotational is not None:
                return "hard disk" if rotational else "SSD"
    return ""


def host_total_bytes(root: Path = _SYSTEM_ROOT) -> int:
    """The machine's memory, or the least limit on this process if that is less."""
    limits = [limit for limit, _left in _cgroup_limits(root)]
    address_space = _address_space_limit(root)
    if address_space is not None:
        limits.append(address_space[0])
    return min([_meminfo(root, "MemTotal") or psutil.virtual_memory().total, *limits])


def host_available_bytes(root: Path = _SYSTEM_ROOT) -> int:
    """What this process can still take: available memory within every limit that is set on it."""
    left = [left for _limit, left in _cgroup_limits(root)]
    address_space = _address_space_limit(root)
    if address_space is not None:
        left.append(address_space[1])
    available = _meminfo(root, "MemAvailable")
    return max(0, min([psutil.virtual_memory().available if available is None else available, *left]))


def process_memory() -> int:
    """Resident bytes of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_memory_bytes() -> int:
    """The most resident bytes this process has had."""
    # getrusage's maximum survives exec, so a small program started by a big one would report its parent's size.
    status = _read(Path("/proc/self/status")) or ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    return int(getattr(psutil.Process().memory_info(), "peak_wset", process_memory()))


def _address_space_limit(root: Path) -> tuple[int, int] | None:
    """(limit, bytes left) of RLIMIT_AS, or None if there is none. A made-up root has no limit of its own."""
    if resource is None or root != _SYSTEM_ROOT:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return limit, max(0, limit - int(psutil.Process().memory_info().vms))


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes left) of each memory control group that this process is in, both versions, parents included.

    "No limit" is either left out ("max") or a number near 2**63 (first version), which never is the least.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, group = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for folder in _with_parents(mount, group):
            limit = _number(folder / names[0])
            if limit is not None:
                used = _number(folder / names[1]) or 0
                # Page cache of files counts as used but is given back under pressure.
                reclaimable = min(used, _statistic(folder / "memory.stat", names[2]))
                yield limit, max(0, limit - used + reclaimable)


def _with_parents(mount: Path, group: str) -> Iterator[Path]:
    """The group's folder and those above it. Inside a container the path may name folders that are not there."""
    parts = [part for part in group.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _meminfo(root: Path, key: str) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def _statistic(path: Path, key: str) -> int:
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None  # "max" means no limit
