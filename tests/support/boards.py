"""Made-up /proc, /sys and /etc of boards, as NVIDIA's documents and people's logs show the real ones."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

NANO_MODES = {0: "15W", 1: "25W", 2: "MAXN_SUPER", 3: "7W"}


@dataclass(frozen=True)
class FakeBoard:
    """l4t: "36.4.3" or "". total, free: MiB. modes, mode: of nvpmodel. pinned: jetson_clocks was run.

    rails: millivolts and milliamperes by label, up to three for each sensor. blocks: free blocks of 4 MiB. zram: MiB.
    """

    model: str = ""
    compatible: str = ""
    l4t: str = ""
    cuda: str = ""
    total: int = 7607
    free: int = 6800
    modes: tuple[tuple[int, str], ...] = ()
    mode: int | None = None
    gpu: str = ""
    gpu_hertz: tuple[int, int, int] = (306_000_000, 306_000_000, 1_020_000_000)
    pinned: bool = False
    rails: tuple[tuple[str, int, int], ...] = ()
    celsius: tuple[tuple[str, float], ...] = ()
    throttled: tuple[str, ...] = ()
    blocks: int = 61
    zram: int = 0
    swapped: int = 0
    graphical: bool = False
    driver: str = ""
    gpus: tuple[str, ...] = ()
    ptxas: bool = False

    def write(self, root: Path) -> Path:
        if self.model:
            put(root, "proc/device-tree/model", self.model + "\0")
            put(root, "proc/device-tree/compatible", self.compatible)
        if self.l4t:
            major, _, revision = self.l4t.partition(".")
            line = (
                f"# R{major} (release), REVISION: {revision}, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: x\n"
            )
            put(root, "etc/nv_tegra_release", line)
        if self.cuda:
            put(root, "usr/local/cuda/version.json", f'{{"cuda": {{"name": "CUDA SDK", "version": "{self.cuda}"}}}}')
        if self.ptxas:
            put(root, "usr/local/cuda/bin/ptxas", "")
        self._write_memory(root)
        self._write_gpu(root)
        self._write_heat(root)
        write_rails(root, self.rails)
        return root

    def _write_memory(self, root: Path) -> None:
        put(root, "proc/meminfo", f"MemTotal: {self.total * 1024} kB\nMemAvailable: {self.free * 1024} kB\n")
        orders = " ".join("9" for _ in range(10))
        put(root, "proc/buddyinfo", f"Node 0, zone      DMA {orders} 0\nNode 0, zone   Normal {orders} {self.blocks}\n")
        rows = ["Filename Type Size Used Priority"]
        if self.zram:
            rows.append(f"/dev/zram0 partition {self.zram * 1024} {self.swapped * 1024} 5")
        elif self.swapped:
            rows.append(f"/swapfile file {16 << 20} {self.swapped * 1024} -2")
        put(root, "proc/swaps", "\n".join(rows) + "\n")
        if self.graphical:
            target = root / "etc/systemd/system/default.target"
            target.parent.mkdir(parents=True)
            target.symlink_to("/lib/systemd/system/graphical.target")

    def _write_gpu(self, root: Path) -> None:
        if self.gpu:
            folder = root / "sys/class/devfreq" / self.gpu
            now, least, most = self.gpu_hertz
            for name, value in (("cur", now), ("min", most if self.pinned else least), ("max", most)):
                put(root, folder / f"{name}_freq", f"{value}\n")
            put(root, folder / "device/of_node/name", "gpu\0")
            put(root, folder / "device/load", "630\n")
        if self.driver:
            text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {self.driver}  Tue Aug\nGCC version: gcc 13\n"
            put(root, "proc/driver/nvidia/version", text)
        for number, name in enumerate(self.gpus):
            put(root, f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information", f"Model: \t\t {name}\nIRQ: 93\n")
        if self.modes:
            rows = [f"< POWER_MODEL ID={number} NAME={name} >\nCPU_ONLINE CORE_0 1" for number, name in self.modes]
            put(root, "etc/nvpmodel.conf", "# modes\n" + "\n".join(rows) + "\n")
        if self.mode is not None:
            put(root, "var/lib/nvpmodel/status", f"pmode:{self.mode:04d} fmode:quiet\n")

    def _write_heat(self, root: Path) -> None:
        for number, (zone, celsius) in enumerate(self.celsius):
            put(root, f"sys/class/thermal/thermal_zone{number}/type", f"{zone}-thermal\n")
            put(root, f"sys/class/thermal/thermal_zone{number}/temp", f"{celsius * 1000:.0f}\n")
        devices = ["pwm-fan", "cpu-throttle-alert", "gpu-throttle-alert", "cpufreq-cpu0"]
        for number, kind in enumerate(devices if self.celsius else []):
            put(root, f"sys/class/thermal/cooling_device{number}/type", kind + "\n")
            state = 1 if kind in self.throttled or kind == "pwm-fan" else 0
            put(root, f"sys/class/thermal/cooling_device{number}/cur_state", f"{state}\n")


def put(root: Path, path: str | Path, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def write_rails(root: Path, rails: tuple[tuple[str, int, int], ...]) -> list[Path]:
    """One ina3221 for each three rails, with the shunt channels that the kernel's driver adds. Returns its folders."""
    folders = []
    for first in range(0, len(rails), 3):
        folder = root / f"sys/bus/i2c/drivers/ina3221/1-004{first // 3}/hwmon/hwmon{first // 3 + 2}"
        for channel, (label, millivolts, milliamperes) in enumerate(rails[first : first + 3], start=1):
            put(root, folder / f"in{channel}_label", label + "\n")
            put(root, folder / f"in{channel}_input", f"{millivolts}\n")
            put(root, folder / f"curr{channel}_input", f"{milliamperes}\n")
            put(root, folder / f"curr{channel}_max_alarm", "0\n")
            put(root, folder / f"curr{channel}_crit_alarm", "0\n")
            put(root, folder / f"in{channel + 3}_input", "7\n")
        put(root, folder / "in4_label", "VDD_SHUNT\n")
        put(root, folder / "curr4_input", "1\n")
        put(root, folder / "in7_label", "sum of shunt voltages\n")
        put(root, folder / "in7_input", "21\n")
        folders.append(folder)
    return folders


