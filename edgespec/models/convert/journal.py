"""What an interrupted conversion has done already: one line for each tensor that was written completely.

The first line says what is converted, how, and by which program; a journal of anything else is not gone on with. Every
line begins with its own crc32, and a tensor's line holds the crc32 of its bytes. Nothing is synced: whatever a crash
made of the files shows when both are compared, and is converted again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ConfigError
from edgespec.files import write_text
from edgespec.models.convert.writer import Form
from edgespec.models.weights.quantisation import OWN_VERSION
from edgespec.models.weights.weight_file import WeightFile

NAME = ".journal"
_MOST_BYTES = 64 << 20
_TYPES = ("float16", "float32", "uint8", "int8")


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor that was written: `forms` of the arrays that it became in order, and the crc32 of their bytes.

    form: for the table that is shown. error, squares: as `conversion.Kind` has them.
    """

    name: str
    forms: Mapping[str, Form]
    checksum: int
    form: str
    error: float = 0.0
    squares: float = 0.0

    def to_data(self) -> dict[str, Any]:
        forms = [[name, dtype.name, list(shape)] for name, (dtype, shape) in self.forms.items()]
        return {
            "name": self.name, "forms": forms, "checksum": self.checksum,
            "form": self.form, "error": self.error, "squares": self.squares,
        }  # fmt: skip

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Written:
        """Raises KeyError, TypeError or ValueError for what `to_data` does not give."""
        if not data["forms"] or any(kind not in _TYPES for _, kind, _ in data["forms"]):
            raise ValueError("no forms")
        forms = {name: (np.dtype(kind), tuple(map(int, shape))) for name, kind, shape in data["forms"]}
        numbers = float(data["error"]), float(data["squares"])
        return cls(str(data["name"]), forms, int(data["checksum"]), str(data["form"]), *numbers)


def identity(weights: WeightFile, settings: Mapping[str, Any], program: str) -> dict[str, Any]:
    """What the bytes of a conversion depend on: the source as it is now, the settings, and the programs."""
    return {
        "source": {"name": weights.path.name, "fingerprint": weights.fingerprint(), "files": weights.stamps()},
        "settings": dict(settings),
        "edgespec": [program, OWN_VERSION],
        "numpy": np.__version__,
    }


def read(folder: Path, wanted: Mapping[str, Any]) -> tuple[list[Written], str]:
    """(what the journal in `folder` says is written, "") or ([], why it is of no use, "" if there is none).

    Lines from the first damaged one on are left out.
    """
    try:
        path = folder / NAME
        lines = path.read_bytes().split(b"\n")[:-1] if path.stat().st_size <= _MOST_BYTES else []
    except OSError:
        return [], ""
    records = []
    for line in lines:
        data = _parsed(line)
        if data is None:
            break
        records.append(data)
    if not records:
        return [], "its journal is damaged"
    reason = _difference(records[0], wanted)
    if reason:
        return [], reason
    entries = []
    for data in records[1:]:
        try:
            entries.append(Written.from_data(data))
        except (KeyError, TypeError, ValueError):
            break
    return entries, ""


def has_entries(folder: Path) -> bool:
    """Whether a journal in `folder` says of any tensor that it is written."""
    try:
        return (folder / NAME).read_bytes().count(b"\n") > 1
    except OSError:
        return False


class Journal:
    """The journal of a conversion in progress: begun anew with what is kept of an earlier one, then appended to."""

    def __init__(self, folder: Path, wanted: Mapping[str, Any], kept: list[Written]) -> None:
        self._path = folder / NAME
        text = "".join(_line(data) for data in (wanted, *(each.to_data() for each in kept)))
        try:
            write_text(self._path, text)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(error) from error

    def add(self, written: Written) -> None:
        """Note a tensor whose bytes are all in its file."""
        line = _line(written.to_data()).encode()
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def _refused(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._path}: cannot be written ({error.strerror}); give --out a disk with room.")


def _line(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    text = line[9:]
    if line[:9] != b"%08x " % zlib.crc32(text):
        return None
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What an earlier conversion had otherwise, in words; "" if nothing."""
    words = {"source": "of another source, or of one that was changed since", "numpy": "with another version of numpy"}
    words["edgespec"] = "by another version of edgespec"
    plain = json.loads(json.dumps(wanted))
    for key in plain:
        if found.get(key) == plain[key]:
            continue
        if key != "settings":
            return f"it was made {words[key]}"
        before = found.get(key)
        names = [n for n in plain[key] if not isinstance(before, dict) or before.get(n) != plain[key][n]]
        return f"it was made with other settings ({', '.join(names)})"
    return ""
