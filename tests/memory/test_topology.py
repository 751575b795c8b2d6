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
