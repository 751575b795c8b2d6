"""How long batches take on this device: measured once, before the first request, and kept with the other costs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.files import write_text
from edgespec.models.base import Decoder, KVCache, Part
from edgespec.models.batching import wait_for
from edgespec.models.kv.sequence import SequenceCache
from predictor.load import BatchCosts

if TYPE_CHECKING:
    from edgespec.loading import Target

_log = logging.getLogger(__name__)

_ENOUGH = 4  # points, to plan from


def batch_costs(target: Target, sessions: int) -> tuple[BatchCosts, Path | None]:
    """Measured seconds, from an earlier run on this device if there are any, and the file that they are to be kept in.

    None: they are a guess.
    """
    file = target.costs_file.with_name(f"{target.costs_file.stem}-batch{sessions}.json")
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        data = json.loads(file.read_text())
        if len(data["points"]) >= _ENOUGH:  # a device that was busy then may have had time for fewer
            return BatchCosts.from_json(data), file
    target.measure_costs()
    costs = BatchCosts.guessed(target.costs, sessions)
    try:
        costs.measure(_Forwards(target.decoder, sessions, target.context).run, sessions)
    except Exception as error:  # a plan from a guess is better than no serving
        _log.warning("batches could not be timed, their times are guessed: %s", error)
        return costs, None
    return costs, file


def keep(costs: BatchCosts, file: Path | None) -> None:
    """Write the costs down for the next run; only a second is lost if that cannot be."""
    if file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(costs.to_json()))


class _Forwards:
    """Forwards over sequences of any content: what stands in the caches does not change how long they take."""

    def __init__(self, decoder: Decoder, sessions: int, context: int) -> None:
        self._decoder, self._context = decoder, context
        self._caches = [decoder.new_cache(context) for _ in range(sessions)]

    def run(self, widths: Sequence[int], context: int) -> None:
        parts = []
        for cache, width in zip(self._caches, widths):
            width = min(width, max(self._context - 2, 1))
            _stand_at(cache, max(min(context, self._context - width - 1), 0), self._decoder)
            parts.append(Part([0] * width, cache, 1))
        slots = self._decoder.batch_slots if self._decoder.batch_slots > 1 else len(parts)
        for begin in range(0, len(parts), slots):
            for output in self._decoder.forward_batch(parts[begin : begin + slots]):
                wait_for(output.logits)


def _stand_at(cache: KVCache, length: int, decoder: Decoder) -> None:
    """Let the cache hold `length` positions of whatever is in its memory, or of zeros where that is not possible."""
    if cache.length >= length:
        cache.crop(length)
    elif isinstance(cache, SequenceCache):
        cache.length = length  # a forward reserves what it needs
    else:
        decoder.forward([0] * (length - cache.length), cache, logits=0)
