"""Watts from the board's sensors, from jtop and from tegrastats; what is missing is None, never a guess."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from edgespec.telemetry import power
from edgespec.telemetry.power import JtopPower, SensorPower, TegrastatsPower, find_power
from edgespec.telemetry.rails import find_rails, needed, total
from tests.support import boards
from tests.support import tegrastats_lines as real


@pytest.mark.parametrize(
    ("board", "watts"),
    [
        (boards.NANO_8, 5.97),
        (boards.AGX, 19 * 0.126 + 19 * 0.042 + 5 * 0.704),
        (boards.THOR, 20 * 0.989),
    ],
)
def test_the_total_of_each_board(board: boards.FakeBoard, watts: float, tmp_path: Path) -> None:
    source = find_power(board.write(tmp_path))
    assert source is not None
    assert source.name == "ina3221"
    assert source.watts() == pytest.approx(watts)


def test_other_computers_do_not_tell(tmp_path: Path) -> None:
    assert find_power(boards.DESKTOP.write(tmp_path)) is None
    assert find_power(tmp_path / "nothing") is None


def test_shunts_and_unconnected_channels_are_no_rails(tmp_path: Path) -> None:
    names = [rail.name for rail in find_rails(boards.AGX.write(tmp_path))]
    assert names == ["VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"]


def test_only_the_rails_of_the_total_are_needed() -> None:
    assert needed({"VDD_IN", "VDD_SOC"}) == {"VDD_IN"}
    assert needed({"VIN", "VIN_SYS_5V0"}) == {"VIN"}
    assert needed({"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "X"}) == {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}
    assert needed({"VDD_GPU_SOC"}) == set()
    assert total({"VDD_GPU_SOC": 1.0, "VDD_CPU_CV": 1.0}) is None


def test_a_rail_that_vanishes(tmp_path: Path) -> None:
    source = SensorPower(find_rails(boards.AGX.write(tmp_path)))
    assert source.watts() is not None
    next(tmp_path.glob("sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon2/curr2_input")).unlink()
    assert source.watts() is None  # two of three parts are not the whole


def test_a_rail_that_says_nonsense(tmp_path: Path) -> None:
    source = SensorPower(find_rails(boards.NANO_8.write(tmp_path)))
    next(tmp_path.glob("sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon2/in1_input")).write_text("?\n")
    assert source.watts() is None


def test_alarms(tmp_path: Path) -> None:
    rails = find_rails(boards.NANO_8.write(tmp_path))
    assert rails[0].alarms() == []
    (rails[0].folder / "curr1_crit_alarm").write_text("1\n")
    assert rails[0].alarms() == ["critical"]


class FakeJtop:
    """What `jtop.jtop` is, as far as it is used."""

    def __init__(self, interval: float) -> None:
        self.power: Any = {
            "rail": {"VIN": {"power": 19780, "avg": 1}, "VDD_GPU": {"power": 1962, "avg": 1}},
            "tot": {"power": 21742},
        }
        self.closed = False

    def start(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_jtop_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("jtop")
    module.jtop = FakeJtop
    monkeypatch.setitem(sys.modules, "jtop", module)
    client = JtopPower.connect()
    assert client is not None
    assert client.watts() == 19.78  # not its "tot", which counts VDD_GPU twice
    client._client.power = {}
    assert client.watts() is None
    client.close()
    assert client._client.closed


def test_no_jtop_or_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jtop", None)
    assert JtopPower.connect() is None

    def refused(interval: float) -> None:
        raise ConnectionError("the jtop.service is not active")

    module: Any = types.ModuleType("jtop")
    module.jtop = refused
    monkeypatch.setitem(sys.modules, "jtop", module)
    assert JtopPower.connect() is None


def stub(folder: Path, script: str) -> str:
    command = folder / "tegrastats"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return str(command)


def until(happened: Any, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(happened())


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_tegrastats_as_a_source(tmp_path: Path) -> None:
    (tmp_path / "line").write_text(f"noise\n{real.ORIN_NANO}\n")
    source = TegrastatsPower(stub(tmp_path, f"cat {tmp_path}/line; exec sleep 60"))
    assert until(lambda: source.watts() == 12.479)
    source.close()
    assert source._process.poll() is not None
    assert until(lambda: source.watts() is None)  # the last value is not kept for ever


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_tegrastats_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TegrastatsPower(stub(tmp_path, f"echo '{real.ORIN_NANO}'; exec sleep 60"))
    assert until(lambda: source.watts() == 12.479)
    monkeypatch.setattr(power, "_HANGS", 0.0)
    assert source.watts() is None
    assert source._process.poll() is None
    source.close()


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_tegrastats_that_ends_by_itself(tmp_path: Path) -> None:
    source = TegrastatsPower(stub(tmp_path, "echo cannot open /dev/x >&2; exit 1"))
    source._process.wait(5)
    assert source.watts() is None
    source.close()


def test_neither_is_asked_on_a_computer_without_jetson_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/etc/nv_tegra_release").exists():
        pytest.skip("this is a Jetson")
    monkeypatch.setattr(power.shutil, "which", lambda name: pytest.fail("asked for " + name))
    monkeypatch.setattr(JtopPower, "connect", lambda: pytest.fail("asked for jtop"))
    assert find_power(Path("/")) is None
