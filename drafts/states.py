"""The target's recent hidden states of one conversation, for drafts that read them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
DEFAULT_WINDOW = 256


class HiddenStates:
    """Hidden states (after the final norm) of positions `begin` .. `end` - 1, without gaps; float32 [hidden_size] each.

    At least the last `window` positions are held, as far as they were written, and as many before them, so that a text
    that is cut by less than a window still has one; memory is limited to a few windows. A crop is exact, but what was
    dropped before it does not come back: fewer rows than `window` are then there.
    """

    def __init__(self, hidden_size: int, window: int = DEFAULT_WINDOW) -> None:
        if hidden_size < 1 or window < 1:
            raise ValueError(f"hidden states of size {hidden_size}, window {window}")
        self.hidden_size = hidden_size
        self.window = window
        self.begin = self.end = 0
        self._first = 0  # the position of the buffer's first row
        self._buffer = np.empty((0, hidden_size), np.float32)

    def __len__(self) -> int:
        return self.end - self.begin

    def widen(self, window: int) -> None:
        """Hold at least `window` positions from now on."""
        self.window = max(self.window, window)

    def write(self, start: int, rows: FloatArray) -> None:
        """Put `rows` (float32 [n, hidden_size], copied) at positions `start` .. `start` + n - 1, and forget all after.

        Rows behind a gap stand alone: what was before the gap is forgotten.
        """
        if rows.ndim != 2 or rows.shape[1] != self.hidden_size or start < 0:
            raise ValueError(f"hidden states of shape {rows.shape} at {start}, not [n, {self.hidden_size}]")
        if start > self.end or start <= self.begin:
            self.begin = self.end = self._first = start
        self.end = start  # whatever happens from here on, only whole rows count
        stop = start + len(rows)
        most = 2 * self.window
        if len(rows) > most:
            rows = rows[-most:]
            self.begin = self.end = self._first = stop - len(rows)
        if stop - self._first > len(self._buffer):
            self._make_room(stop)
        self._buffer[self.end - self._first : stop - self._first] = rows
        self.end = stop

    def _make_room(self, stop: int) -> None:
        """Move what must be kept to the front of a buffer that reaches up to `stop`."""
        begin = min(max(self.begin, stop - 2 * self.window), self.end)
        kept = self._buffer[begin - self._first : self.end - self._first].copy()
        self.begin = self.end  # interrupted from here on, there are none
        size = 3 * self.window + 64  # moved once in about a window's worth of tokens
        if len(self._buffer) < size:
            self._buffer = np.empty((size, self.hidden_size), np.float32)
        self._buffer[: len(kept)] = kept
        self._first = begin
        self.begin = begin

    def crop(self, length: int) -> None:
        """Forget every position >= `length`."""
        if length < self.end:
            self.end = max(length, 0)
            if self.end <= self.begin:
                self.begin = self._first = self.end

    def rows(self, start: int, end: int) -> FloatArray:
        """float32 [end - start, hidden_size], a view that the next `write` may change. IndexError if one is missing."""
        if not self.begin <= start <= end <= self.end:
            raise IndexError(f"hidden states {start}..{end} are not held, only {self.begin}..{self.end}")
        return self._buffer[start - self._first : end - self._first]
