"""Total and free memory under control groups and limits, read from a made-up /proc and /sys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.memory import topology

GIB = 2**30


def system(root: Path, *, cgroup: str, files: dict[str, str]) -> Path:
    """A root folder of a machine with 16 GiB, 8 of them available."""
    texts = {
        "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemFree: 1000 kB\nMemAvailable: {8 * 2**20} kB\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{path}": text for path, text in files.items()},
    }
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    root = system(tmp_path, cgroup="0::/\n", files={"memory.max": "max\n", "memory.current": "5\n"})
    assert topology.host_total_bytes(root) == 16 * GIB
    assert topology.host_available_bytes(root) == 8 * GIB


def test_second_version_limit_with_page_cache_given_back(tmp_path: Path) -> None:
    files = {
        "app/memory.max": str(4 * GIB),
        "app/memory.current": str(3 * GIB),
        "app/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 7\n",
    }
    root = system(tmp_path, cgroup="0::/app\n", files=files)
    assert topology.host_total_bytes(root) == 4 * GIB
    assert topology.host_available_bytes(root) == 2 * GIB


def test_a_parent_s_limit_holds_too(tmp_path: Path) -> None:
    files = {
        "a/memory.max": str(2 * GIB),
        "a/memory.current": str(GIB),
        "a/b/memory.max": str(6 * GIB),
        "a/b/memory.current": "0",
    }
    root = system(tmp_path, cgroup="0::/a/b\n", files=files)
    assert topology.host_total_bytes(root) == 2 * GIB
    assert topology.host_available_bytes(root) == GIB


def test_first_version_limit(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/job/memory.limit_in_bytes": f"{GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{GIB // 2}\n",
        "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n",
    }
    root = system(tmp_path, cgroup="5:cpu:/job\n4:memory,x:/job\n0::/\n", files=files)
    assert topology.host_total_bytes(root) == GIB
    assert topology.host_available_bytes(root) == 3 * GIB // 4


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup may be the host's, which is not there inside."""
    files = {"memory.max": str(GIB), "memory.current": str(2 * GIB)}
    root = system(tmp_path, cgroup="0::/../docker/0123\n", files=files)
    assert topology.host_total_bytes(root) == GIB
    assert topology.host_available_bytes(root) == 0


def test_a_limit_above_the_machine_changes_nothing(tmp_path: Path) -> None:
    files = {"memory.max": str(64 * GIB), "memory.current": "0"}
    root = system(tmp_path, cgroup="0::/\n", files=files)
    assert topology.host_total_bytes(root) == 16 * GIB
    assert topology.host_available_bytes(root) == 8 * GIB


def test_kinds(tmp_path: Path) -> None:
    root = system(tmp_path, cgroup="0::/\n", files={})
    assert topology.detect("cpu", root=root).kind == "cpu"
    assert topology.detect("torch-cpu", root=root).kind == "cpu"
    discrete = topology.detect("cuda", device_memory=lambda: (5 * GIB, 24 * GIB), root=root)
    assert (discrete.kind, discrete.total_bytes, discrete.available_bytes()) == ("discrete", 24 * GIB, 5 * GIB)
    tree = root / "proc/device-tree"
    tree.mkdir()
    (tree / "compatible").write_bytes(b"nvidia,p3767-0003\0nvidia,tegra234\0")
    unified = topology.detect("cuda", device_memory=lambda: (GIB, GIB), root=root)
    assert (unified.kind, unified.total_bytes, unified.available_bytes()) == ("unified", 16 * GIB, 8 * GIB)
    assert topology.detect("cpu", root=root).kind == "cpu"


def test_this_machine() -> None:
    here = topology.detect()
    assert 0 < here.available_bytes() <= here.total_bytes
    assert 0 < topology.process_memory() <= topology.peak_memory_bytes() * 1.05
    assert topology.peak_memory_bytes() < here.total_bytes * 4


