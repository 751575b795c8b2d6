"""What was found: one table for people, one JSON for comparing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Finding:
    """value: None = not measured, and `note` says why. ok: None where there is no goal."""

    part: str
    what: str
    value: float | None
    unit: str = ""
    goal: str = ""
    ok: bool | None = None
    note: str = ""


@dataclass
class Check:
    """One run: the device, how large it is meant, and what was found until now."""

    device: torch.device
    tiny: bool = False
    deadline: float = float("inf")  # of `time.monotonic`
    findings: list[Finding] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds that may still be spent."""
        return self.deadline - time.monotonic()

    def found(
        self,
        part: str,
        what: str,
        value: float | None,
        unit: str = "",
        *,
        goal: str = "",
        ok: bool | None = None,
        note: str = "",
    ) -> None:
        self.findings.append(Finding(part, what, value, unit, goal, ok, note))

    @property
    def failed(self) -> bool:
        return any(finding.ok is False for finding in self.findings)


def table(findings: list[Finding]) -> str:
    """Columns: part, what, value, goal, verdict."""
    rows = [("part", "what", "value", "goal", "")]
    for each in findings:
        value = "-" if each.value is None else f"{each.value:.4g} {each.unit}".strip()
        verdict = {True: "ok", False: "MISSED", None: ""}[each.ok]
        rows.append((each.part, each.what, value, each.goal, f"{verdict} {each.note}".strip()))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip() for row in rows
    )


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers belong to."""
    from importlib.util import find_spec

    facts: dict[str, Any] = {"torch": torch.__version__, "triton": find_spec("triton") is not None}
    if device.type == "cuda":
        seen = torch.cuda.get_device_properties(device)
        facts |= {
            "device": seen.name,
            "capability": f"{seen.major}.{seen.minor}",
            "multiprocessors": seen.multi_processor_count,
            "memory_bytes": seen.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts


def write(path: Path, check: Check, seconds: float) -> None:
    found = {"machine": machine(check.device), "tiny": check.tiny, "seconds": round(seconds, 1)}
    path.write_text(json.dumps({**found, "findings": [asdict(each) for each in check.findings]}, indent=1) + "\n")
