"""A run's folder: what one line of its records says, reading it back, and writing it so that nothing is lost.

run.json            what was run on what, and how each arm fared
records/<arm>.jsonl one line a turn, appended as it is measured; the truth, everything else is made from it
model_answer/       the same in Spec-Bench's own form (model_answers.py)
trace/, state/      Chrome traces of the last questions; what policies learned
lock                held while somebody writes
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.bench.specbench import fields
from edgespec.errors import ConfigError
from edgespec.files import write_text

FORMAT = 1
PLAIN = "plain"  # the arm that all others are compared with
RUN, RECORDS, LOCK = "run.json", "records", "lock"
ANSWERS, TRACES, STATE = "model_answer", "trace", "state"
KINDS, STATUSES = ("policy", "peer"), ("ok", "absent", "error")


@dataclass(frozen=True, slots=True)
class Record:
    """One turn of one question, answered by one arm.

    order: index of the question in the whole run, the same in every shard. repeat, turn: from 0. group: which arms ran
    beside it; ratios are made with `plain` of the same group. session: 0, and one more for each --resume that measured
    something. error: why there is no answer; then all that was measured is empty or 0.
    round_tokens: tokens emitted by each target forward after the prefill's; empty where an engine does not tell.
    first_token_s: seconds from the prompt to the first token (None: there is none); decode_tokens in decode_s seconds
    came after that; seconds: of the whole turn.
    stats: GenerationStats.to_dict() of a policy, {} of a peer. rss_bytes: resident memory of the arm's process right
    after the turn; resident: drafts held then. disturbance: share of all processors that other processes took,
    arms that only waited among them.
    at: when the turn had ended, in seconds since the epoch; None in runs that were measured before it was written.
    """

    question_id: str
    category: str
    domain: str
    task: str
    repeat: int
    turn: int
    order: int
    group: int = 0
    error: str | None = None
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    round_tokens: tuple[int, ...] = ()
    first_token_s: float | None = None
    decode_tokens: int = 0
    decode_s: float = 0.0
    seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)
    rss_bytes: int = 0
    resident: tuple[str, ...] = ()
    disturbance: float | None = None
    session: int = 0
    at: float | None = None

    @property
    def key(self) -> tuple[int, int, str, int]:
        """(group, repeat, question, turn): each of them is run once by an arm."""
        return self.group, self.repeat, self.question_id, self.turn

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, value: Any) -> Record:
        """Raises ValueError that names the key which is missing or has the wrong type; `_LATER` may be missing."""
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
        wanted = {name: check for name, check in _FIELDS.items() if name in value or name not in _LATER}
        return cls(**{name: fields.checked(value, name, check) for name, check in wanted.items()})


@dataclass(frozen=True, slots=True)
class ArmInfo:
    """How one arm fared. weights: what it computes with, in words. message: why it is absent or has an error."""

    kind: str
    status: str = "ok"
    message: str = ""
    weights: str = ""
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run as it stands in its folder. questions: how many it has (of its shard). skipped: lines of the question file
    that were left out, as {"file", "line", "reason"}. records: by arm, in the order in which they were measured."""

    path: Path
    settings: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    started: str = ""
    version: str = ""
    arms: dict[str, ArmInfo] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    questions: int = 0
    finished: bool = False
    records: dict[str, list[Record]] = field(default_factory=dict)


def file_name(arm: str) -> str:
    """An arm's name as that of a file."""
    return re.sub(r"[:@,=/\\\s]", "_", arm)


def records_file(folder: Path, arm: str) -> Path:
    return folder / RECORDS / f"{file_name(arm)}.jsonl"


def has_run(path: Path) -> bool:
    """Whether a run, whole or not, is in this folder."""
    return (path / RUN).exists() or any(file.stat().st_size for file in (path / RECORDS).glob("*.jsonl"))


def other_files(path: Path) -> list[str]:
    """Names of what is in a folder without a run that a new run must not find there, in order.

    Of a run that was refused there may be its lock and empty folders. What an earlier one left is in the way: with what
    its policies learned, a new one would meet texts that it has seen.
    """
    return sorted(file.name for file in path.iterdir() if not _of_nothing(file)) if path.is_dir() else []


