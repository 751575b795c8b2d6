"""What the whole board draws now, in watts: from its own current sensors, from jtop, or from tegrastats."""

from __future__ import annotations

import importlib
import logging
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from edgespec.telemetry.rails import Rail, find_rails, needed, total
from edgespec.telemetry.system_files import SYSTEM_ROOT
from edgespec.telemetry.tegrastats import parse

_log = logging.getLogger(__name__)
_HANGS = 3.0  # seconds without a line of tegrastats


class PowerSource(Protocol):
    """name: where the watts come from. interval: seconds after which there is a new value."""

    name: str
    interval: float

    def watts(self) -> float | None: ...

    def close(self) -> None: ...


class SensorPower:
    """The rails that make the total, read from sysfs: two small files each."""

    name = "ina3221"
    interval = 0.1

    def __init__(self, rails: tuple[Rail, ...]) -> None:
        names = needed({rail.name for rail in rails})
        self._rails = tuple(rail for rail in rails if rail.name in names)

    def watts(self) -> float | None:
        found = {rail.name: rail.watts() for rail in self._rails}
        return total({name: watts for name, watts in found.items() if watts is not None})

    def close(self) -> None: ...


class JtopPower:
    """The rails that the service of jetson-stats reads. It is never installed by edgespec: its licence is AGPL-3.0."""

    name = "jtop"
    interval = 0.5

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    def connect(cls) -> JtopPower | None:
        """A running client, or None where jtop is not installed or its service does not answer."""
        try:
            client = importlib.import_module("jtop").jtop(interval=cls.interval)
            client.start()
        except Exception as error:  # it has exceptions of its own for its service, socket and version
            _log.debug("no jtop: %s", error)
            return None
        return cls(client)

    def watts(self) -> float | None:
        try:
            # Its own "tot" adds up all rails of boards that it does not know, parts and whole.
            rails = {name: float(rail["power"]) for name, rail in self._client.power["rail"].items()}
        except Exception:
            return None
        milliwatts = total(rails)
        return None if milliwatts is None else milliwatts / 1000

    def close(self) -> None:
        with suppress(Exception):
            self._client.close()


class TegrastatsPower:
    """The lines of a tegrastats of our own, for boards whose sensors are nowhere else (a container without /sys)."""

    name = "tegrastats"
    interval = 0.25

    def __init__(self, command: str) -> None:
        self._last: tuple[float | None, float] = None, time.monotonic()  # watts, and when they came
        milliseconds = str(int(self.interval * 1000))
        self._process = subprocess.Popen(
            [command, "--interval", milliseconds], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._follow, name="edgespec-tegrastats", daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):  # the pipe is closed under the reader
            for text in self._process.stdout:
                read = parse(text)
                self._last = None if read is None else read.watts, time.monotonic()
        self._last = None, time.monotonic()

    def watts(self) -> float | None:
        """Of the last line; None if none came for a while: it hangs."""
        watts, came = self._last
        return watts if time.monotonic() - came < _HANGS else None

    def close(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)


def find_power(root: Path) -> PowerSource | None:
    """The best source of this board's watts, or None: most computers do not measure what they draw.

    jtop and tegrastats are asked only on a Jetson, and only if its sensors tell no total.
    """
    sensors = SensorPower(find_rails(root))
    if sensors.watts() is not None:
        return sensors
    if root != SYSTEM_ROOT or not (root / "etc/nv_tegra_release").exists():
        return None
    client = JtopPower.connect()
    if client is not None:
        return client
    command = shutil.which("tegrastats")
    with suppress(OSError):
        return TegrastatsPower(command) if command else None
    return None
