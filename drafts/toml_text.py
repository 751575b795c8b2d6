"""A small TOML writer for what manifests hold: tables, lists of tables, text, numbers and lists of text."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(data: Mapping[str, Any]) -> str:
    """`data` as TOML; reading it gives equal data. Raises ValueError for what TOML or this writer has no form for."""
    lines: list[str] = []
    _table(lines, (), data)
    return "\n".join(lines).strip("\n") + "\n"


def _table(lines: list[str], path: tuple[str, ...], data: Mapping[str, Any]) -> None:
    for key, value in data.items():
        if not isinstance(value, Mapping) and not _is_tables(value):
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            if not value or any(not isinstance(inner, Mapping) for inner in value.values()):
                lines += ["", f"[{_dotted(here)}]"]
            _table(lines, here, value)
        elif _is_tables(value):
            for inner in value:
                lines += ["", f"[[{_dotted(here)}]]"]
                _table(lines, here, inner)


def _is_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _dotted(path: Sequence[str]) -> str:
    return ".".join(_key(key) for key in path)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, numbers.Integral):  # numpy's too
        return str(int(value))
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return repr(float(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise ValueError(f"{value!r} has no form in a manifest")


def _text(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML wants DEL escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
