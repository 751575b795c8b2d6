"""The folder of a run: what was measured, written as soon as it is, and read again for validation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from edgespec.bench.load.records import Sample, Served, Stretch
from edgespec.errors import ConfigError
from edgespec.files import write_text

STRETCHES, REQUESTS, BATCHES, DOCUMENT = "stretches.jsonl", "requests.jsonl", "batches.jsonl", "load.json"
SOAK = "soak.json"
STATE = "state"  # what policies learn in a run stays there
COSTS = "costs.json"


class Folder:
    """A new folder, or an empty one. Raises ConfigError if it has a run already, or cannot be written.

    If nothing was kept in it when it is closed, as of a run that was refused, it is as it was before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept = False
        try:
            self._before = {each for each in (path, path / STATE) if each.exists()}
            path.mkdir(parents=True, exist_ok=True)
            if any((path / name).exists() for name in (STRETCHES, REQUESTS, BATCHES, DOCUMENT, SOAK)):
                raise ConfigError(f"There is a run in {path}: give --out another folder.")
            self._files = {name: _opened(path / name) for name in (STRETCHES, REQUESTS, BATCHES)}
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another with --out.") from error

    def keep(self, stretch: Stretch) -> None:
        """Write one stretch down."""
        self._kept = True
        place = {"order": stretch.order}
        self._write(REQUESTS, [place | one.to_json() for one in stretch.served])
        self._write(BATCHES, [place | _rounded(sample) for sample in stretch.samples])
        self._write(STRETCHES, [stretch.head()])

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        file = self._files[name]
        try:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
            file.flush()
        except OSError as error:
            raise ConfigError(f"{self.path / name} cannot be written: {error.strerror}.") from error

    def write(self, name: str, text: str) -> None:
        """Another file of the run, whole. Raises ConfigError."""
        self._kept = True
        try:
            write_text(self.path / name, text)
        except OSError as error:
            raise ConfigError(f"{self.path / name} cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if not self._kept:
            self._discard()

    def _discard(self) -> None:
        """Else what is left of it would keep the corrected command from the same folder."""
        for name in self._files:
            (self.path / name).unlink(missing_ok=True)
        state = self.path / STATE
        if state not in self._before:
            shutil.rmtree(state, ignore_errors=True)
        if self.path not in self._before:
            with suppress(OSError):  # something else lies in it by now
                self.path.rmdir()


def _opened(path: Path) -> IO[str]:
    return path.open("w", encoding="utf-8")


def _rounded(sample: Sample) -> dict[str, Any]:
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in sample._asdict().items()}


def read(path: Path) -> tuple[dict[str, Any], list[Stretch]]:
    """A run's document and its stretches. Raises ConfigError naming what is missing or damaged."""
    try:
        document = json.loads((path / DOCUMENT).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} has no finished run of 'bench load': {DOCUMENT} cannot be read.") from error
    except ValueError as error:
        raise ConfigError(f"{path / DOCUMENT} is damaged: {error}.") from error
    try:
        return document, _stretches(path)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {type(error).__name__}: {error}.") from error


def _stretches(path: Path) -> list[Stretch]:
    found: dict[int, Stretch] = {}
    for row in _rows(path / STRETCHES):
        row["rss"] = [tuple(pair) for pair in row["rss"]]
        found[row["order"]] = Stretch(**row)
    for row in _rows(path / REQUESTS):
        order = row.pop("order")
        if order in found:  # else the run broke off while it was written
            found[order].served.append(Served.from_json(row))
    for row in _rows(path / BATCHES):
        order = row.pop("order")
        if order in found:
            found[order].samples.append(Sample(**row))
    return list(found.values())


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        try:
            row: Mapping[str, Any] = json.loads(line)
            yield dict(row)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}, line {number} is damaged: {error}.") from error
