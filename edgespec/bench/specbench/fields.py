"""What a field read from a file may be: a check returns the value as it is used, or raises TypeError."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], Any]


def checked(values: Mapping[str, Any], name: str, check: Check) -> Any:
    """The value of that name. Raises ValueError that says what is wrong with it."""
    if name not in values:
        raise ValueError(f"it has no {name!r}")
    try:
        return check(values[name])
    except TypeError:
        raise ValueError(f"{name!r} is {json.dumps(values[name])[:40]}, which cannot be") from None


def of(*kinds: type) -> Check:
    """A value of one of these types; True is no number."""

    def check(value: Any) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError
        return value

    return check


def or_none(check: Check) -> Check:
    """None, or what passes the check."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check) -> Check:
    """A list of what passes the check, as a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError
        return tuple(map(check, value))

    return read


def one_of(known: tuple[str, ...]) -> Check:
    """One of these words."""

    def check(value: Any) -> Any:
        if value not in known:
            raise TypeError
        return value

    return check


text, whole, mapping = of(str), of(int), of(dict)


def number(value: Any) -> float:
    """A whole number or a fraction."""
    return float(of(int, float)(value))
