"""Which board this is and what runs on it: module, chip, Jetson Linux, JetPack, CUDA, power modes, GPU clocks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from edgespec.memory import topology
from edgespec.telemetry.system_files import SYSTEM_ROOT, line, matching, number, text

# Modules by the part number in /proc/device-tree/compatible: Jetson Linux Developer Guide, "Quick Start".
_MODULES = {
    "p3767-0000": "Orin NX 16GB",
    "p3767-0001": "Orin NX 8GB",
    "p3767-0003": "Orin Nano 8GB",
    "p3767-0004": "Orin Nano 4GB",
    "p3767-0005": "Orin Nano 8GB",  # that of the developer kit
    "p3701-0000": "AGX Orin",
    "p3701-0004": "AGX Orin 32GB",
    "p3701-0005": "AGX Orin 64GB",
    "p3834-0008": "AGX Thor",
}
# CUDA compute capability, as the digits in "sm_87": NVIDIA's table at developer.nvidia.com/cuda-gpus.
_SM = {"tegra210": 53, "tegra186": 62, "tegra194": 72, "tegra234": 87, "tegra264": 110}
# Jetson Linux -> JetPack and the CUDA it brings: developer.nvidia.com/embedded/jetpack-archive.
_RELEASES = {
    "36.3": ("6.0", "12.2"),
    "36.4": ("6.1", "12.6"),
    "36.4.0": ("6.1", "12.6"),
    "36.4.3": ("6.2", "12.6"),
    "36.4.4": ("6.2.1", "12.6"),
    "36.4.7": ("6.2.1", "12.6"),
    "36.5": ("6.2.2", "12.6"),
    "38.2": ("7.0", "13.0"),
    "38.4": ("7.1", "13.0"),
    "39.2": ("7.2", "13.2"),
}
_MAJORS = {"34": "5", "35": "5", "36": "6", "38": "7", "39": "7"}  # of Jetson Linux -> of JetPack


@dataclass(frozen=True, slots=True)
class Board:
    """What was found; "" or None for what is not told.

    name: what the board calls itself. module: such as "Orin Nano 8GB". soc: "tegra234". sm: 87 for compute capability
    8.7. l4t, jetpack, cuda: versions; cuda is what is installed, else what belongs to the JetPack. gpus: names of GPUs
    with the desktop driver. driver: its version.
    """

    jetson: bool
    name: str = ""
    module: str = ""
    soc: str = ""
    sm: int | None = None
    l4t: str = ""
    jetpack: str = ""
    cuda: str = ""
    gpus: tuple[str, ...] = ()
    driver: str = ""

    @property
    def has_gpu(self) -> bool:
        return self.jetson or bool(self.gpus or self.driver)

    @property
    def jetpack_major(self) -> int | None:
        """5, 6 or 7 by the release of Jetson Linux, also where the exact JetPack is not known."""
        major = _MAJORS.get(self.l4t.split(".")[0])
        return None if major is None else int(major)

    def __str__(self) -> str:
        if not self.jetson:
            parts = [", ".join(self.gpus) or "GPU", f"driver {self.driver}"] if self.has_gpu else ["no NVIDIA GPU"]
            return ", ".join([*([self.name] if self.name else []), *parts])
        chip = ", ".join(filter(None, [self.soc, f"SM {self.sm / 10:.1f}" if self.sm else ""]))
        name = f"Jetson {self.module}" if self.module else self.name or "a Jetson"
        linux = f"L4T {self.l4t}" if self.l4t else "L4T unknown"
        jetpack = f"JetPack {self.jetpack}" if self.jetpack else "JetPack unknown"
        return ", ".join([f"{name} ({chip})" if chip else name, linux, jetpack, f"CUDA {self.cuda or 'unknown'}"])


def detect(root: Path = SYSTEM_ROOT) -> Board:
    """The board of this root. In a container without a device tree only what the release file says is known."""
    jetson, name = topology.is_integrated(root), topology.device_name(root)
    if not jetson:
        gpus = _desktop_gpus(root)
        return Board(False, name, gpus=gpus, driver=_driver(root), cuda=_installed_cuda(root))
    l4t, soc = topology.l4t_version(root), topology.soc(root)
    jetpack, cuda = _release(l4t)
    return Board(True, name, _module(root, name), soc, _SM.get(soc), l4t, jetpack, _installed_cuda(root) or cuda)


def _module(root: Path, name: str) -> str:
    """By part number; else by the board's own name, which may not say how much memory it has."""
    for part in re.findall(r"p\d{4}-\d{4}", text(root / "proc/device-tree/compatible") or ""):
        if part in _MODULES:
            return _MODULES[part]
    found = re.search(r"(Orin Nano|Orin NX|AGX Orin|AGX Thor|Thor)\b", name)
    return found[1] if found else ""


