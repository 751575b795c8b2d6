"""Lines of NVIDIA's tegrastats, of every release from JetPack 4 to 7, and what a log of them adds up to.

What a line holds depends on board, release and rights (without root there is neither memory clock nor GPU clock), so
each part is looked for by its own shape and may be missing. Fields: the utility's page in NVIDIA's Jetson Linux
Developer Guide (r35.6.4, r36.5, r38.4).

    python -m edgespec.telemetry.tegrastats LOG     prints mean watts, joules, highest temperature, ... as JSON
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from edgespec.telemetry.rails import total

_UNITS = {"kB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_TIME = re.compile(r"^\s*(\d\d-\d\d-\d{4} \d\d:\d\d:\d\d)\s")
_RAM = re.compile(r"\bRAM (\d+)/(\d+)(kB|MB|GB)(?: \(lfb (\d+)x(\d+)(kB|MB|GB)\))?")
_SWAP = re.compile(r"\bSWAP (\d+)/(\d+)(kB|MB|GB)(?: \(cached (\d+)(?:kB|MB|GB)\))?")
_CPU = re.compile(r"\bCPU \[([^\]]*)\]")
_CLOCK = r"(?:(\d+)%)?(?:@(?:\[([\d,]*)\]|(\d+)))?"
_EMC = re.compile(r"\bEMC_FREQ " + _CLOCK)
_GPU = re.compile(r"\bGR3D_FREQ " + _CLOCK)
_TEMPERATURE = re.compile(r"\b(\w+)@(-?\d+(?:\.\d+)?)C\b")
# Before JetPack 5 rails have no unit: only their names, in capitals with an underscore, tell them from the rest.
_RAIL = re.compile(r"\b([A-Z][A-Za-z0-9]*(?:_\w+)?) (\d+)(mW)?/\d+")
_OFF_CELSIUS = -200.0  # a sensor that is off reads -256


@dataclass(frozen=True, slots=True)
class Clock:
    """percent: how busy, None where it is not said. mhz: one value for each unit, () where it is not said."""

    percent: int | None = None
    mhz: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tegrastats:
    """One line. Bytes, milliwatts, degrees Celsius, MHz, percent; None or empty for what the line does not say.

    largest_free: bytes of one of the largest free blocks of memory; largest_free_count: how many there are.
    cores: None for a core that is off. temperatures: by zone in lower case, without sensors that are off. rails: the
    value of this moment, without those that are not connected.
    """

    time: datetime | None = None
    ram_used: int | None = None
    ram_total: int | None = None
    largest_free: int | None = None
    largest_free_count: int = 0
    swap_used: int | None = None
    swap_total: int | None = None
    cores: tuple[Clock | None, ...] = ()
    emc: Clock = Clock()
    gpu: Clock = Clock()
    temperatures: dict[str, float] = field(default_factory=dict)
    rails: dict[str, int] = field(default_factory=dict)

    @property
    def watts(self) -> float | None:
        """What the whole board draws."""
        milliwatts = total(self.rails)
        return None if milliwatts is None else milliwatts / 1000


def parse(line: str) -> Tegrastats | None:
    """What the line says, or None if it is none of tegrastats' lines (cut short, a message, another program's)."""
    values: dict[str, Any] = {**_memory(line), "cores": _cores(line), "rails": _rails(line)}
    values["temperatures"] = {
        name.lower(): float(celsius) for name, celsius in _TEMPERATURE.findall(line) if float(celsius) > _OFF_CELSIUS
    }
    for key, pattern in (("emc", _EMC), ("gpu", _GPU)):
        if found := pattern.search(line):
            values[key] = _clock(found)
    if not any(values.values()):
        return None
    stamp = _TIME.match(line)
    return Tegrastats(time=_moment(stamp[1]) if stamp else None, **values)


def _memory(line: str) -> dict[str, int]:
    values: dict[str, int] = {}
    if found := _RAM.search(line):
        unit = _UNITS[found[3]]
        values.update(ram_used=int(found[1]) * unit, ram_total=int(found[2]) * unit)
        if found[4]:
            values.update(largest_free_count=int(found[4]), largest_free=int(found[5]) * _UNITS[found[6]])
    if found := _SWAP.search(line):
        unit = _UNITS[found[3]]
        values.update(swap_used=int(found[1]) * unit, swap_total=int(found[2]) * unit)
    return values


def _cores(line: str) -> tuple[Clock | None, ...]:
    found = _CPU.search(line)
    if not found:
        return ()
    clocks = (re.fullmatch(_CLOCK, core.strip()) for core in found[1].split(","))
    return tuple(_clock(clock) if clock else None for clock in clocks)


def _clock(found: re.Match[str]) -> Clock:
    """From "63%", "63%@621", "63%@[621]", "0%@[1300,1300]" or "@[314,314,314]"."""
    listed = [found[3]] if found[3] else (found[2] or "").split(",")
    return Clock(int(found[1]) if found[1] else None, tuple(int(mhz) for mhz in listed if mhz))


def _rails(line: str) -> dict[str, int]:
    """A name without underscore counts only with a unit: "RAM 5/7" has the same shape."""
    return {name: int(now) for name, now, unit in _RAIL.findall(line) if name != "NC" and (unit or "_" in name)}


def _moment(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%m-%d-%Y %H:%M:%S")
    except ValueError:
        return None


def summary(lines: Iterable[str]) -> dict[str, Any]:
    """What a log adds up to. joules is None where the lines have no time, or fewer than two tell the watts.

    Times have whole seconds: the lines of one second share it evenly, and `seconds` is right to about one.
    """
    read = [parse(line) for line in lines if line.strip()]
    known = [one for one in read if one is not None]
    watts = [one.watts for one in known if one.watts is not None]
    times = [one.time for one in known if one.time is not None and one.watts is not None]
    seconds = (max(times) - min(times)).total_seconds() if times else None
    mean = sum(watts) / len(watts) if watts else None
    return {
        "lines": len(known),
        "unreadable": len(read) - len(known),
        "seconds": seconds,
        "watts_mean": mean,
        "watts_max": max(watts, default=None),
        "joules": mean * seconds if mean is not None and seconds and len(times) == len(watts) else None,
        "celsius_max": max((max(one.temperatures.values()) for one in known if one.temperatures), default=None),
        "ram_used_max": max((one.ram_used for one in known if one.ram_used is not None), default=None),
        "swap_used_max": max((one.swap_used for one in known if one.swap_used is not None), default=None),
        "largest_free_min": min(
            (one.largest_free * one.largest_free_count for one in known if one.largest_free is not None), default=None
        ),
        "gpu_percent_mean": _mean([one.gpu.percent for one in known if one.gpu.percent is not None]),
    }


def _mean(values: list[int]) -> float | None:
    return sum(values) / len(values) if values else None


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m edgespec.telemetry.tegrastats LOG\n")
        return 2
    try:
        lines = Path(arguments[0]).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        sys.stderr.write(f"{arguments[0]} cannot be read: {error.strerror or error}\n")
        return 1
    print(json.dumps(summary(lines), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
