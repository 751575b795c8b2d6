"""Devices as files with sourced numbers, and what a roofline makes of them: seconds of steps and loads.

A forward of `width` tokens takes the longer of reading its weights and of its arithmetic, then launches, then reads
keys and values. Nothing here was measured on such a device: results made with it are simulations, and say so.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError
from predictor.costs import CostTable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROFILES = Path(__file__).with_name("profiles")
MODELS = PROFILES / "models.toml"
POSITION = 300  # of the conversation, for its keys and values
WIDEST = 17
_SECTIONS = {
    "memory": {"bandwidth_gb_s": "bandwidth", "efficiency": "reads", "usable_gb": "usable"},
    "compute": {"tflops": "flops", "efficiency": "computes"},
    "launch": {"kernel_us": "kernel", "kernels_per_layer": "kernels_per_layer", "step_us": "step"},
    "storage": {"read_mb_s": "storage", "copy_s_per_gb": "copy", "slow_down": "slow_down"},
}
_UNITS = {"bandwidth": 1e9, "usable": 1e9, "flops": 1e12, "kernel": 1e-6, "step": 1e-6, "storage": 1e6, "copy": 1e-9}


@dataclass(frozen=True)
class Size:
    """A model. weights, read: bytes that it takes, and of them what one step reads. params: multiplied for a token."""

    name: str
    weights: float
    read: float
    params: float
    layers: int
    kv_bytes_per_token: float


@dataclass(frozen=True)
class Device:
    """A profile in bytes, seconds and operations. reads, computes: shares of the peaks that engines reach."""

    name: str
    bandwidth: float
    reads: float
    usable: float
    flops: float
    computes: float
    kernel: float
    kernels_per_layer: float
    step: float
    storage: float
    copy: float
    slow_down: float

    def forward(self, model: Size, width: int) -> float:
        """Seconds of one forward over `width` tokens."""
        reading = model.read / (self.bandwidth * self.reads)
        computing = 2 * model.params * width / (self.flops * self.computes)
        keys = model.kv_bytes_per_token * POSITION / (self.bandwidth * self.reads)
        return max(reading, computing) + keys + model.layers * self.kernels_per_layer * self.kernel + self.step

    def load(self, model: Size) -> float:
        """Seconds from storage into memory."""
        return model.weights / self.storage + model.weights * self.copy

    def reading(self, model: Size) -> float:
        """Seconds a token in which a model reads text that it missed, in pieces of 64."""
        return self.forward(model, 64) / 64

    def costs(self, target: Size, draft: Size, names: Sequence[str]) -> CostTable:
        """What a policy is told of this device. Lookup and phrases cost 10 microseconds; they are not in `names`."""
        verify = {width: self.forward(target, width) for width in range(1, WIDEST + 1)}
        step = self.forward(draft, 1)
        loads, reading = dict.fromkeys(names, self.load(draft)), dict.fromkeys(names, self.reading(draft))
        return CostTable(verify, dict.fromkeys(names, step), loads=loads, catch_up=reading)

    def slots(self, target: Size, draft: Size) -> int:
        """How many drafts fit beside the target; -1 if the target itself does not."""
        left = self.usable - target.weights
        return -1 if left < 0 else int(left // draft.weights)


def profile_names() -> list[str]:
    """The profiles that come with the program."""
    return sorted(path.stem for path in PROFILES.glob("*.toml") if path != MODELS)


def read_device(name: str) -> Device:
    """A profile by name or file. Raises ConfigError for one that is unknown or damaged, naming the value."""
    path = PROFILES / f"{name}.toml"
    if name not in profile_names():
        path = Path(name)
        if not path.suffix and not path.exists():
            raise ConfigError(
                f"There is no device profile {name!r}; there are {', '.join(profile_names())}, or a file."
            )
    data = _toml(path)
    values: dict[str, float] = {}
    for section, keys in _SECTIONS.items():
        table = data.get(section)
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: the section [{section}] is missing.")
        unknown = sorted(set(table) - set(keys))
        if unknown:
            raise ConfigError(f"{path}: [{section}] {unknown[0]} is not known; its keys are {', '.join(keys)}.")
        for key, field in keys.items():
            values[field] = _positive(path, f"[{section}] {key}", table.get(key)) * _UNITS.get(field, 1.0)
    if max(values["reads"], values["computes"]) > 1:
        raise ConfigError(f"{path}: an efficiency above 1 is none.")
    return Device(str(data.get("name", path.stem)), **values)


def read_size(name: str) -> Size:
    """A model of profiles/models.toml. Raises ConfigError with the known names."""
    data = _toml(MODELS)
    if name not in data:
        raise ConfigError(f"The size of {name!r} is not known; there are {', '.join(data)} (profiles/models.toml).")
    table = data[name]
    number = {key: _positive(MODELS, f"{name} {key}", table.get(key)) for key in _SIZE}
    return Size(
        name, number["weights_gb"] * 1e9, number["read_gb"] * 1e9, number["params"], int(number["layers"]),
        number["kv_bytes_per_token"],
    )  # fmt: skip


_SIZE = ("weights_gb", "read_gb", "params", "layers", "kv_bytes_per_token")
assert len(_SIZE) == len(fields(Size)) - 1


def _toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}.") from error


def _positive(path: Path, what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
        raise ConfigError(f"{path}: {what} must be a number above 0, not {value!r}.")
    return float(value)