@pytest.mark.skipif(sys.platform == "win32", reason="no ulimit")
def test_an_address_space_limit_counts() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "from edgespec.memory import topology as t; print(t.host_total_bytes(), t.host_available_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, available = map(int, done.stdout.split())
    assert total <= GIB
    assert 0 <= available < GIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_is_this_process_s_own() -> None:
    """A small child of a process that once was big must not report the parent's peak."""
    code = (
        "import subprocess, sys; big = bytearray(300 * 2**20); del big\n"
        "child = 'from edgespec.memory.topology import peak_memory_bytes as p; print(p())'\n"
        "print(subprocess.run([sys.executable, '-c', child], capture_output=True, text=True, check=True).stdout)\n"
        "from edgespec.memory.topology import peak_memory_bytes as p; print(p())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    child, parent = map(int, done.stdout.split())
    assert child < 200 * 2**20
    assert parent > 300 * 2**20


def board(root: Path, *, model: str, compatible: str, release: str = "", meminfo: str = "") -> Path:
    """A Jetson: 8 GiB, 2 GiB free, and most of the rest in the page cache."""
    total = f"MemTotal: {8 * 2**20} kB\nMemFree: {2 * 2**20} kB\nMemAvailable: {6 * 2**20} kB\n{meminfo}"
    files = {"proc/meminfo": total, "proc/device-tree/model": model, "proc/device-tree/compatible": compatible}
    for path, text in {**files, "etc/nv_tegra_release": release}.items():
        if text:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    return root


def test_an_orin_nano(tmp_path: Path) -> None:
    """Free is what the kernel calls available: the driver's number (its second one here) counts page cache as used."""
    release = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: ...\n"
    name, chip = "NVIDIA Jetson Orin Nano Developer Kit\0", "nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0"
    root = board(tmp_path, model=name, compatible=chip, release=release, meminfo="NvMapMemUsed: 1024 kB\n")
    seen = topology.detect("cuda", device_memory=lambda: (2 * GIB, 8 * GIB), root=root)
    assert (seen.kind, seen.name) == ("unified", "NVIDIA Jetson Orin Nano Developer Kit")
    assert (seen.total_bytes, seen.available_bytes()) == (8 * GIB, 6 * GIB)
    assert (topology.soc(root), topology.l4t_version(root)) == ("tegra234", "36.4.3")
    assert topology.nvmap_bytes(root) == 2**20
    assert seen.used_bytes() > topology.process_memory() // 2 + 2**20


def test_a_thor_does_not_tell_what_its_gpu_holds(tmp_path: Path) -> None:
    root = board(tmp_path, model="NVIDIA Jetson AGX Thor Developer Kit\0", compatible="nvidia,tegra264\0")
    seen = topology.detect("cuda", root=root)
    assert (seen.kind, topology.soc(root), topology.l4t_version(root)) == ("unified", "tegra264", "")
    assert topology.nvmap_bytes(root) is None
    assert seen.used_bytes() > 0


def test_a_jetson_s_container_without_a_device_tree(tmp_path: Path) -> None:
    root = system(tmp_path, cgroup="0::/\n", files={})
    (root / "tmp").mkdir()
    (root / "tmp/nv_jetson_model").write_bytes(b"NVIDIA Jetson Orin NX\0")
    assert topology.detect("cuda", device_memory=lambda: (1, 1), root=root).kind == "unified"


def test_nvmap_from_the_clients_table(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/debug/nvmap/iovmm"
    folder.mkdir(parents=True)
    table = "CLIENT PROCESS PID SIZE\nuser  python  17  4096K\ntotal   5120K\n"
    (folder / "clients").write_text(table)
    assert topology.nvmap_bytes(tmp_path) == 5120 * 1024


def test_a_desktop_and_a_laptop(tmp_path: Path) -> None:
    root = system(tmp_path, cgroup="0::/\n", files={})
    (root / "sys/class/dmi/id").mkdir(parents=True)
    (root / "sys/class/dmi/id/product_name").write_text("ThinkPad X1\n")
    desktop = topology.detect("cuda", device_memory=lambda: (20 * GIB, 24 * GIB), root=root)
    assert (desktop.kind, desktop.available_bytes()) == ("discrete", 20 * GIB)
    laptop = topology.detect("cpu", root=root)
    assert (laptop.kind, laptop.name, laptop.available_bytes()) == ("cpu", "ThinkPad X1", 8 * GIB)
    assert topology.nvmap_bytes(root) is None


def test_the_driver_knows_best_whether_a_gpu_is_integrated(tmp_path: Path) -> None:
    """Others than Tegras have one memory too."""
    root = system(tmp_path, cgroup="0::/\n", files={})
    spark = topology.detect("cuda", device_memory=lambda: (GIB, 128 * GIB), integrated=True, root=root)
    assert (spark.kind, spark.available_bytes()) == ("unified", 8 * GIB)


@pytest.mark.parametrize(
    ("disk", "rotational", "words"),
    [("nvme0n1", "0", "NVMe"), ("mmcblk1", "0", "SD or eMMC card"), ("sda", "1", "hard disk"), ("sdb", "0", "SSD")],
)
def test_storage(tmp_path: Path, disk: str, rotational: str, words: str) -> None:
    """A partition is a folder inside its disk's, where the queue is."""
    partition = tmp_path / "sys/devices" / disk / f"{disk}p1"
    partition.mkdir(parents=True)
    (partition.parent / "queue").mkdir()
    (partition.parent / "queue/rotational").write_text(rotational + "\n")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block/8:3").symlink_to(partition)
    device = 8 << 8 | 3
    assert topology.storage_name(tmp_path, tmp_path, device=device) == words
    assert topology.storage_name(tmp_path, tmp_path, device=device + 1) == ""
