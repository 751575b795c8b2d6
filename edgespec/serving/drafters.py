"""Lets the drafts of a batch guess: texts of one draft after another, different drafts beside each other.

What is guessed only to be compared (shadows) is part of a text's job, so a draft may be asked for two texts at once
after all, each in a session of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue

_THREADS = 4

Jobs = list[Callable[[], None]]
_Queue = SimpleQueue["tuple[Jobs, Future[None]] | None"]


class Drafters:
    """Heads run single-threaded and release the interpreter, so several of them use several cores.

    threads: at most; 1 = one after the other in the serving thread. They are made when first needed, and are not those
    of an executor, which takes nothing more once the main thread has ended, although requests may still run then.
    """

    def __init__(self, threads: int = _THREADS) -> None:
        self._most = threads - 1
        self._workers: list[threading.Thread] = []
        self._queue: _Queue = SimpleQueue()

    def run(self, jobs: Sequence[tuple[str | None, Callable[[], None]]]) -> None:
        """Do all jobs, given with the name of their draft (None = there is nothing to guess). They do not raise."""
        groups: dict[str, Jobs] = {}
        own: Jobs = []
        for name, job in jobs:
            (own if name is None else groups.setdefault(name, [])).append(job)
        several = list(groups.values())
        if several:
            own = several.pop() + own
        if not self._helped(len(several)):
            own = [job for group in several for job in group] + own
            several = []
        handed: list[Future[None]] = []
        try:
            for group in several:
                handed.append(Future())
                self._queue.put((group, handed[-1]))
            _all(own)
        finally:
            wait(handed)  # whatever happens, nothing guesses any more after this
        for future in handed:
            future.result()

    def _helped(self, groups: int) -> bool:
        """Whether there is a thread for them besides this one; more are made as long as that is possible."""
        while len(self._workers) < min(groups, self._most):
            worker = threading.Thread(target=_work, args=(self._queue,), name="edgespec-drafts", daemon=True)
            try:
                worker.start()
            except RuntimeError:  # there are too many, or the interpreter ends
                break
            self._workers.append(worker)
        return bool(self._workers)

    def close(self) -> None:
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.join()
        self._workers = []


def _work(queue: _Queue) -> None:
    while (task := queue.get()) is not None:
        group, future = task
        try:
            _all(group)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del task, group, future  # not kept while there is nothing to do


def _all(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()
