"""The measured supplies (rails) of a board, read from its current sensors, and which of them make its total.

The total is one rail where the board has one for its input, and a sum on AGX Orin, which has none; the other rails are
parts of it and must not be added. Jetson's sensors are ina3221 chips, whose files hwmon names (in1_label, in1_input in
millivolts, curr1_input in milliamperes): the kernel's Documentation/hwmon/ina3221.rst.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgespec.telemetry.system_files import line, matching, number

INPUTS = ("VDD_IN", "VIN", "POM_5V_IN")  # Orin Nano and NX (and TX2), Thor, the first Nano
AGX_PARTS = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
_SHUNT_CHANNELS = 3  # in4 to in7 of the sensor are shunt voltages and their sum, not rails


def total(rails: Mapping[str, float]) -> float | None:
    """What the whole board draws, in the unit of `rails`; None where the rails do not say (a part is missing)."""
    for name in INPUTS:
        if name in rails:
            return rails[name]
    if all(name in rails for name in AGX_PARTS):
        return sum(rails[name] for name in AGX_PARTS)
    return None


def needed(names: set[str]) -> set[str]:
    """Those of the rails that the total is made of; none if there is no total."""
    for name in INPUTS:
        if name in names:
            return {name}
    return set(AGX_PARTS) if names.issuperset(AGX_PARTS) else set()


@dataclass(frozen=True, slots=True)
class Rail:
    """One channel of a sensor. folder: its hwmon folder, whose number may be another after each boot."""

    name: str
    folder: Path
    channel: int

    def watts(self) -> float | None:
        millivolts = number(self.folder / f"in{self.channel}_input")
        milliamperes = number(self.folder / f"curr{self.channel}_input")
        if millivolts is None or milliamperes is None:
            return None
        return millivolts * milliamperes * 1e-6

    def alarms(self) -> list[str]:
        """Which of the current limits of this rail are exceeded now: "warning", "critical"."""
        kinds = (("max_alarm", "warning"), ("crit_alarm", "critical"))
        return [word for file, word in kinds if number(self.folder / f"curr{self.channel}_{file}")]


def find_rails(root: Path) -> tuple[Rail, ...]:
    """The rails that the ina3221 drivers of the board name. Channels that are not connected ("NC") are left out."""
    rails = []
    for folder in matching(root / "sys/bus/i2c/drivers/ina3221", "*/hwmon/hwmon*"):
        for label in matching(folder, "in*_label"):
            found, name = re.fullmatch(r"in(\d+)_label", label.name), line(label)
            channel = int(found[1]) if found else 0
            if 1 <= channel <= _SHUNT_CHANNELS and name not in ("", "NC") and "sum of" not in name:
                rails.append(Rail(name, folder, channel))
    return tuple(rails)
