"""What a check of `edgespec doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. advice: what to do about a warning or a failure."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def finding(name: str, title: str, consequence: str, command: str) -> Check:
    """Something that is not as it should be: what it is, what follows from it, and the command that mends it."""
    return Check(name, "warn", f"{title}: {consequence}", command)
