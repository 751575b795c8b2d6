"""Counts and times in sentences."""

from __future__ import annotations


def counted(count: int, what: str, many: str = "") -> str:
    """ "1 question", "2 questions". many: the plural, if it is not with an s alone."""
    return f"{count:,} {what if count == 1 else many or f'{what}s'}"


def are(count: int) -> str:
    """The verb after such a count."""
    return "is" if count == 1 else "are"


def were(count: int) -> str:
    return "was" if count == 1 else "were"


def do(count: int) -> str:
    return "does" if count == 1 else "do"


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
