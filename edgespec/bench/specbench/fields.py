"""What is read from a run's files: JSON that figures can be made of, and its fields.

A check returns the value as it is used, or raises TypeError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], Any]
BEYOND = 1e100  # no clock and no counter comes to it, and sums of what is less stay finite
_MOST_DIGITS = 100
_LONG = re.compile(rf"\d{{{_MOST_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parsed(text: str) -> Any:
    """The value of JSON. Raises ValueError for anything else, and for what no figure can be made of, or no file takes:
    NaN and Infinity, numbers from `BEYOND` on, half a character, and what is nested as no run nests it."""
    # Records have millions of token ids: no call of Python's for each, unless there is reason to.
    parse_int = _digits if _LONG.search(text) else None
    try:
        value = json.loads(text, parse_constant=_refused, parse_float=_fraction, parse_int=parse_int)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it has half a character (a lone surrogate)") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def as_read(value: Any) -> Any:
    """A value as it is read again once it is written: half characters, as in file names that are no UTF-8, become
    question marks."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _refused(name: str) -> Any:
    raise ValueError(f"{name[:20]} is no number")


def _fraction(text: str) -> float:
    value = float(text)
    return value if abs(value) < BEYOND else _refused(text)


def _digits(text: str) -> int:
    return int(text) if len(text) <= _MOST_DIGITS else _refused(text)


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


def wholes(value: Any) -> tuple[int, ...]:
    """A list of whole numbers from 0 up, as a tuple: `list_of(whole)`, but for its time."""
    if not isinstance(value, list) or not {*map(type, value)} <= {int} or min(value, default=0) < 0:
        raise TypeError
    return tuple(value)


def one_of(known: tuple[str, ...]) -> Check:
    """One of these words."""

    def check(value: Any) -> Any:
        if value not in known:
            raise TypeError
        return value

    return check


def mapping_of(checks: Mapping[str, Check]) -> Check:
    """An object in which these keys, where they are, pass their checks; it stays as it is. Others are not looked at."""

    def check(value: Any) -> Any:
        for name in checks.keys() & mapping(value).keys():
            checked(value, name, checks[name])
        return value

    return check


text, mapping = of(str), of(dict)
_whole, _number = of(int), of(int, float)


def whole(value: Any) -> int:
    """A whole number from 0 up, as counters have it."""
    return int(_not_negative(_whole(value)))


def number(value: Any) -> float:
    """A whole number or a fraction, from 0 up."""
    return float(_not_negative(_number(value)))


def _not_negative(value: float) -> float:
    if not 0 <= value < BEYOND:
        raise TypeError
    return value