def _release(l4t: str) -> tuple[str, str]:
    """JetPack and CUDA of a release: "39.2.1" is looked up as itself, then as "39.2"; else the JetPack's major alone.

    `jetpack_of` in scripts/jetson/lib.sh says the same.
    """
    parts = l4t.split(".")
    for count in (len(parts), 2):
        if found := _RELEASES.get(".".join(parts[:count])):
            # 36.4.x are different JetPacks: one that is not listed must not pass for another.
            return found if count == len(parts) or parts[:2] != ["36", "4"] else ("6", found[1])
    return _MAJORS.get(parts[0], ""), ""


def _installed_cuda(root: Path) -> str:
    try:
        version = json.loads(text(root / "usr/local/cuda/version.json") or "")["cuda"]["version"]
    except (ValueError, KeyError, TypeError):
        return ""
    return str(version)


def _desktop_gpus(root: Path) -> tuple[str, ...]:
    names = []
    for file in matching(root / "proc/driver/nvidia/gpus", "*/information"):
        found = re.search(r"^Model:\s*(.+?)\s*$", text(file) or "", re.MULTILINE)
        names.append(found[1] if found else "NVIDIA GPU")
    return tuple(names)


def _driver(root: Path) -> str:
    found = re.search(r"Kernel Module\D*?([\d.]+)\s", text(root / "proc/driver/nvidia/version") or "")
    return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class PowerModes:
    """current: number of the mode in force, None if it is not told. names: by number, from /etc/nvpmodel.conf."""

    current: int | None
    names: dict[int, str]

    @property
    def name(self) -> str:
        return "" if self.current is None else self.names.get(self.current, f"mode {self.current}")

    def fastest(self) -> tuple[int, str] | None:
        """MAXN_SUPER, else MAXN, else the most watts; None if no name says."""
        ranked = {number: _rank(name) for number, name in self.names.items()}
        best = max(ranked, key=lambda number: ranked[number], default=None)
        return None if best is None or ranked[best] <= 0 else (best, self.names[best])

    def number_of(self, name: str) -> int | None:
        return next((key for key, own in self.names.items() if own == name), None)

    def slower(self, name: str) -> bool:
        """Whether the mode in force is below the mode `name`; False where that cannot be told."""
        return 0 < _rank(self.name) < _rank(name)


def _rank(name: str) -> float:
    """Watts of "25W" or "MODE_25W_DESKTOP"; MAXN above all of them; 0 where the name does not say."""
    if name.startswith("MAXN"):
        return 1e6 + (name == "MAXN_SUPER")
    found = re.search(r"(\d+)W", name)
    return float(found[1]) if found else 0.0


def power_modes(root: Path) -> PowerModes:
    """Read from nvpmodel's files, as any user. Numbers mean other modes on other boards and releases."""
    status = re.search(r"pmode:0*(\d+)", text(root / "var/lib/nvpmodel/status") or "")
    names = {}
    for attributes in re.findall(r"<\s*POWER_MODEL\s+([^>]*)>", text(root / "etc/nvpmodel.conf") or ""):
        fields = dict(part.split("=", 1) for part in attributes.split() if "=" in part)
        if fields.get("ID", "").isdigit() and "NAME" in fields:
            names[int(fields["ID"])] = fields["NAME"]
    return PowerModes(int(status[1]) if status else None, names)


@dataclass(frozen=True, slots=True)
class GpuClock:
    """hertz: now; least, most: what the governor may choose from. load: 0 to 1. None for what is not told."""

    hertz: int | None
    least: int | None
    most: int | None
    load: float | None

    @property
    def pinned(self) -> bool | None:
        """Whether the clock stays at its highest; None where that cannot be told."""
        return None if not self.most or self.least is None else self.least >= self.most


def gpu_clock(root: Path) -> GpuClock | None:
    """The GPU's clock in sysfs: on Orin by the name of its device-tree node, on Thor "gpu-gpc-0"."""
    for folder in matching(root / "sys/class/devfreq", "*"):
        node = line(folder / "device/of_node/name")
        if node in ("gpu", "ga10b", "gv11b", "gp10b") or folder.name == "gpu-gpc-0":
            permille = number(folder / "device/load")
            load = None if permille is None else permille / 1000
            now, least, most = (number(folder / f"{name}_freq") for name in ("cur", "min", "max"))
            return GpuClock(now, least, most, load)
    return None
