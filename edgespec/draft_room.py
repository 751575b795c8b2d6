"""What drafts take in memory, as it stands in the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drafts.base import Draft

KEPT = "keys and values of drafts"  # the part that stays while weights come and go


@dataclass(frozen=True, slots=True)
class Room:
    """slots: how many drafts may be held. slot_bytes: of each. parts: what that takes, as it stands in the budget."""

    slots: int = 0
    slot_bytes: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)


def kept_bytes(draft: Draft, conversations: int) -> int:
    """What a draft keeps of so many conversations, whether it is loaded or not, beside what counts as its slot's."""
    one = int(getattr(draft, "conversation_bytes", 0))
    return one + (conversations - 1) * int(getattr(draft, "further_bytes", one))
