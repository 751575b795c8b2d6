"""What drafts take in memory, as it stands in the plan, and how many of them may be held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafts.base import Loadable
from edgespec.errors import MemoryBudgetError
from edgespec.loading import Target, check_memory, topology_of
from edgespec.memory.budget import parse_budget
from edgespec.memory.plan import DraftNeed, MemoryPlan

if TYPE_CHECKING:
    from drafts.base import Draft
    from edgespec.config import RuntimeConfig

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


def slots_that_fit(config: RuntimeConfig, target: Target, drafts: Sequence[Draft]) -> Room:
    """How many drafts may be held: what was asked for, else as many as the budget has room for.

    drafts: all of them, loaded or not. Raises MemoryBudgetError with the numbers if as many as were asked for do not
    fit.
    """
    weighty = [draft for draft in drafts if isinstance(draft, Loadable)]
    if not weighty:
        return Room()
    own = {draft.name: kept_bytes(draft, target.sessions) for draft in weighty}
    topology = topology_of(config)
    # What is free now, of which the target holds its part already, but for keys and values that are still to come.
    free = parse_budget("auto", topology) + sum(target.planned.values()) - target.to_come
    budget = free if config.memory_budget == "auto" else parse_budget(config.memory_budget, topology)
    if config.resident is None:
        budget = min(budget, free)
    plan = MemoryPlan(
        target=sum(target.planned.values()),
        beside={},
        context=0,
        cache=lambda _tokens: 0,
        drafts=[DraftNeed(draft.name, draft.slot_bytes, own[draft.name]) for draft in weighty],
        budget=budget,
        asked=config.resident,
    )
    for slots in range(min(plan.slots, len(weighty)), 0, -1):  # what is free changes from one look to the next
        need = {f"{slots} draft slots": slots * plan.slot_bytes, KEPT: sum(own.values())}
        try:
            check_memory(config, need, target.planned, to_come=target.to_come)
        except MemoryBudgetError:
            if config.resident is not None:
                raise
        else:
            return Room(slots, plan.slot_bytes, need)
    return Room(0, plan.slot_bytes)


def why_none(config: RuntimeConfig, target: Target, drafts: Sequence[Loadable]) -> str:
    """Why not even the smallest draft fits, with the numbers."""
    smallest = min(drafts, key=lambda draft: draft.slot_bytes)
    need = {f"draft {smallest.name}": smallest.slot_bytes}
    try:
        check_memory(config, need, target.planned, to_come=target.to_come)
    except MemoryBudgetError as error:
        return str(error)
    return "the memory has become short meanwhile"
