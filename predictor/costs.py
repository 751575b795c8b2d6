"""Measured seconds: a target forward over `width` tokens, a draft's step, load and catch-up."""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_GUESSED_SECONDS = 0.01  # the plain step of an unmeasured device; only ratios matter until the first measurement
_GUESSED_SLOPE = 0.25  # an unmeasured further token, in plain steps: between a flat GPU and a compute-bound CPU
_GUESSED_DRAFT = 0.1  # an unmeasured draft step, in plain steps
_RATE = 0.1  # weight of a new sample
_KNOWN = 10  # samples after which a draft's time is known as well as it will be
_COUPLING = 0.5  # how far the other widths move along: a hotter device or a longer context slows all of them
_CURVE = 9  # widths worked out at once
_OUTLIER = 3.0  # a sample counts at most this many times (or as little as 1 over it) of what was expected
_GUESSED_LOAD = 3.0  # an unmeasured load, in plain steps
_GUESSED_READ = 0.25  # an unmeasured token of catch-up, in steps of the draft: many are read at once
_SAMPLES = 9  # that a median is taken of
_LONGEST = 1e6  # seconds; a stored time beyond this is no measurement


class CostTable:
    """Seconds of `verify(width)` and of a draft's step, kept current by samples from real rounds.

    Between measured widths the time is interpolated, beyond them extended by the last slope (never below the widest
    measured one), and it never falls with the width: a measured dip is noise. Loads and catch-up (seconds per token)
    are rare and ragged, so they are medians of the last few samples. A switch to another draft costs that draft's
    catch-up, and its load. Any thread may call anything: decoders and the loader share one table.
    """

    def __init__(
        self,
        verify: Mapping[int, float] | None = None,
        drafts: Mapping[str, float] | None = None,
        *,
        loads: Mapping[str, float] | None = None,
        catch_up: Mapping[str, float] | None = None,
    ) -> None:
        self._verify = {int(width): float(seconds) for width, seconds in (verify or {}).items()}
        self._drafts = {str(name): float(seconds) for name, seconds in (drafts or {}).items()}
        if any(width < 1 for width in self._verify):
            raise ValueError("verify widths start at 1")
        if not all(0 < s < math.inf for s in self._verify.values()):
            raise ValueError("verify times must be positive, finite seconds")
        if not all(0 <= s < math.inf for s in self._drafts.values()):
            raise ValueError("draft times must be finite seconds, 0 or more")
        self._loads = {str(name): _Median([seconds]) for name, seconds in (loads or {}).items()}
        self._catch_up = {str(name): _Median([seconds]) for name, seconds in (catch_up or {}).items()}
        self._alias: dict[str, str] = {}
        self._seen = dict.fromkeys(self._drafts, _KNOWN)  # samples of a draft, up to now
        self._curve: list[float] = []  # verify(1), verify(2), ... as far as asked for; replaced, never changed
        self._spans: list[_Span] = []  # between which known widths each width of the curve lies
        self._spanned = -1  # how many widths were known then
        self._lock = threading.Lock()  # around what changes several numbers

    def covers(self, widths: Iterable[int]) -> bool:
        """Whether a forward of each of these widths was timed; others are guessed or interpolated."""
        return self._verify.keys() >= set(widths)

    def verify(self, width: int) -> float:
        """Seconds of one target forward over `width` >= 1 tokens."""
        return self.curve(width)[width - 1]

    def curve(self, widest: int) -> Sequence[float]:
        """`verify(1), verify(2), ...`, at least to `widest`, as known now."""
        curve = self._curve
        if len(curve) >= widest:
            return curve
        with self._lock:
            known = self._verify
            if len(self._spans) < widest or len(known) != self._spanned:
                self._spans, self._spanned = _spans(sorted(known), max(widest, _CURVE)), len(known)
            self._curve = curve = _interpolated(known, self._spans)
            return curve

    def file_under(self, name: str, common: str) -> None:
        """Keep a draft's seconds under another name, which drafts that must take the same time share."""
        self._alias[name] = common

    def knows(self, name: str) -> bool:
        """Whether a step of this draft was timed, in this run or an earlier one."""
        return self._alias.get(name, name) in self._drafts

    def draft(self, name: str) -> float:
        """Seconds of one step (one proposed token) of a draft."""
        known = self._drafts.get(self._alias.get(name, name))
        return _GUESSED_DRAFT * self.verify(1) if known is None else known

    def load(self, name: str) -> float:
        """Seconds that a draft takes to load; unmeasured, as long as the slowest known, or a few plain steps."""
        known = self._loads.get(self._alias.get(name, name))
        if known is not None and known.value is not None:
            return known.value
        with self._lock:
            others = [load.value for load in self._loads.values() if load.value is not None]
        return max(others) if others else _GUESSED_LOAD * self.verify(1)

    def catch_up(self, name: str, tokens: int) -> float:
        """Seconds in which a draft reads `tokens` tokens of the conversation that it missed."""
        if tokens <= 0:
            return 0.0
        known = self._catch_up.get(self._alias.get(name, name))
        if known is None or known.value is None:
            return tokens * _GUESSED_READ * self.draft(name)
        return tokens * known.value

    def observe_load(self, name: str, seconds: float) -> None:
        """Take in the time of one load, from its begin to its completion (never to its submission)."""
        with self._lock:
            self._loads.setdefault(self._alias.get(name, name), _Median()).add(seconds)

    def observe_catch_up(self, name: str, tokens: int, seconds: float) -> None:
        """Take in that a draft read `tokens` tokens in so many seconds."""
        if tokens > 0:
            with self._lock:
                self._catch_up.setdefault(self._alias.get(name, name), _Median()).add(seconds / tokens)

    def observe_verify(self, width: int, seconds: float) -> None:
        """Take in the measured time of one forward over `width` tokens. Samples that are no time are ignored."""
        if width < 1 or not 0 < seconds < math.inf or self._verify.get(width) == seconds:
            return
        with self._lock:
            known = self._verify.get(width)
            self._curve = []
            if known is None:
                self._verify[width] = seconds
                return
            ratio = min(max(seconds / known, 1 / _OUTLIER), _OUTLIER)
            along = ratio ** (_RATE * _COUPLING)
            for other, before in self._verify.items():
                self._verify[other] = before * along
            self._verify[width] = known * ratio**_RATE

    def observe_draft(self, name: str, seconds: float) -> None:
        """Take in the measured time of one step of a draft."""
        if not 0 <= seconds < math.inf:
            return
        name = self._alias.get(name, name)
        with self._lock:
            known, count = self._drafts.get(name), self._seen.get(name, 0) + 1
            self._seen[name] = count
            if not known:
                self._drafts[name] = seconds
            else:  # the first ones weigh more: one of them alone may have met a busy moment
                self._drafts[name] = known + max(_RATE, 1 / (count + 1)) * (min(seconds, _OUTLIER * known) - known)

    def measure(
        self,
        forward: Callable[[int], object],
        widths: Sequence[int],
        *,
        repeats: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Time `forward(width)` on this device and replace what was known: one untimed call, then the median."""
        measured = {}
        for width in widths:
            forward(width)
            samples = []
            for _ in range(repeats):
                begin = clock()
                forward(width)
                samples.append(clock() - begin)
            measured[width] = sorted(samples)[len(samples) // 2]
        fresh = CostTable(measured)
        with self._lock:
            self._verify, self._curve, self._spans = fresh._verify, [], []

    def to_json(self) -> dict[str, Any]:
        """What was measured, as plain JSON values. What was never measured has no entry."""
        with self._lock:
            data: dict[str, Any] = {
                "verify": {str(w): s for w, s in sorted(self._verify.items())},
                "drafts": dict(self._drafts),
            }
            for key, medians in (("loads", self._loads), ("catch_up", self._catch_up)):
                known = {name: median.value for name, median in medians.items() if median.value is not None}
                if known:
                    data[key] = known
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        """The table that `to_json` wrote, also one from before loads were measured. Raises ValueError for others."""
        try:
            verify = {int(width): float(seconds) for width, seconds in data["verify"].items()}
            drafts, loads, catch_up = (
                {str(name): float(seconds) for name, seconds in seconds_by_name.items()}
                for seconds_by_name in (data["drafts"], data.get("loads", {}), data.get("catch_up", {}))
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not a table of measured costs") from error
        return cls(verify, drafts, loads=loads, catch_up=catch_up)


class _Median:
    """The median of the last few samples: one stalled read moves nothing."""

    __slots__ = ("_samples", "value")

    def __init__(self, samples: Sequence[float] = ()) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.value: float | None = None
        for seconds in samples:
            if not 0 <= seconds < _LONGEST:
                raise ValueError("times must be finite seconds, 0 or more")
            self.add(seconds)

    def add(self, seconds: float) -> None:
        """One more; what is no time is ignored."""
        if 0 <= seconds < math.inf:
            self._samples.append(seconds)
            self.value = sorted(self._samples)[(len(self._samples) - 1) // 2]


_Span = tuple[int, int, float, float]
"""For a width, the known widths `left` and `right` that its time is worked out from, `width - left` and `right - left`;
a single known one is left and right, and gives the width's and its own part of the guessed slope."""


def _spans(known: Sequence[int], widest: int) -> list[_Span]:
    """known: measured widths, in order. Those of widths 1 to `widest`."""
    if not known:
        return [(0, 0, 1 + _GUESSED_SLOPE * at, 1.0) for at in range(widest)]
    if len(known) == 1:
        only = known[0]
        return [(only, only, 1 + _GUESSED_SLOPE * at, 1 + _GUESSED_SLOPE * (only - 1)) for at in range(widest)]
    spans: list[_Span] = []
    for width in range(1, widest + 1):
        after = min(max(bisect.bisect_left(known, width), 1), len(known) - 1)
        left, right = known[after - 1], known[after]
        spans.append((left, right, width - left, right - left))
    return spans


def _interpolated(known: Mapping[int, float], spans: Sequence[_Span]) -> list[float]:
    """Seconds of widths 1, 2, ... by the line through the known ones beside each, never falling."""
    if len(known) < 2:
        return [known.get(left, _GUESSED_SECONDS) * part / whole for left, _, part, whole in spans]
    found, top = [], 0.0
    for left, right, part, whole in spans:
        low, high = known[left], known[right]
        value = low + (high - low) * part / whole
        # Outside the measured range a noisy slope must not carry the line below what was measured or below zero.
        least = high if part > whole else 0.1 * low
        if value < least:
            value = least
        if value > top:
            top = value
        found.append(top)
    return found
