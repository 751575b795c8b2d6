"""How far a long command is: a bar on a terminal, and a line now and then in a log or a pipe."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from edgespec.bench.reporting.terminal import shown

LINE_SECONDS = 30.0  # between two lines, at least: an hour makes a hundred of them, and what is quick makes none

_log = logging.getLogger(__name__)

Say = Callable[[str], None]
Advance = Callable[[int], None]


@contextmanager
def progress(total: int) -> Iterator[tuple[Say, Advance]]:
    """Of so many steps, on stderr: a function for the text (what is being done), and one for steps done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = Lines(total, sys.stderr)
        yield lines.say, lines.advance
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def say(text: str) -> None:
            _log.debug("%s", text)
            bar.update(task, description=text)

        yield say, lambda n: bar.advance(task, n)


@contextmanager
def no_progress(total: int) -> Iterator[tuple[Say, Advance]]:
    """The same without a word."""
    yield (lambda text: None), (lambda steps: None)


class Lines:
    """ "12 of 108: memspec: question 81" every `LINE_SECONDS`, whenever something is said or done."""

    def __init__(self, total: int, stream: TextIO | None, now: Callable[[], float] = time.monotonic) -> None:
        self._total, self._stream, self._now = total, stream, now
        self._done, self._text, self._last = 0, "", now()

    def say(self, text: str) -> None:
        _log.debug("%s", text)
        self._text = text
        self._write()

    def advance(self, steps: int) -> None:
        self._done += steps
        self._write()

    def _write(self) -> None:
        now = self._now()
        if self._stream is None or now - self._last < LINE_SECONDS:
            return
        self._last = now
        print(shown(f"{self._done} of {self._total}: {self._text}"), file=self._stream, flush=True)
