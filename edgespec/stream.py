"""An answer on its way to the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from edgespec.accounts import Account
from edgespec.decoding.round import Generation
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
        counters, sampler: see `Account`."""
        self._generation = generation
        self._keep = keep
        self._release = release
        self._account = Account(counters, sampler)
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
        return self._account.complete(self._generation.result)

    def _end(self, *, failed: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._generation.close()
        self._account.end()
        try:
            if self._keep is not None and not failed:
                self._keep(self.result)
        finally:
            if self._release is not None:
                self._release()
