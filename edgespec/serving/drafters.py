"""Lets the drafts of a batch guess: texts of one draft after another, different drafts beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_THREADS = 4


class Drafters:
    """Heads run single-threaded and release the interpreter, so several of them use several cores.

    threads: at most; 1 = one after the other in the serving thread.
    """

    def __init__(self, threads: int = _THREADS) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[tuple[str | None, Callable[[], None]]]) -> None:
        """Do all jobs, given with the name of their draft (None = there is nothing to guess). They do not raise."""
        groups: dict[str, list[Callable[[], None]]] = {}
        own: list[Callable[[], None]] = []
        for name, job in jobs:
            (own if name is None else groups.setdefault(name, [])).append(job)
        several = list(groups.values())
        if several:
            own = several.pop() + own
        futures = []
        if several and self._threads > 1:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="edgespec-drafts")
            futures = [self._pool.submit(_all, group) for group in several]
        else:
            own = [job for group in several for job in group] + own
        _all(own)
        for future in futures:
            future.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _all(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()
