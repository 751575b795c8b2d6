"""What an answer took besides its own rounds: drafts that were loaded meanwhile, energy, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgespec.memory.topology import peak_memory_bytes
from edgespec.residency import Loads
from edgespec.results import GenerationResult
from edgespec.telemetry.sampler import Sampler


class Account:
    """Opened when an answer begins; `end` it once.

    counters: of the working set; what they grow by while the answer is made is said to belong to it (to each of
    several that are made at once). sampler: measures the energy of the whole board from now to the end.
    """

    def __init__(self, counters: Callable[[], Loads] = Loads, sampler: Sampler | None = None) -> None:
        self._counters, self._before = counters, counters()
        self._after: Loads | None = None
        self._sampler = sampler
        self._meter = None if sampler is None else sampler.begin()

    def end(self) -> None:
        self._after = self._counters()
        if self._sampler is not None and self._meter is not None:
            self._sampler.end(self._meter)

    def complete(self, result: GenerationResult) -> GenerationResult:
        """The result with all of it, so far."""
        loads = (self._after or self._counters()).since(self._before)
        stats = replace(
            result.stats,
            loads=loads.loads,
            load_seconds_hidden=max(loads.seconds - loads.exposed, 0.0),
            load_seconds_exposed=loads.exposed,
            ranker_seconds=loads.ranker,
            peak_memory_bytes=peak_memory_bytes(),
            energy_joules=None if self._meter is None else self._meter.joules,
            gpu_load=None if self._meter is None else self._meter.gpu_load,
            device_notes=[] if self._meter is None else list(self._meter.notes.values()),
        )
        return replace(result, stats=stats)
