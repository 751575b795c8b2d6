"""Reading a table of TOML strictly: every key has a type and a range, and none is left over."""

from __future__ import annotations

import builtins
import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from edgespec.errors import DraftError

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST_TEXT = 4000
_MOST_ITEMS = 256
_REQUIRED: Any = object()


class Table:
    """One table of a manifest. Each reader takes its key; `finish` refuses keys that nobody took.

    source: the file, for errors. where: the table's own name, "" for the top. Every failure is a DraftError that names
    file and key and says what the value must be.
    """

    def __init__(self, source: str, where: str, data: Any) -> None:
        self._source = source
        self._where = where
        if not isinstance(data, dict):
            raise DraftError(f"{source}: [{where}] must be a table; correct it, or make the draft again")
        self._data: dict[str, Any] = dict(data)
        self._known: list[str] = []
        self._children: list[Table] = []

    def refused(self, key: str, what: str) -> DraftError:
        """The error about one key: `what` says what is wrong and what it must be."""
        return DraftError(f"{self._source}: {self._full(key)} {what}")

    def text(self, key: str, default: str = _REQUIRED) -> str:
        """Text of any lines, without other control characters."""
        value = self._take(key, default)
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not _printable(value):
            raise self.refused(key, f"must be text of at most {_LONGEST_TEXT} characters, not {_shown(value)}")
        return value

    def line(self, key: str, default: str = _REQUIRED) -> str:
        """One line of text; not empty unless a default says so."""
        value = self.text(key, default)
        if "\n" in value or "\t" in value or not (value.strip() or default == ""):
            raise self.refused(key, f"must be one line of text, not {_shown(value)}")
        return value

    def name(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self.refused(
                key, f"must be a name of at most 64 letters, digits, '.', '_' and '-', not {_shown(value)}"
            )
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self._take(key)
        if not isinstance(value, str) or value not in choices:
            raise self.refused(key, f"must be one of {', '.join(choices)}, not {_shown(value)}")
        return value

    def sha256(self, key: str, default: str = _REQUIRED) -> str:
        """64 lower-case hex digits; empty only if a default says so."""
        value = self._take(key, default)
        if not isinstance(value, str) or not (_SHA256.fullmatch(value) or value == default == ""):
            raise self.refused(key, f"must be a sha256 (64 digits 0-9, a-f), not {_shown(value)}")
        return value

    def whole(self, key: str, least: int, most: int, default: int = _REQUIRED) -> int:
        value = self._take(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refused(key, f"must be a whole number from {least} to {most}, not {_shown(value)}")
        return value

    def number(self, key: str, least: float, most: float, default: float = _REQUIRED) -> float:
        value = self._take(key, default)
        if type(value) not in (int, float) or not least <= value <= most:  # false for NaN
            raise self.refused(key, f"must be a number from {least:g} to {most:g}, not {_shown(value)}")
        return float(value)

    def truth(self, key: str) -> bool:
        """true or false; false where it is not given."""
        value = self._take(key, False)
        if type(value) is not bool:
            raise self.refused(key, f"must be true or false, not {_shown(value)}")
        return value

    def words(self, key: str, choices: tuple[str, ...]) -> tuple[str, ...]:
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(word, str) and word in choices for word in value):
            raise self.refused(key, f"must be a list of {', '.join(choices)}, not {_shown(value)}")
        return tuple(value)

    def table(self, key: str) -> Table:
        return self._child(key, self._take(key))

    def optional(self, key: str, read: Callable[[Table], T]) -> T | None:
        """What `read` makes of the table, None where there is none."""
        if self._data.get(key) is None:
            self._take(key, None)
            return None
        return read(self.table(key))

    def tables(self, key: str, *, names: str) -> Mapping[str, Table]:
        """The tables inside a table, by name. names: "file" (plain names of files), "domain" or "build"."""
        outer = self._child(key, self._take(key, {}))
        pattern, must = (_FILE, "the name of a file in this folder") if names == "file" else (_NAME, "a plain name")
        if len(outer._data) > _MOST_ITEMS:
            raise self.refused(key, f"has {len(outer._data)} entries; at most {_MOST_ITEMS} are read")
        names_found = builtins.list(outer._data)
        for name in names_found:
            if not pattern.fullmatch(name):
                raise self.refused(key, f"holds {_shown(name)}, which must be {must}: no path, link or device")
        return {name: outer.table(name) for name in names_found}

    def list(self, key: str) -> builtins.list[Table]:
        value = self._take(key, [])
        if not isinstance(value, list) or len(value) > _MOST_ITEMS:
            raise self.refused(key, f"must be a list of at most {_MOST_ITEMS} tables, not {_shown(value)}")
        return [self._child(key, item) for item in value]

    def texts(self, key: str) -> dict[str, str]:
        """A table of plain names and single lines."""
        inner = self._child(key, self._take(key, {}))
        keys = builtins.list(inner._data)
        if len(keys) > _MOST_ITEMS or not all(_NAME.fullmatch(name) for name in keys):
            raise self.refused(key, "must be a table of plain names")
        return {name: inner.line(name) for name in keys}

    def numbers(self, key: str, *, required: bool) -> dict[str, int | float]:
        """A table of finite numbers from 0 up, as ints or floats as they are."""
        inner = Table(self._source, self._full(key), self._take(key, _REQUIRED if required else {}))
        if len(inner._data) > _MOST_ITEMS:
            raise self.refused(key, f"has {len(inner._data)} entries; at most {_MOST_ITEMS} are read")
        for name, value in inner._data.items():
            if type(value) not in (int, float) or not (math.isfinite(value) and 0 <= value < 1 << 48):
                raise inner.refused(name, f"must be a number from 0 up, not {_shown(value)}")
        return dict(inner._data)

    def finish(self) -> None:
        """Refuse keys that were not taken, here and in the tables taken from here."""
        for child in self._children:
            child.finish()
        for key in self._data:
            near = difflib.get_close_matches(key, self._known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(self._known)}"
            raise self.refused(key[:64], f"is not known; {hint}")

    def _child(self, key: str, data: Any) -> Table:
        child = Table(self._source, self._full(key), data)
        self._children.append(child)
        return child

    def _take(self, key: str, default: Any = _REQUIRED) -> Any:
        self._known.append(key)
        if key in self._data:
            return self._data.pop(key)
        if default is _REQUIRED:
            raise self.refused(key, "is missing; add it, or make the draft again")
        return default

    def _full(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


def _printable(text: str) -> bool:
    return all(c in "\n\t" or (ord(c) >= 32 and ord(c) != 127 and not 0xD800 <= ord(c) < 0xE000) for c in text)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
