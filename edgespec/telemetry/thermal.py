"""How hot the device is, and whether it slows itself down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from edgespec.telemetry.rails import Rail
from edgespec.telemetry.system_files import SYSTEM_ROOT, line, matching, number

HOT_CELSIUS = 90.0  # from here on a Jetson is about to slow down
_OFF_CELSIUS = -200.0  # a zone that is switched off reads -256
# Kernel devices that lower clocks: Tegra's alerts, and those that cap the clocks of CPU and GPU. Fans are none.
_SLOWING = ("cpufreq-", "devfreq-")
_ALERT = "-throttle-alert"


def temperatures(root: Path) -> dict[str, float]:
    """Degrees Celsius by thermal zone ("gpu", "tj"), without the zones that are off or power-gated now.

    Computers without thermal zones: the hottest reading of each sensor that psutil knows.
    """
    zones = {}
    for zone in matching(root / "sys/class/thermal", "thermal_zone*"):
        millidegrees = number(zone / "temp")
        if millidegrees is not None and millidegrees / 1000 > _OFF_CELSIUS:
            zones[line(zone / "type").removesuffix("-thermal") or zone.name] = millidegrees / 1000
    return zones if zones or root != SYSTEM_ROOT else _psutil_temperatures()


def _psutil_temperatures() -> dict[str, float]:
    read = getattr(psutil, "sensors_temperatures", None)  # there is none on macOS and Windows
    chips: Mapping[str, list[Any]] = {}
    try:
        chips = read() if read is not None else {}
    except OSError:
        pass
    return {name: max(sensor.current for sensor in sensors) for name, sensors in chips.items() if sensors}


def throttling(root: Path, rails: tuple[Rail, ...] = ()) -> tuple[str, ...]:
    """What slows the device down now, in words: ("the GPU is too hot", "VDD_IN draws too much").

    Heat: cooling devices of the kernel that are at work. Current: the alarms of the rails' sensors.
    """
    causes = []
    for device in matching(root / "sys/class/thermal", "cooling_device*"):
        kind = line(device / "type")
        if (number(device / "cur_state") or 0) > 0:
            if kind.endswith(_ALERT):
                causes.append(f"the {kind.removesuffix(_ALERT).upper()} is too hot")
            elif kind.startswith(_SLOWING):
                causes.append(f"heat lowers the clocks of {kind.split('-', 1)[1]}")
    causes.extend(f"{rail.name} draws too much" for rail in rails if rail.alarms())
    return tuple(causes)
