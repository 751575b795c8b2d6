"""An answer on its way to the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from edgespec.decoding.round import Generation
from edgespec.memory.topology import peak_memory_bytes
from edgespec.residency import Loads
from edgespec.results import GenerationResult, TextDelta
from edgespec.telemetry.sampler import Sampler


class Stream:
    """An answer on its way: iterate over its `TextDelta`s. Leaving the loop, `close` and `cancel` end it safely.

    `cancel` may be called from another thread; the answer ends with the round that is running. `result` is the answer
    so far, final when the iteration is over.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        keep: Callable[[GenerationResult], None] | None = None,
        release: Callable[[], None] | None = None,
        counters: Callable[[], Loads] = Loads,
        sampler: Sampler | None = None,
    ) -> None:
        """keep: called with the result unless an error ended the answer. release: called at the end in any case.
        counters: of the working set; what they grow by while the answer is made is said to belong to it.
        sampler: measures the energy from now to the end."""
        self._generation = generation
        self._keep = keep
        self._release = release
        self._counters = counters
        self._before = counters()
        self._after: Loads | None = None
        self._sampler = sampler
        self._meter = None if sampler is None else sampler.begin()
        self._lock = threading.RLock()
        self._ended = False

    def __iter__(self) -> Iterator[TextDelta]:
        return self

    def __next__(self) -> TextDelta:
        with self._lock:
            try:
                while not self._ended:
                    more = self._generation.step()
                    delta = self._generation.take()
                    if not more:
                        self._end()
                    if delta is not None:
                        return delta
            except Exception:
                self._end(failed=True)
                raise
            except BaseException:  # Ctrl-C: what came so far stands
                self._end()
                raise
            raise StopIteration

    def cancel(self) -> None:
        self._generation.cancel()

    def close(self) -> None:
        """End the answer now; from another thread, after the round that is running."""
        self._generation.cancel()
        with self._lock:
            self._end()

    def __del__(self) -> None:
        if not self._ended:
            self.close()

    @property
    def result(self) -> GenerationResult:
        result, loads = self._generation.result, (self._after or self._counters()).since(self._before)
        stats = replace(
            result.stats,
            loads=loads.loads,
            load_seconds_hidden=max(loads.seconds - loads.exposed, 0.0),
            load_seconds_exposed=loads.exposed,
            ranker_seconds=loads.ranker,
            peak_memory_bytes=peak_memory_bytes(),
            energy_joules=None if self._meter is None else self._meter.joules,
            device_notes=[] if self._meter is None else list(self._meter.notes.values()),
        )
        return replace(result, stats=stats)

    def _end(self, *, failed: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._generation.close()
        self._after = self._counters()
        if self._sampler is not None and self._meter is not None:
            self._sampler.end(self._meter)
        try:
            if self._keep is not None and not failed:
                self._keep(self.result)
        finally:
            if self._release is not None:
                self._release()
