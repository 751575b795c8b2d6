"""Writing to a stream that may be a terminal, a pipe, closed, or unable to encode the text; Ctrl-C during an answer."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

# What a terminal would obey instead of showing: C0 (without tab and newline), DEL and C1.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATES = re.compile(r"[\ud800-\udfff]+")


def neutralise(text: str) -> str:
    """`text` with every control character spelled out (`\\x1b`), so that a model cannot drive the terminal."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text.replace("\r\n", "\n"))


def replace_surrogates(text: str) -> str:
    """`text` with lone surrogates (bytes of an argument or of stdin that are no UTF-8) replaced by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` is an open terminal; False for a stream that is missing or closed."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


class Output:
    """Text to one stream: exact for pipes and files, neutralised on a terminal; never an encoding error."""

    # One for all outputs on terminals: stdout and stderr share the screen.
    _terminal_mid_line = False

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.is_terminal = is_terminal(stream)
        plain = os.environ.get("NO_COLOR", "") != "" or os.environ.get("TERM") == "dumb"
        self.colour = self.is_terminal and not plain
        self._stream_mid_line = False

    def write(self, text: str) -> None:
        """Write model or user text and flush it."""
        self._write(neutralise(text) if self.is_terminal else text)

    def line(self, text: str = "", *, dim: bool = False) -> None:
        """Write one line of our own, on a fresh line, dim where the terminal has colours."""
        self.fresh_line()
        text = neutralise(text) if self.is_terminal else text
        self._write(f"\x1b[2m{text}\x1b[0m\n" if dim and self.colour else f"{text}\n")

    def fresh_line(self) -> None:
        """End the current line if something stands on it."""
        if Output._terminal_mid_line if self.is_terminal else self._stream_mid_line:
            self._write("\n")

    def transient(self, text: str) -> None:
        """Show `text` on the current terminal line in place of what stood there ('' = clear it); nothing elsewhere."""
        if self.is_terminal and os.environ.get("TERM") != "dumb":
            self._write(f"\r\x1b[K{neutralise(text)}")
            Output._terminal_mid_line = bool(text)

    def _write(self, text: str) -> None:
        if self.stream is None or not text:
            return
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self.stream.flush()
        self._stream_mid_line = not text.endswith("\n")
        if self.is_terminal:
            Output._terminal_mid_line = self._stream_mid_line


def stdout() -> Output:
    return Output(sys.stdout)


def stderr() -> Output:
    return Output(sys.stderr)


@contextmanager
def interrupt_calls(cancel: Callable[[], object]) -> Iterator[threading.Event]:
    """While active, the first Ctrl-C calls `cancel` (which must not lock); a second one raises KeyboardInterrupt.

    Yields an event that tells whether Ctrl-C was pressed. Outside the main thread Ctrl-C is left as it is.
    """
    pressed = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        cancel()

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