def _of_nothing(file: Path) -> bool:
    if file.name in (RECORDS, ANSWERS, TRACES, STATE):
        return not any(inner.is_file() and inner.stat().st_size for inner in file.rglob("*"))
    return file.name == LOCK


def read_run(path: str | Path) -> RunFolder:
    """The run in a folder. A half-written last line of a records file is ignored.

    ConfigError for a folder that holds no run, or names the file and line that is damaged.
    """
    folder = Path(path).expanduser()
    file = folder / RUN
    try:
        document = fields.parsed(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if has_run(folder):
            raise ConfigError(
                f"{folder} has records, but no {RUN}, which says what they are of: put it back, or take another folder."
            ) from error
        raise ConfigError(f"There is no run in {folder} (no {RUN}): give the folder of `bench specbench`.") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{file} is damaged, it is not JSON: {error}.") from error
    try:
        return _run(folder, document)
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}.") from error


def _run(folder: Path, document: Any) -> RunFolder:
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    if document.get("format") != FORMAT:
        raise ConfigError(
            f"{folder / RUN} has format {document.get('format')!r}; this version of edgespec reads format {FORMAT}."
        )
    plain = {name: fields.checked(document, name, check) for name, check in _RUN_FIELDS.items()}
    arms = {name: _arm(name, value) for name, value in fields.checked(document, "arms", fields.mapping).items()}
    unique_files(arms)
    records = {arm: read_records(records_file(folder, arm)) for arm in arms}
    return RunFolder(path=folder, arms=arms, records=records, **plain)


def _arm(name: str, value: Any) -> ArmInfo:
    if not isinstance(value, dict):
        raise ValueError(f"arm {name!r} is not a JSON object")
    try:
        return ArmInfo(**{key: fields.checked(value, key, check) for key, check in _ARM_FIELDS.items()})
    except ValueError as error:
        raise ValueError(f"arm {name!r}: {error}") from None


def read_records(file: Path) -> list[Record]:
    """The whole lines of a records file; none where it is not there. ConfigError names the line that is damaged.

    A turn that failed may come once more, further down (--retry-errors): then the later one counts.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    found: dict[tuple[int, int, str, int], tuple[int, Record]] = {}
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):  # what follows the last line end is half a line
        try:
            record = Record.from_json(fields.parsed(line.decode("utf-8")))
            before = found.pop(record.key, None)
            if before is not None and before[1].error is None:
                raise ValueError(f"the same turn as in line {before[0]}")
        except ValueError as error:
            raise ConfigError(
                f"{file}, line {number} is damaged: {error}. Take the line out, and --resume measures it anew."
            ) from error
        found[record.key] = number, record
    return [record for _, record in found.values()]


def record_line(record: Record) -> bytes:
    """A record as it stands in its file. Raises ValueError for what no file takes (NaN, half a character), and for what
    would not be read again: then nothing of the run would."""
    line = json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False)
    Record.from_json(fields.parsed(line))
    return line.encode("utf-8") + b"\n"


def unique_files(arms: Iterable[str]) -> None:
    """ConfigError if two arms would share a file."""
    names: dict[str, str] = {}
    for arm in arms:
        other = names.setdefault(file_name(arm), arm)
        if other != arm:
            raise ConfigError(f"the arms {other!r} and {arm!r} would be written into one file: leave one of them out")


def differing(one: Any, other: Any) -> tuple[str, str]:
    """Two values of a setting as a message shows them: of tables what is not the same in both, and a line at most."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        one, other = ({key: each[key] for key in keys if key in each} for each in (one, other))
    return f"{one!r:.100}", f"{other!r:.100}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Make the folder and hold its lock. ConfigError if it cannot be written, or another run writes into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(f"The folder {path} cannot be written ({error.strerror}): give --out another one.") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"Another run writes into {path}: wait until it ends, or give --out another folder."
            ) from error
        yield
    finally:
        os.close(handle)