def on_disk(root: Path, folder: Path, disk: str) -> None:
    """Say that `folder` lies on the first partition of `disk`."""
    partition = root / "sys/devices" / disk / f"{disk}p1"
    partition.mkdir(parents=True)
    put(root, partition.parent / "queue/rotational", "0\n")
    number = os.stat(folder).st_dev
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(partition)


_IDLE = (("cpu", 48.9), ("gpu", 49.6), ("tj", 49.6))
NANO_8 = FakeBoard(
    model="NVIDIA Jetson Orin Nano Developer Kit",
    compatible="nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0",
    l4t="36.4.3",
    cuda="12.6.68",
    modes=tuple(NANO_MODES.items()),
    mode=1,
    gpu="17000000.gpu",
    rails=(("VDD_IN", 5000, 1194), ("VDD_CPU_GPU_CV", 5000, 334), ("VDD_SOC", 5000, 462)),
    celsius=_IDLE,
    ptxas=True,
)
NANO_4 = replace(
    NANO_8,
    model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit",
    compatible="nvidia,p3768-0000+p3767-0004\0nvidia,tegra234\0",
    total=3620,
    free=2900,
    modes=((0, "10W"), (1, "7W")),
    mode=1,
    zram=1810,
    graphical=True,
)
NX_16 = replace(
    NANO_8,
    model="NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
    compatible="nvidia,p3768-0000+p3767-0000\0nvidia,tegra234\0",
    l4t="36.4.7",
    total=15656,
    free=14000,
    modes=((0, "MAXN_SUPER"), (1, "10W"), (2, "15W"), (3, "25W"), (4, "40W")),
    mode=3,
)
AGX = FakeBoard(
    model="NVIDIA Jetson AGX Orin Developer Kit",
    compatible="nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0",
    l4t="36.5.0",
    cuda="12.6.68",
    total=62841,
    free=58000,
    modes=((0, "MAXN"), (1, "MODE_15W"), (2, "MODE_30W"), (3, "MODE_50W")),
    mode=0,
    gpu="17000000.gpu",
    pinned=True,
    rails=(
        ("VDD_GPU_SOC", 19000, 126), ("VDD_CPU_CV", 19000, 42), ("VIN_SYS_5V0", 5000, 704),
        ("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 60), ("NC", 0, 0),
    ),
    celsius=(*_IDLE, ("cv0", -256.0)),
    ptxas=True,
)  # fmt: skip
THOR = FakeBoard(
    model="NVIDIA Jetson AGX Thor Developer Kit",
    compatible="nvidia,p4071-0000+p3834-0008\0nvidia,tegra264\0",
    l4t="38.4",
    cuda="13.0.48",
    total=125772,
    free=110000,
    modes=((0, "MAXN"), (1, "120W"), (2, "90W"), (3, "70W")),
    mode=1,
    gpu="gpu-gpc-0",
    rails=(("VDD_GPU", 12000, 163), ("VDD_CPU_SOC_MSS", 12000, 490), ("VIN", 20000, 989)),
    celsius=(("cpu", 37.3), ("gpu", 38.9), ("tj", 38.9)),
    blocks=34,
    ptxas=True,
)
DESKTOP = FakeBoard(total=64000, free=40000, driver="550.120", gpus=("NVIDIA GeForce RTX 4090",), cuda="12.4.1")
PLAIN = FakeBoard(total=16000, free=8000, celsius=(("x86_pkg_temp", 51.0),), swapped=0)
