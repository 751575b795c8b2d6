"""Launch configurations of the kernels by compute capability, from `tuning.toml` beside this file."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from edgespec.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATH = Path(__file__).with_name("tuning.toml")


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: block_n rows of the matrix and block_k of its columns a step; see the file's head."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class Attention:
    """A program reads `chunk` positions of one key head, `block` at a time."""

    chunk: int
    block: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """A program reads `chunk` entries of a row of the vocabulary."""

    chunk: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """All configurations for one kind of device."""

    dot: Product
    wide: Product
    vector: Product
    attention: Attention
    sampling: Sampling


_KINDS: dict[str, type] = {
    "dot": Product, "wide": Product, "vector": Product, "attention": Attention, "sampling": Sampling
}  # fmt: skip


def of(device: torch.device) -> Tuning:
    """The configurations for `device`; the default ones on a CPU and on boards that the file does not name."""
    if device.type != "cuda":
        return for_capability(None)
    major, minor = torch.cuda.get_device_capability(device)
    return for_capability(major * 10 + minor)


@cache
def for_capability(capability: int | None) -> Tuning:
    """For a compute capability such as 87, or the next lower one of its generation, else the default."""
    tables = _tables(PATH)
    chosen = {} if capability is None else tables.get(_nearest(capability, list(tables)), {})
    return Tuning(**{name: kind(**(tables["default"][name] | chosen.get(name, {}))) for name, kind in _KINDS.items()})


def splits(blocks: int, steps: int, programs: int) -> int:
    """Into how many parts K is cut so that `blocks` programs become about `programs`: a power of two <= 16.

    At least two steps stay for each part.
    """
    parts = 1
    while parts < 16 and blocks * parts * 2 <= programs and steps >= parts * 4:
        parts *= 2
    return parts


def _nearest(capability: int, names: list[str]) -> str:
    known = sorted(int(name.removeprefix("sm_")) for name in names if name.startswith("sm_"))
    below = [other for other in known if other <= capability and other // 10 == capability // 10]
    return f"sm_{below[-1]}" if below else "default"


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    """The file's tables; ConfigError for a name, key or value that is not known."""
    with path.open("rb") as file:
        tables: dict[str, dict[str, Any]] = tomllib.load(file)
    if "default" not in tables:
        raise ConfigError(f"{path}: has no table [default].")
    for table, entries in tables.items():
        if table != "default" and not table.removeprefix("sm_").isdecimal():
            raise ConfigError(f"{path}: [{table}] is neither [default] nor a compute capability like [sm_87].")
        for name, values in entries.items():
            if name not in _KINDS:
                raise ConfigError(f"{path}: [{table}] has {name}, which no kernel reads.")
            for key, value in values.items():
                _check_value(f"{path}: [{table}] {name}.{key}", _KINDS[name], key, value)
    return tables


def _check_value(where: str, kind: type, key: str, value: Any) -> None:
    if key not in {field.name for field in fields(kind)}:
        raise ConfigError(f"{where} is not known.")
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where} must be a whole number above 0, not {value!r}.")
    if key not in ("stages", "programs") and value & (value - 1):
        raise ConfigError(f"{where} must be a power of two, not {value}.")


__all__ = ["Attention", "Product", "Sampling", "Tuning", "for_capability", "of", "splits"]
