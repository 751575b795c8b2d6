"""What serving takes in memory: keys and values of all requests, what drafts keep of them, and the graph for batches.

All of it is beside what is planned for one conversation, which may run at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from edgespec.config import RuntimeConfig
from edgespec.errors import MemoryBudgetError
from edgespec.loading import KV, POOL, check_memory, device_of, topology_of
from edgespec.memory.budget import format_bytes, parse_budget
from edgespec.models.batching import SLOTS

BATCH = "batch graph"
DRAFTS = "drafts of several requests"
_FEWEST_POSITIONS = 512  # that a pool must hold, or the whole context if that is less


class ServingNeed(NamedTuple):
    """Bytes. pool: of keys and values. batch: of the graph. slots: sequences that one forward takes.

    drafts: what drafts keep of further requests, beside the one that is planned.
    """

    pool: int
    batch: int
    slots: int
    drafts: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """What stands in the plan for the time of serving; `HeldDrafts.plan_for` sees to the drafts' part."""
        return {part: nbytes for part, nbytes in ((BATCH, self.batch), (POOL, self.pool)) if nbytes}

    @property
    def total(self) -> int:
        return self.pool + self.batch + self.drafts


def slots_for(sessions: int) -> int:
    """Slots of the smallest batch graph for so many sequences."""
    return next(slots for slots in SLOTS if slots >= sessions)


def graph_bytes(config: RuntimeConfig, weights: int) -> int:
    """Of the batch graph for these weights: ONNX Runtime prepares them once more for it; torch needs none."""
    return weights if device_of(config) == "cpu" and config.max_sessions > 1 else 0


def fitted(
    config: RuntimeConfig, *, weights: int, context: int, position: int, room: int, further: int = 0
) -> ServingNeed:
    """A pool as large as `kv_memory` says, else as `room` leaves, up to every context in full, but never useless.

    weights: bytes of the target's. position: bytes of one position. room: bytes for all of it; it may be exceeded.
    further: bytes that drafts keep of each conversation after the first.
    """
    batch, slots = graph_bytes(config, weights), slots_for(config.max_sessions)
    drafts = (config.max_sessions - 1) * further
    if config.kv_memory != "auto":
        return ServingNeed(config.kv_memory, batch, slots, drafts)
    most = config.max_sessions * context * position
    pool = min(most, max(room - batch - drafts, _least(context, position)))
    return ServingNeed(pool, batch, slots, drafts)


def _least(context: int, position: int) -> int:
    return min(context, _FEWEST_POSITIONS) * position


def need_of(
    config: RuntimeConfig,
    planned: Mapping[str, int],
    *,
    weights: int,
    context: int,
    position: int,
    further: int = 0,
) -> ServingNeed:
    """What is `fitted` into the memory that is left now. planned: bytes by part that are taken already.

    Raises MemoryBudgetError with the numbers if it does not fit.
    """
    topology = topology_of(config)
    # Of what is free now, the one conversation's cache has not taken its part yet.
    room = parse_budget("auto", topology) - planned.get(KV, 0)
    if config.memory_budget != "auto":
        room = min(room, parse_budget(config.memory_budget, topology) - sum(planned.values()))
    need = fitted(config, weights=weights, context=context, position=position, room=room, further=further)
    _check(config, need, planned, taken=0)
    return need


def measured(
    config: RuntimeConfig, need: ServingNeed, batch: int, planned: Mapping[str, int], *, context: int, position: int
) -> ServingNeed:
    """The need with the bytes of the graph for batches that is in memory by now; a pool that was fitted makes room.

    Raises MemoryBudgetError with the numbers if it does not fit.
    """
    more = batch - need.batch
    need = need._replace(batch=batch)
    if more <= 0:
        return need
    try:
        _check(config, need, planned, taken=batch)
    except MemoryBudgetError:
        if config.kv_memory != "auto":
            raise
        need = need._replace(pool=max(need.pool - more, min(need.pool, _least(context, position))))
        _check(config, need, planned, taken=batch)
    return need


def _check(config: RuntimeConfig, need: ServingNeed, planned: Mapping[str, int], *, taken: int) -> None:
    """taken: bytes of the graph that are in memory already."""
    wanted = {**need.parts, DRAFTS: need.drafts, BATCH: need.batch - taken}
    before = {**planned, f"{BATCH} in memory": taken}
    try:
        check_memory(config, _some(wanted), _some(before))
    except MemoryBudgetError as error:
        raise MemoryBudgetError(
            f"serving {config.max_sessions} requests at once does not fit: {error}. They need "
            f"{format_bytes(need.pool)} for keys and values and {format_bytes(need.batch)} for batches; "
            "--kv-memory and --max-sessions change that"
        ) from error


def _some(parts: Mapping[str, int]) -> dict[str, int]:
    return {part: nbytes for part, nbytes in parts.items() if nbytes}
