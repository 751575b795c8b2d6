"""What batches really made, against what was expected of them: by number of sequences and tokens drafted."""

from __future__ import annotations

import math

_KEEP = 0.98  # of what was seen, each time that a bin is seen again: about fifty batches
_FADE = 0.999  # the same, each batch that it is not: a bin that disappointed is tried again in the end
_TOKENS = 80.0  # as expected, that stand for "as expected" beside what was seen
_SECONDS = 20.0  # batches, the same for seconds
_LEAST, _MOST = 0.5, 2.0
_BINS = (0.0, 0.75, 1.75, 3.5)  # drafted tokens a sequence: none, one here and there, about one, two or three, more

Bin = tuple[int, int]


class _Seen:
    """Discounted sums of one bin."""

    __slots__ = ("at", "batches", "emitted", "expected", "predicted", "seconds")

    def __init__(self) -> None:
        self.emitted = self.expected = self.seconds = self.predicted = self.batches = 0.0
        self.at = 0

    def fade(self, keep: float) -> None:
        self.emitted *= keep
        self.expected *= keep
        self.seconds *= keep
        self.predicted *= keep
        self.batches *= keep


class Calibration:
    """By how much a plan's speed differs from its prediction; 1 where nothing was seen."""

    def __init__(self) -> None:
        self._seen: dict[Bin, _Seen] = {}
        self._batches = 0
        self._bins: dict[tuple[int, int], Bin] = {}

    def bin(self, sequences: int, drafted: int) -> Bin:
        """Sequences by powers of two, drafted tokens a sequence by `_BINS`."""
        found = self._bins.get((sequences, drafted))
        if found is None:
            share = drafted / max(sequences, 1)
            found = max(sequences, 1).bit_length(), sum(share > edge for edge in _BINS)
            self._bins[sequences, drafted] = found
        return found

    def factor(self, at: Bin) -> float:
        """Measured speed over predicted speed, as far as the samples say."""
        seen = self._seen.get(at)
        if seen is None:
            return 1.0
        keep = _FADE ** (self._batches - seen.at)
        emitted, expected = keep * seen.emitted + _TOKENS, keep * seen.expected + _TOKENS
        prior = _SECONDS * seen.predicted / seen.batches  # as many seconds as that many of its batches were to take
        seconds, predicted = keep * seen.seconds + prior, keep * seen.predicted + prior
        return min(max(emitted / expected * predicted / seconds, _LEAST), _MOST)

    def weight(self, at: Bin) -> float:
        """Batches that were seen there, of late."""
        seen = self._seen.get(at)
        return 0.0 if seen is None else seen.batches * _FADE ** (self._batches - seen.at)

    def observe(self, at: Bin, emitted: float, expected: float, seconds: float, predicted: float) -> None:
        """Take in a batch. Numbers that are no measurements are ignored."""
        if not (0 < expected < math.inf and 0 <= emitted < math.inf):
            return
        if not (0 < seconds < math.inf and 0 < predicted < math.inf):
            return
        self._batches += 1
        seen = self._seen.get(at)
        if seen is None:
            seen = self._seen[at] = _Seen()
        seen.fade(_KEEP * _FADE ** (self._batches - 1 - seen.at) if seen.batches else 1.0)
        seen.emitted += emitted
        seen.expected += expected
        seen.seconds += min(seconds, 3 * predicted)
        seen.predicted += predicted
        seen.batches += 1
        seen.at = self._batches
