"""Converters for argparse that several commands of `bench` share. What they refuse is a usage error that says why."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> float:
    """A number above 0 (and below a million: what is more is a slip of the finger)."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"wants a number above 0, not '{text}'")
    return value


def names(text: str) -> list[str]:
    """One name or more, with commas between."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError("wants names with commas between")
    return found