class RunWriter:
    """Writes a run as it goes on. Every record is on its way to the disk when `append` returns.

    A half-written last line, which a run that was killed may leave, is cut off first. Hold the lock (`locked`).
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        unique_files(run.arms)
        self._files: dict[str, int] = {}
        try:
            for part in (RECORDS, ANSWERS, TRACES, STATE):
                (run.path / part).mkdir(exist_ok=True)
            self.save()
            for arm in run.arms:
                self._files[arm] = self._open(records_file(run.path, arm))
                run.records.setdefault(arm, [])
        except OSError as error:
            self.close()
            raise ConfigError(f"{error.filename or run.path} cannot be written: {error.strerror}.") from error

    def _open(self, file: Path) -> int:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(handle, whole)
        return handle

    def append(self, arm: str, record: Record) -> None:
        """ConfigError if the disk does not take it; what it took of the line is taken back. An error of the same turn
        before counts no more."""
        line = record_line(record)
        handle = self._files[arm]
        before = os.lseek(handle, 0, os.SEEK_END)
        try:
            if os.write(handle, line) < len(line):
                raise OSError(0, "the disk is full")
        except OSError as error:
            os.ftruncate(handle, before)
            raise ConfigError(
                f"{records_file(self.run.path, arm)} cannot be written ({error.strerror}); what was measured before "
                "is kept, and --resume goes on from there."
            ) from error
        records = self.run.records[arm]
        failed = next((i for i, old in enumerate(records) if old.error is not None and old.key == record.key), None)
        if failed is not None:
            del records[failed]
        records.append(record)

    def arm(self, name: str, **changes: Any) -> None:
        """Note how an arm fares."""
        self.run.arms[name] = dataclasses.replace(self.run.arms[name], **changes)

    def save(self, *, finished: bool = False) -> None:
        """Write run.json."""
        run = self.run = dataclasses.replace(self.run, finished=finished)
        document = {
            "format": FORMAT,
            **{name: getattr(run, name) for name in _RUN_FIELDS},
            "arms": {name: dataclasses.asdict(arm) for name, arm in run.arms.items()},
        }
        try:
            write_text(run.path / RUN, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise ConfigError(f"{run.path / RUN} cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        for handle in self._files.values():
            os.fsync(handle)
            os.close(handle)
        self._files.clear()


_LATER = ("session", "at")  # what the first runs of this format do not have
_FIELDS: dict[str, fields.Check] = {
    **dict.fromkeys(("question_id", "category", "domain", "task"), fields.text),
    **dict.fromkeys(("repeat", "turn", "order", "group", "session"), fields.whole),
    "error": fields.or_none(fields.text),
    "prompt_tokens": fields.whole,
    "token_ids": fields.wholes,
    "round_tokens": fields.wholes,
    "first_token_s": fields.or_none(fields.number),
    "decode_tokens": fields.whole,
    "decode_s": fields.number,
    "seconds": fields.number,
    "stats": fields.mapping,
    "rss_bytes": fields.whole,
    "resident": fields.list_of(fields.text),
    "disturbance": fields.or_none(fields.number),
    "at": fields.or_none(fields.number),
}
_ARM_FIELDS: dict[str, fields.Check] = {
    "kind": fields.one_of(KINDS),
    "status": fields.one_of(STATUSES),
    "message": fields.text,
    "weights": fields.text,
    "peak_memory_bytes": fields.or_none(fields.whole),
}
# Of settings and machine, what a report or a --resume goes by.
_SETTINGS: dict[str, fields.Check] = {
    "repeats": fields.or_none(fields.whole),
    "temperature": fields.or_none(fields.number),
    "policies": fields.or_none(fields.list_of(fields.text)),
}
_MACHINE: dict[str, fields.Check] = {
    **dict.fromkeys(("cpu", "device", "code"), fields.or_none(fields.text)),
    **dict.fromkeys(("cores", "threads", "memory_bytes", "context"), fields.or_none(fields.whole)),
    "groups": fields.list_of(fields.list_of(fields.text)),
}
_RUN_FIELDS: dict[str, fields.Check] = {
    "settings": fields.mapping_of(_SETTINGS),
    "machine": fields.mapping_of(_MACHINE),
    **dict.fromkeys(("command", "started", "version"), fields.text),
    "skipped": lambda value: list(fields.list_of(fields.mapping)(value)),
    "questions": fields.whole,
    "finished": fields.of(bool),
}
