"""What a planner keeps from run to run: how often drafts were right, as JSON.

The caller binds it to device, model and drafts (their fingerprints) and sets a damaged file aside. Seconds are kept in
the `CostTable`, choices never: another run starts free, and what is restored weighs a few tries (methods.md §1.10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
WORTH_KEEPING = 4.0  # tries, below which an arm is not kept
MOST_TRIES = 8.0  # that a restored arm weighs
_MOST_ARMS = 4096
_MOST_POSITIONS = 64
_MOST_LEVEL = 64
_LONGEST_NAME = 256
_MOST_COUNT = 1e6


@dataclass(frozen=True)
class ArmHistory:
    """One (draft, level). tried: (accepted, tried) by position, discounted. offered: share of blocks that reach it."""

    tried: list[tuple[float, float]]
    offered: list[float]

    @property
    def tries(self) -> float:
        """Of the first token."""
        return self.tried[0][1] if self.tried else 0.0


@dataclass(frozen=True)
class PlannerState:
    """The histories of all (draft, level) that were tried often enough."""

    arms: dict[tuple[str, int], ArmHistory] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        arms = [
            {"draft": draft, "level": level, "tried": [list(counts) for counts in arm.tried], "offered": arm.offered}
            for (draft, level), arm in sorted(self.arms.items())
        ]
        return {"format": FORMAT, "arms": arms}

    @classmethod
    def from_json(cls, data: Any) -> PlannerState:
        """The state that `to_json` wrote. Raises ValueError for anything else: every number is checked."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT or not isinstance(data.get("arms"), list):
            raise ValueError("not a planner's state, or of another version")
        if len(data["arms"]) > _MOST_ARMS:
            raise ValueError(f"{len(data['arms'])} arms are more than any planner has")
        arms: dict[tuple[str, int], ArmHistory] = {}
        for entry in data["arms"]:
            key, arm = _arm(entry)
            if key in arms:
                raise ValueError(f"draft {key[0]!r} has two histories of level {key[1]}")
            arms[key] = arm
        return cls(arms)


def _arm(entry: Any) -> tuple[tuple[str, int], ArmHistory]:
    if not isinstance(entry, Mapping) or entry.keys() != {"draft", "level", "tried", "offered"}:
        raise ValueError("an arm has a draft, a level, tried and offered")
    draft, level, tried, offered = (entry[key] for key in ("draft", "level", "tried", "offered"))
    if not isinstance(draft, str) or not 0 < len(draft) <= _LONGEST_NAME:
        raise ValueError("an arm has no draft's name")
    if type(level) is not int or not 0 <= level <= _MOST_LEVEL:
        raise ValueError(f"draft {draft!r}: {level!r} is no level")
    if not isinstance(tried, list) or not isinstance(offered, list) or len(tried) != len(offered):
        raise ValueError(f"draft {draft!r}: tried and offered differ in length")
    if not 0 < len(tried) <= _MOST_POSITIONS:
        raise ValueError(f"draft {draft!r}: {len(tried)} positions")
    counts = [_counts(draft, pair) for pair in tried]
    return (draft, level), ArmHistory(counts, [_number(draft, share, 1.0) for share in offered])


def _counts(draft: str, pair: Any) -> tuple[float, float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"draft {draft!r}: {pair!r} is not accepted and tried")
    tries = _number(draft, pair[1], _MOST_COUNT)
    return _number(draft, pair[0], tries), tries


def _number(draft: str, value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most * (1 + 1e-9):
        raise ValueError(f"draft {draft!r}: {value!r} is not a number from 0 to {most:g}")
    return min(float(value), most)
