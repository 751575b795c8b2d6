"""Saved chats: one JSON file with system message, messages and sampling parameters; written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.decoding.params import SamplingParams
from edgespec.errors import EdgespecError, ParameterError
from edgespec.files import write_text

FORMAT = "edgespec-chat"
VERSION = 1
_KEYS = {"format", "version", "system", "messages", "params"}
_MAX_BYTES = 64 << 20


class TranscriptError(EdgespecError):
    """A chat file cannot be written, read, or is not what `save` writes."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a chat file holds. messages: user and assistant turns in order; the system message stands apart."""

    system: str | None
    messages: tuple[dict[str, str], ...]
    params: SamplingParams


def save(path: str, system: str | None, messages: Sequence[dict[str, str]], params: SamplingParams) -> Path:
    """Write a chat file, readable by its owner only, and return its path. A file of another kind is never replaced."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "system": system,
        "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
        "params": dataclasses.asdict(params),
    }
    try:
        file = Path(path).expanduser().resolve()
        if file.exists() and not (file.is_file() and (file.stat().st_size == 0 or _is_chat_file(file))):
            raise TranscriptError(f"'{path}' exists and is not a saved chat; choose another name.")
        write_text(file, json.dumps(data, indent=1) + "\n", private=True)
    except (OSError, ValueError) as error:
        raise TranscriptError(
            f"The chat cannot be saved to '{path}': {getattr(error, 'strerror', None) or error}."
        ) from error
    return file


def load(path: str) -> Transcript:
    """Read a chat file. Anything that `save` would not have written is a TranscriptError that says what and where."""
    file = Path(path).expanduser()
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise TranscriptError(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if len(raw) > _MAX_BYTES:
        raise TranscriptError(f"'{path}' is larger than {_MAX_BYTES >> 20} MiB, which no saved chat is.")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise TranscriptError(f"'{path}' is not a saved chat: it is not JSON.") from error
    return _checked(path, data)


def _checked(path: str, data: Any) -> Transcript:
    def refuse(problem: str) -> TranscriptError:
        return TranscriptError(f"'{path}' is not a saved chat that this version can read: {problem}.")

    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise refuse(f'it has no "format": "{FORMAT}"')
    if data.get("version") != VERSION or data["version"] is True:
        raise refuse(f"its version is {data.get('version')!r}, not {VERSION}")
    if set(data) != _KEYS:
        raise refuse(f"its keys are {', '.join(sorted(map(str, data)))} instead of {', '.join(sorted(_KEYS))}")
    if not (data["system"] is None or _is_text(data["system"])):
        raise refuse("its system message is not text")
    if not isinstance(data["messages"], list):
        raise refuse("its messages are not a list")
    for number, message in enumerate(data["messages"]):
        expected = ("user", "assistant")[number % 2]
        if not isinstance(message, dict) or set(message) != {"role", "content"} or not _is_text(message["content"]):
            raise refuse(f"message {number + 1} is not an object with a role and a text")
        if message["role"] != expected:
            raise refuse(f"message {number + 1} is from {message['role']!r} where {expected} is due")
    if len(data["messages"]) % 2:
        raise refuse("its last question has no answer")
    if not isinstance(data["params"], dict):
        raise refuse("its params are not an object")
    try:
        params = SamplingParams.from_dict(data["params"])
    except ParameterError as error:
        raise refuse(str(error).rstrip(".")) from error
    return Transcript(data["system"], tuple(data["messages"]), params)


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell lone surrogates, which no tokenizer takes
        return False
    return True


def _is_chat_file(file: Path) -> bool:
    with file.open("rb") as stream:
        return FORMAT.encode() in stream.read(200)
