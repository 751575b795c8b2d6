"""`--load-ratio 0.5..8`: a range on the command line, which is swept instead of one value being taken."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from edgespec.errors import ConfigError


class Range(NamedTuple):
    """From low to high, both included."""

    low: float
    high: float

    def values(self, name: str, usual: Sequence[float], most: float) -> list[float]:
        """The ends, and of a sweep's usual values those between them. most: beyond it values mean nothing here.

        Raises ConfigError for a range that begins there.
        """
        if self.low > most:
            raise ConfigError(f"The range {self.low:g}..{self.high:g} of {name} begins above {most:g}, the most here.")
        high = min(self.high, most)
        return sorted({self.low, *(value for value in usual if self.low < value < high), high})


def one_or_range(number: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter for argparse: a number as `number` reads it, or a `Range` of two such."""

    def convert(text: str) -> Any:
        low, dots, high = text.partition("..")
        if not dots:
            return number(text)
        made = Range(number(low), number(high))
        if made.low > made.high:
            raise argparse.ArgumentTypeError(f"wants a range that goes up, as in {high}..{low}, not '{text}'")
        return made

    return convert


def single(value: Any) -> Any:
    """What a flag sets where it is not swept: its value, and nothing (as the costs have it) for a range."""
    return None if isinstance(value, Range) else value
