"""Which board this is, its power modes, clocks and heat, read from made-up roots."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.memory import topology
from edgespec.telemetry import board, system_files, thermal
from tests.support import boards


@pytest.mark.parametrize(
    ("fake", "words", "sm"),
    [
        (boards.NANO_8, "Jetson Orin Nano 8GB (tegra234, SM 8.7), L4T 36.4.3, JetPack 6.2, CUDA 12.6.68", 87),
        (boards.NANO_4, "Jetson Orin Nano 4GB (tegra234, SM 8.7), L4T 36.4.3, JetPack 6.2, CUDA 12.6.68", 87),
        (boards.NX_16, "Jetson Orin NX 16GB (tegra234, SM 8.7), L4T 36.4.7, JetPack 6.2.1, CUDA 12.6.68", 87),
        (boards.AGX, "Jetson AGX Orin 64GB (tegra234, SM 8.7), L4T 36.5.0, JetPack 6.2.2, CUDA 12.6.68", 87),
        (boards.THOR, "Jetson AGX Thor (tegra264, SM 11.0), L4T 38.4, JetPack 7.1, CUDA 13.0.48", 110),
        (boards.DESKTOP, "NVIDIA GeForce RTX 4090, driver 550.120", None),
        (boards.PLAIN, "no NVIDIA GPU", None),
    ],
)
def test_each_board(fake: boards.FakeBoard, words: str, sm: int | None, tmp_path: Path) -> None:
    found = board.detect(fake.write(tmp_path))
    assert str(found) == words
    assert found.sm == sm
    assert found.jetson == bool(fake.model)
    assert found.has_gpu == (fake is not boards.PLAIN)


@pytest.mark.parametrize(
    ("l4t", "jetpack", "cuda", "major"),
    [
        ("36.4.0", "6.1", "12.6", 6),
        ("36.4.4", "6.2.1", "12.6", 6),
        ("36.4.9", "6", "12.6", 6),  # one that is not listed must not pass for 36.4.0
        ("36.3.0", "6.0", "12.2", 6),
        ("38.2.1", "7.0", "13.0", 7),
        ("39.2.0", "7.2", "13.2", 7),
        ("36.6.0", "6", "", 6),
        ("39.9.1", "7", "", 7),
        ("35.4.1", "5", "", 5),
        ("99.1", "", "", None),
    ],
)
def test_releases(l4t: str, jetpack: str, cuda: str, major: int | None, tmp_path: Path) -> None:
    found = board.detect(replace(boards.NANO_8, l4t=l4t, cuda="").write(tmp_path))
    assert (found.l4t, found.jetpack, found.cuda, found.jetpack_major) == (l4t, jetpack, cuda, major)


def test_an_unknown_board(tmp_path: Path) -> None:
    fake = replace(
        boards.NANO_8, model="ACME Carrier", compatible="acme,x1\0nvidia,p9999-0001\0nvidia,tegra999\0", l4t=""
    )
    found = board.detect(fake.write(tmp_path))
    assert (found.jetson, found.module, found.sm) == (True, "", None)
    assert str(found) == "ACME Carrier (tegra999), L4T unknown, JetPack unknown, CUDA 12.6.68"


def test_a_container_with_nothing_but_the_kernel_s_name(tmp_path: Path) -> None:
    boards.put(tmp_path, "proc/sys/kernel/osrelease", "5.15.148-tegra\n")
    found = board.detect(tmp_path)
    assert found.jetson
    assert str(found) == "a Jetson, L4T unknown, JetPack unknown, CUDA unknown"
    assert topology.detect("cuda", root=tmp_path).kind == "unified"


def test_a_board_by_its_name_alone(tmp_path: Path) -> None:
    boards.put(tmp_path, "tmp/nv_jetson_model", "NVIDIA Jetson Orin NX\0")
    assert board.detect(tmp_path).module == "Orin NX"


def test_a_damaged_version_file(tmp_path: Path) -> None:
    root = boards.NANO_8.write(tmp_path)
    for text in ("", "{", "[]", '{"cuda": 5}'):
        boards.put(root, "usr/local/cuda/version.json", text)
        assert board.detect(root).cuda == "12.6"


def test_power_modes(tmp_path: Path) -> None:
    modes = board.power_modes(boards.NANO_8.write(tmp_path))
    assert (modes.current, modes.name) == (1, "25W")
    assert modes.names == boards.NANO_MODES
    assert modes.fastest() == (2, "MAXN_SUPER")
    assert modes.slower("MAXN_SUPER")
    assert not modes.slower("15W")
    agx = board.power_modes(boards.AGX.write(tmp_path / "agx"))
    assert agx.fastest() == (0, "MAXN")
    assert board.PowerModes(3, {3: "MODE_15W"}).slower("MODE_30W")


def test_power_modes_with_attributes_in_another_order(tmp_path: Path) -> None:
    boards.put(
        tmp_path, "etc/nvpmodel.conf", "<POWER_MODEL NAME=15W ID=0 >\n< POWER_MODEL ID=x NAME=bad >\n<POWER_MODEL>\n"
    )
    boards.put(tmp_path, "var/lib/nvpmodel/status", "pmode:0000\n")
    modes = board.power_modes(tmp_path)
    assert (modes.name, modes.names) == ("15W", {0: "15W"})


def test_no_power_modes(tmp_path: Path) -> None:
    modes = board.power_modes(tmp_path)
    assert (modes.current, modes.name, modes.fastest()) == (None, "", None)
    assert not modes.slower("25W")
    assert board.PowerModes(7, {}).name == "mode 7"


@pytest.mark.parametrize("fake", [boards.NANO_8, boards.THOR])
def test_gpu_clock(fake: boards.FakeBoard, tmp_path: Path) -> None:
    clock = board.gpu_clock(fake.write(tmp_path))
    assert clock is not None
    assert (clock.hertz, clock.most, clock.load, clock.pinned) == (306_000_000, 1_020_000_000, 0.63, False)
    pinned = board.gpu_clock(replace(fake, pinned=True).write(tmp_path / "pinned"))
    assert pinned is not None
    assert pinned.pinned


def test_gpu_clock_that_is_not_told(tmp_path: Path) -> None:
    boards.put(tmp_path, "sys/class/devfreq/1.emc/device/of_node/name", "emc\0")
    assert board.gpu_clock(tmp_path) is None
    boards.put(tmp_path, "sys/class/devfreq/2.gpu/device/of_node/name", "gpu\0")
    clock = board.gpu_clock(tmp_path)
    assert clock == board.GpuClock(None, None, None, None)
    assert clock.pinned is None


def test_heat(tmp_path: Path) -> None:
    root = boards.AGX.write(tmp_path)
    assert thermal.temperatures(root) == {"cpu": 48.9, "gpu": 49.6, "tj": 49.6}  # cv0 is off
    assert thermal.throttling(root) == ()


def test_throttling(tmp_path: Path) -> None:
    root = replace(boards.AGX, throttled=("gpu-throttle-alert", "cpufreq-cpu0")).write(tmp_path)
    assert thermal.throttling(root) == ("the GPU is too hot", "heat lowers the clocks of cpu0")


def test_a_power_gated_zone_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it fails, though the file is there."""
    root, whole = boards.NANO_8.write(tmp_path), Path.read_bytes

    def gated(self: Path) -> bytes:
        if self.name == "temp" and self.parent.name == "thermal_zone1":
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return whole(self)

    monkeypatch.setattr(Path, "read_bytes", gated)
    assert thermal.temperatures(root) == {"cpu": 48.9, "tj": 49.6}


def test_psutil_where_there_are_no_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    sensors = {"coretemp": [SimpleNamespace(current=50.0), SimpleNamespace(current=61.0)], "empty": []}
    fake: Any = SimpleNamespace(sensors_temperatures=lambda: sensors)
    monkeypatch.setattr(thermal, "psutil", fake)
    monkeypatch.setattr(thermal, "matching", lambda folder, pattern: [])
    assert thermal.temperatures(system_files.SYSTEM_ROOT) == {"coretemp": 61.0}
    monkeypatch.setattr(thermal, "psutil", SimpleNamespace())  # macOS, Windows
    assert thermal.temperatures(system_files.SYSTEM_ROOT) == {}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert system_files.text(tmp_path) is None  # a folder
    assert system_files.line(tmp_path / "no") == ""
    assert system_files.number(boards.put(tmp_path, "words", "max")) is None
    assert system_files.number(boards.put(tmp_path, "negative", "-256000\n")) == -256000
    assert system_files.matching(tmp_path / "no", "*") == []
