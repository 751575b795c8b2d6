"""The memory budget: what was asked for, in bytes, and whether a plan fits it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from edgespec.errors import ConfigError, MemoryBudgetError
from edgespec.memory.topology import Topology

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
# A bare letter means the power of two, as in other tools that take memory limits.
_UNITS |= {
    name: 2**power
    for power, names in ((10, "k ki kib"), (20, "m mi mib"), (30, "g gi gib"), (40, "t ti tib"))
    for name in names.split()
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*|%)", re.IGNORECASE)
_RESERVE_SHARE = 0.1
_RESERVE_BYTES = 256 * 2**20


def parse_budget(value: str | int, topology: Topology) -> int:
    """The budget in bytes.

    value: bytes, "1GiB", "800 MB", "80%" (of the topology's total) or "auto" (what is available now, less a reserve of
    a tenth, at least 256 MiB, for the rest of the machine). Raises ConfigError if it cannot be read, MemoryBudgetError
    if it is more than there is in all.
    """
    if value == "auto":
        available = topology.available_bytes()
        return max(0, available - max(_RESERVE_BYTES, int(available * _RESERVE_SHARE)))
    budget = parse_bytes(value, topology.total_bytes)
    if budget > topology.total_bytes:
        total = format_bytes(topology.total_bytes)
        raise MemoryBudgetError(
            f"the memory budget {value} is more than the {total} there are; ask for less, or use auto"
        )
    return budget


def parse_bytes(value: str | int, whole: int | None = None) -> int:
    """A positive number of bytes from an int or from text such as "1.5GiB"; a percentage is of `whole`."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _unreadable(value)
    if isinstance(value, int):
        amount = value
    else:
        match = _AMOUNT.fullmatch(value.strip())
        if match is None:
            raise _unreadable(value)
        number, unit = float(match[1]), match[2].lower()
        if unit == "%":
            if whole is None or number > 100:
                raise _unreadable(value)
            amount = int(whole * number / 100)
        elif unit in _UNITS:
            amount = int(number * _UNITS[unit])
        else:
            raise _unreadable(value)
    if amount <= 0:
        raise _unreadable(value)
    return amount


def format_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def check_fits(need: Mapping[str, int], budget: int, available: int | None = None) -> None:
    """Refuse a plan before anything is loaded.

    need: bytes by part, for example {"target": ..., "KV cache": ..., "workspace": ...}. budget: bytes allowed.
    available: bytes free now, or None to leave that out. Raises MemoryBudgetError with the numbers.
    """
    total = sum(need.values())
    if total <= budget and (available is None or total <= available):
        return
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in need.items())
    if total > budget:
        limit, advice = (
            f"the memory budget is {format_bytes(budget)}",
            "raise --memory-budget",
        )
    else:
        limit = f"only {format_bytes(available or 0)} are free"
        advice = "free some memory"
    fewer = "fewer drafts at once (--resident), " if any("draft slot" in name for name in need) else ""
    raise MemoryBudgetError(
        f"{format_bytes(total)} are needed ({parts}) but {limit}; {advice}, or use {fewer}a smaller model or "
        "--context; edgespec doctor shows what fits"
    )


def _unreadable(value: object) -> ConfigError:
    return ConfigError(
        f"the memory budget {value!r} cannot be read: give bytes, or a form such as 1GiB, 800MB, 80% or auto"
    )
