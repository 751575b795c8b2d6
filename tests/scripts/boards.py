"""Fake boards: the files that the scripts look at, and commands that only write down their arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts" / "jetson"

NVPMODEL = """
< PARAM TYPE=FILE NAME=CPU_ONLINE >
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL NAME=25W ID=1 >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
< PM_CONFIG DEFAULT=1 >
"""
# name: (model, compatible, release, total MB)
BOARDS = {
    "nano-4": (
        "Jetson Orin Nano Engineering Reference",
        "nvidia,p3767-0004\0nvidia,tegra234",
        "R36 REVISION: 4.3",
        3432,
    ),
    "nano-8": ("Jetson Orin Nano Developer Kit Super", "nvidia,p3767-0005\0nvidia,tegra234", "R36 REVISION: 4.7", 7607),
    "nx-16": ("Jetson Orin NX Engineering Reference", "nvidia,p3767-0000\0nvidia,tegra234", "R36 REVISION: 5.0", 15300),
    "agx": ("Jetson AGX Orin", "nvidia,p3701-0005\0nvidia,tegra234", "R35 REVISION: 4.1", 30536),
    "thor": ("Jetson AGX Thor Developer Kit", "nvidia,p3834-0008\0nvidia,tegra264", "R38 REVISION: 4.0", 125772),
}


def make_board(
    root: Path, name: str, *, storage: str = "/dev/nvme0n1p1", desktop: bool = True, zram: bool = True
) -> Path:
    """The files of one of BOARDS, or of a plain x86 machine ("x86"), below `root`."""
    for folder in (
        "proc/device-tree",
        "proc/sys/vm",
        "proc/sys/kernel",
        "etc/systemd/system",
        "var/lib/nvpmodel",
        "tmp",
    ):
        (root / folder).mkdir(parents=True)
    total = 16000
    if name != "x86":
        model, compatible, release, total = BOARDS[name]
        major, revision = release.split(" REVISION: ")
        (root / "proc/device-tree/model").write_bytes(model.encode() + b"\0")
        (root / "proc/device-tree/compatible").write_bytes(compatible.encode() + b"\0")
        (root / "proc/device-tree/serial-number").write_bytes(b"1423524012345\0")
        line = f"# {major} (release), REVISION: {revision}, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed\n"
        (root / "etc/nv_tegra_release").write_text(line)
        (root / "etc/nvpmodel.conf").write_text(NVPMODEL)
        (root / "var/lib/nvpmodel/status").write_text("pmode:0001 fmode:fanNull\n")
        (root / "usr/local/cuda").mkdir(parents=True)
        (root / "usr/local/cuda/version.json").write_text(
            '{\n "cuda" : {\n  "name" : "CUDA SDK",\n  "version" : "12.6.11"\n }\n}\n'
        )
    (root / "proc/meminfo").write_text(
        f"MemTotal: {total * 1024} kB\nMemFree: 900 kB\nMemAvailable: {total * 800} kB\n"
    )
    (root / "proc/buddyinfo").write_text(
        "Node 0, zone DMA 1 1 1 1 1 1 1 1 1 1 40\nNode 0, zone Normal 1 1 1 1 1 1 1 1 1 1 21\n"
    )
    (root / "proc/mounts").write_text(f"proc /proc proc rw 0 0\n{storage} / ext4 rw 0 0\n")
    swaps = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    (root / "proc/swaps").write_text(swaps + ("/dev/zram0  partition  1900000  0  5\n" if zram else ""))
    (root / "etc/fstab").write_text("/dev/root / ext4 defaults 0 1\n")
    units = root / "etc/systemd/system"
    (units / "default.target").symlink_to(f"/lib/systemd/system/{'graphical' if desktop else 'multi-user'}.target")
    if zram:
        (units / "multi-user.target.wants").mkdir()
        (units / "multi-user.target.wants/nvzramconfig.service").symlink_to("/etc/systemd/system/nvzramconfig.service")
    return root


class Stubs:
    """A folder of commands that comes first on PATH. Each call is a line of `calls`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls.log"
        self.folder.mkdir()

    def add(self, name: str, script: str = "") -> None:
        path = self.folder / name
        path.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "{name} $*" >>"{self.log}"\n{script}\n')
        path.chmod(0o755)

    def real_python(self) -> None:
        """python3 is the interpreter of the tests, without whatever the system puts before its own."""
        (self.folder / "python3").symlink_to(sys.executable)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def run(
    script: str, *arguments: str, stubs: Stubs | None = None, env: dict[str, str] | None = None, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A script with its arguments; `path` replaces the system's PATH behind the stubs."""
    system = os.environ["PATH"] if path is None else path
    variables = {**os.environ, **(env or {}), "PATH": system if stubs is None else f"{stubs.folder}:{system}"}
    return subprocess.run(
        [SCRIPTS / script, *arguments], capture_output=True, text=True, env=variables, timeout=60, check=False
    )


def snapshot(root: Path) -> dict[str, str]:
    """All files below a folder with their content, links as where they lead."""
    return {
        str(path.relative_to(root)): f"-> {os.readlink(path)}"
        if path.is_symlink()
        else path.read_text(errors="replace")
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }
