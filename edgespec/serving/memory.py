"""What serving several requests takes in memory: keys and values of all of them, and the graph for batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from edgespec.config import RuntimeConfig
from edgespec.errors import MemoryBudgetError
from edgespec.loading import check_memory, device_of, topology_of
from edgespec.memory.budget import format_bytes, parse_budget

KV, POOL, BATCH = "KV cache", "KV pool", "batch graph"  # the first: of one conversation, which is planned in any case
_FEWEST_POSITIONS = 512  # that a pool must hold, or the whole context if that is less
SLOTS = (1, 2, 4, 8, 16)  # of batch graphs


class ServingNeed(NamedTuple):
    """Bytes. pool: of keys and values. batch: of the graph. slots: sequences that one forward takes."""

    pool: int
    batch: int
    slots: int

    def parts(self, planned: Mapping[str, int]) -> dict[str, int]:
        """What it takes beyond what is planned: the pool includes the memory of the one conversation."""
        more = {BATCH: self.batch, POOL: max(self.pool - planned.get(KV, 0), 0)}
        return {part: nbytes for part, nbytes in more.items() if nbytes}


def slots_for(sessions: int) -> int:
    """Slots of the smallest batch graph for so many sequences."""
    return next(slots for slots in SLOTS if slots >= sessions)


def graph_bytes(config: RuntimeConfig, weights: int) -> int:
    """Of the batch graph for these weights: ONNX Runtime prepares them once more for it; torch needs none."""
    return weights if device_of(config) == "cpu" and config.max_sessions > 1 else 0


def fitted(config: RuntimeConfig, *, weights: int, context: int, position: int, room: int) -> ServingNeed:
    """A pool as large as `kv_memory` says, else as `room` leaves, up to every context in full, but never useless.

    weights: bytes of the target's. position: bytes of one position. room: bytes for all of it, those of the one
    conversation that is planned anyway included; it may be exceeded.
    """
    batch, slots = graph_bytes(config, weights), slots_for(config.max_sessions)
    if config.kv_memory != "auto":
        return ServingNeed(config.kv_memory, batch, slots)
    most = config.max_sessions * context * position
    least = min(context, _FEWEST_POSITIONS) * position
    return ServingNeed(min(most, max(room - batch, least)), batch, slots)


def need_of(
    config: RuntimeConfig, planned: Mapping[str, int], *, weights: int, context: int, position: int
) -> ServingNeed:
    """What is `fitted` into the memory that is left now. planned: bytes by part that are taken already.

    Raises MemoryBudgetError with the numbers if it does not fit.
    """
    topology = topology_of(config)
    room = parse_budget("auto", topology)  # what is free now; the one conversation's cache has not taken its part yet
    if config.memory_budget != "auto":
        left = parse_budget(config.memory_budget, topology) - sum(planned.values()) + planned.get(KV, 0)
        room = min(room, left)
    need = fitted(config, weights=weights, context=context, position=position, room=room)
    _check(config, need, planned)
    return need


def _check(config: RuntimeConfig, need: ServingNeed, planned: Mapping[str, int]) -> None:
    try:
        check_memory(config, need.parts(planned), planned)
    except MemoryBudgetError as error:
        raise MemoryBudgetError(
            f"serving {config.max_sessions} requests at once does not fit: {error}. They need "
            f"{format_bytes(need.pool)} for keys and values and {format_bytes(need.batch)} for batches; "
            "--kv-memory and --max-sessions change that"
        ) from error
