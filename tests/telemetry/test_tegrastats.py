"""tegrastats' lines of every release, as real boards printed them, and what a log adds up to."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from edgespec.telemetry.tegrastats import Clock, parse, summary
from tests.support import tegrastats_lines as real

MIB = 1 << 20


def test_an_orin_nano_line_in_full() -> None:
    read = parse(real.ORIN_NANO)
    assert read is not None
    assert read.time == datetime(2024, 11, 15, 8, 38, 9)
    assert (read.ram_used, read.ram_total) == (6185 * MIB, 7620 * MIB)
    assert (read.largest_free_count, read.largest_free) == (8, 2 * MIB)
    assert (read.swap_used, read.swap_total) == (851 * MIB, 3810 * MIB)
    assert read.cores[1] == Clock(11, (729,))
    assert len(read.cores) == 6
    assert read.emc == Clock(43, (2133,))
    assert read.gpu == Clock(63, (621,))
    assert read.temperatures["tj"] == 53.968
    assert len(read.temperatures) == 6
    assert read.rails == {"VDD_IN": 12479, "VDD_CPU_GPU_CV": 4667, "VDD_SOC": 2817}


@pytest.mark.parametrize(
    ("line", "gpu", "emc"),
    [
        (real.ORIN_NANO_SUPER, Clock(0, (1018,)), Clock(0, (3199,))),
        (real.NOT_ROOT, Clock(0), Clock()),
        (real.THOR, Clock(None, (314, 314, 314)), Clock(0, (2750,))),
        (real.THOR_SHORT, Clock(), Clock()),
        (real.AGX_ORIN, Clock(0, (0,)), Clock(0, (204,))),
        (real.TX2, Clock(0, (114,)), Clock(1, (1866,))),
        ("RAM 1/2MB GR3D_FREQ 0%@[1300,1300] cpu@40C", Clock(0, (1300, 1300)), Clock()),
    ],
)
def test_every_form_of_the_gpu_and_memory_clocks(line: str, gpu: Clock, emc: Clock) -> None:
    read = parse(line)
    assert read is not None
    assert (read.gpu, read.emc) == (gpu, emc)


@pytest.mark.parametrize(
    ("line", "watts"),
    [
        (real.ORIN_NANO_SUPER, 5.971),  # VDD_IN
        (real.THOR, 19.780),  # VIN, of which VIN_SYS_5V0 is a part
        (real.AGX_ORIN, 2.390 + 0.796 + 3.522),  # no rail of the whole board; VDDQ hangs on VIN_SYS_5V0
        (real.TX2, 5.297),  # without a unit
        ("RAM 1/2MB VDD_GPU_SOC 2390mW/2390mW VDD_CPU_CV 796mW/796mW", None),  # a part is missing
        ("RAM 1/2MB cpu@40C", None),
    ],
)
def test_the_board_s_watts(line: str, watts: float | None) -> None:
    read = parse(line)
    assert read is not None
    assert read.watts == (None if watts is None else pytest.approx(watts))


def test_sensors_and_cores_that_are_off_and_rails_that_are_not_connected() -> None:
    agx, thor = parse(real.AGX_ORIN), parse(real.THOR_SHORT)
    assert agx is not None
    assert thor is not None
    assert "gpu" not in agx.temperatures  # -256 C
    assert agx.temperatures["cpu"] == 41.437
    assert "NC" not in agx.rails
    assert thor.cores == (Clock(12, (972,)), Clock(10, (972,)), None, Clock(33, (1890,)))


def test_what_a_line_does_not_say_is_none() -> None:
    read = parse(real.ORIN_NANO_SUPER)
    assert read is not None
    assert read.swap_total is None  # swap is off
    tx2 = parse(real.TX2)
    assert tx2 is not None
    assert tx2.time is None
    small = parse("RAM 3276/7859MB (lfb 1x512kB) cpu@40C")
    assert small is not None
    assert (small.largest_free_count, small.largest_free) == (1, 512 * 1024)


@pytest.mark.parametrize("line", ["", "tegrastats: command not found", "x" * 5000, "RAM 519/76", "\0\0", "12-34-5678"])
def test_other_lines_are_none(line: str) -> None:
    assert parse(line) is None


@pytest.mark.parametrize("line", real.ALL)
def test_a_line_that_is_cut_anywhere_says_nothing_wrong(line: str) -> None:
    """A log that is written while it is read ends in the middle of a line."""
    whole = parse(line)
    assert whole is not None
    for end in range(len(line)):
        part = parse(line[:end])
        if part is not None:
            assert part.ram_total in (None, whole.ram_total)
            assert all(whole.rails[name] == value for name, value in part.rails.items())
            assert part.watts is None or part.watts == pytest.approx(whole.watts)


def test_a_time_that_is_none_is_no_reason_to_stop() -> None:
    read = parse("99-99-2024 08:38:09 " + real.TX2)
    assert read is not None
    assert read.time is None


def log() -> list[str]:
    """Four lines over two seconds: 10, 20, 20 and 30 W."""
    rows = [("01:00:00", 10), ("01:00:01", 20), ("01:00:01", 20), ("01:00:02", 30)]
    return [
        f"01-02-2026 {time} RAM {watts}/100MB (lfb {watts}x4MB) cpu@{watts}.5C VDD_IN {watts}000mW/1mW"
        for time, watts in rows
    ]


def test_a_log_adds_up() -> None:
    found = summary([*log(), "noise", ""])
    assert found["lines"] == 4
    assert found["unreadable"] == 1
    assert (found["seconds"], found["watts_mean"], found["watts_max"], found["joules"]) == (2.0, 20.0, 30.0, 40.0)
    assert (found["celsius_max"], found["ram_used_max"], found["largest_free_min"]) == (30.5, 30 * MIB, 40 * MIB)
    assert found["swap_used_max"] is None


def test_a_log_without_times_or_watts_has_no_energy() -> None:
    assert summary([real.TX2, real.TX2])["joules"] is None
    assert summary([])["joules"] is None
    assert summary([*log(), "RAM 1/100MB VDD_IN 90000mW/1mW"])["joules"] is None  # not all of it can be placed
    assert summary(["01-02-2026 01:00:00 RAM 1/2MB", "01-02-2026 01:00:09 RAM 1/2MB"])["joules"] is None


def test_as_a_program(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("\n".join(log()))
    command = [sys.executable, "-m", "edgespec.telemetry.tegrastats"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["joules"] == 40.0
    done = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "No such file" in done.stderr
