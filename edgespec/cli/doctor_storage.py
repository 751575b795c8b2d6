"""`edgespec doctor`: swap, fragmentation and the desktop on a Jetson; how fast models are read, anywhere."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.cli.doctor_check import Check, finding
from edgespec.memory import topology
from edgespec.memory.budget import format_bytes as size
from edgespec.telemetry.system_files import text

_MIB = 1 << 20
_PAGE = 4096
_FEW_BLOCKS = 32 * _MIB  # an idle Orin Nano has 244 MiB in blocks of 4 MiB, one that loads an engine 8 MiB
_SWAPPED = 64 * _MIB
_SMALL_BOARD = 17 << 30  # up to 16 GB, where a desktop and zram cost what a draft needs
SLOW_READ = 150e6  # bytes a second: a microSD card reads 67 MB/s, the slowest NVMe ten times that
_READ_MOST, _READ_LEAST, _READ_SECONDS, _CHUNK = 64 * _MIB, 8 * _MIB, 0.4, 4 * _MIB


@dataclass(frozen=True, slots=True)
class Swap:
    """Bytes of all swap areas, and of those in compressed memory (zram)."""

    total: int = 0
    used: int = 0
    zram: int = 0


def read_swap(root: Path) -> Swap:
    total = used = zram = 0
    for row in (text(root / "proc/swaps") or "").splitlines()[1:]:
        fields = row.split()
        if len(fields) >= 4 and fields[2].isdigit() and fields[3].isdigit():
            total, used = total + int(fields[2]) * 1024, used + int(fields[3]) * 1024
            zram += int(fields[2]) * 1024 if "zram" in fields[0] else 0
    return Swap(total, used, zram)


def swap(root: Path) -> list[Check]:
    """Swapped-out pages anywhere; swap in zram on a Jetson, whose GPU memory cannot be swapped."""
    now, jetson = read_swap(root), topology.is_integrated(root)
    if now.used > _SWAPPED:
        return [
            finding(
                "swap",
                f"{size(now.used)} of {size(now.total)} are swapped out",
                "decoding that waits for them was seen to drop from 17 to 2 tokens a second",  # julien.cloud, Orin Nano
                "close other programs, then: sudo swapoff -a && sudo swapon -a",
            )
        ]
    if jetson and now.zram:
        return [
            finding(
                "swap",
                f"{size(now.zram)} of swap lie in compressed memory (zram)",
                "it uses the very memory that models need, and the GPU's part of it is never swapped",
                "sudo systemctl disable --now nvzramconfig  (with NVMe, add a swap file there instead)",
            )
        ]
    return (
        [Check("swap", "ok", f"{size(now.used)} of {size(now.total)} used" if now.total else "none")] if jetson else []
    )


def free_blocks(root: Path) -> tuple[int, int]:
    """Bytes of the largest kind of free block that the kernel keeps (4 MiB on a Jetson), and how many are free."""
    kinds = [
        row.split("zone", 1)[1].split()[1:]
        for row in (text(root / "proc/buddyinfo") or "").splitlines()
        if "zone" in row
    ]
    counts = [[int(count) for count in kind if count.isdigit()] for kind in kinds]
    order = max((len(zone) for zone in counts), default=0) - 1
    return _PAGE << max(order, 0), sum(zone[order] for zone in counts if len(zone) > order >= 0)


def fragmentation(root: Path) -> list[Check]:
    """Large free blocks: loads fail with nvmap's "error 12" when there are few, however much is free in all."""
    if not topology.is_integrated(root) or text(root / "proc/buddyinfo") is None:
        return []
    block, count = free_blocks(root)
    detail = f"{count} free blocks of {size(block)}"
    if block * count >= _FEW_BLOCKS:
        return [Check("free blocks", "ok", detail)]
    return [
        finding(
            "free blocks",
            f"only {detail}: memory is fragmented",
            "large allocations of the GPU may fail with 'error 12' although memory is free",
            "sync && sudo sysctl vm.drop_caches=3 vm.compact_memory=1  (if that does not help: reboot)",
        )
    ]


def desktop(root: Path) -> list[Check]:
    """Whether a small Jetson boots into its desktop, as the default is."""
    target = root / "etc/systemd/system/default.target"
    with suppress(OSError):
        graphical = os.readlink(target).endswith("graphical.target")
        if graphical and topology.is_integrated(root) and topology.host_total_bytes(root) <= _SMALL_BOARD:
            return [
                finding(
                    "desktop",
                    "this board boots into its desktop",
                    "that takes up to 865 MB of the memory that models could have",
                    "sudo systemctl set-default multi-user.target && sudo reboot",
                )
            ]
    return []


def read_speed(file: Path) -> float | None:
    """Bytes a second of reading the file's begin from storage, or None if it is too small to tell. Takes 0.4 s at most.

    What the page cache has of it is dropped first; where that is not allowed the figure is that of memory.
    """
    with suppress(OSError), file.open("rb", buffering=0) as source:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(source.fileno(), 0, _READ_MOST, os.POSIX_FADV_DONTNEED)
        done, begin, buffer = 0, time.perf_counter(), bytearray(_CHUNK)
        while done < _READ_MOST and time.perf_counter() - begin < _READ_SECONDS:
            count = source.readinto(buffer)
            if not count:
                break
            done += count
        seconds = time.perf_counter() - begin
        return done / seconds if done >= _READ_LEAST or seconds >= _READ_SECONDS else None
    return None


def storage(kind: str, speed: float | None) -> list[Check]:
    """kind: as `topology.storage_name` has it. speed: measured bytes a second."""
    rate = "not measured: no model is here yet" if speed is None else f"{speed / 1e6:.0f} MB/s"
    if "card" in kind or (speed is not None and speed < SLOW_READ):
        return [
            finding(
                "storage",
                f"models are read from {kind or 'slow storage'} ({rate})",
                "a draft of 0.5 GB takes seconds to load (an NVMe disk reads 1.4 GB/s, a microSD card 0.07)",
                "put the models on an NVMe disk: export EDGESPEC_HOME=/path/on/nvme",
            )
        ]
    return [Check("storage", "ok", f"{kind or 'unknown kind'}, {rate}")]
