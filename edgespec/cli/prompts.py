"""Where a prompt comes from: an argument, a file, or stdin; and files that a person adds to a chat message."""

from __future__ import annotations

import sys
from pathlib import Path

from edgespec.cli.terminal import replace_surrogates
from edgespec.errors import PromptError

MAX_FILE_BYTES = 1 << 20  # a megabyte of text is far beyond the context of every supported model


def read_stdin() -> str:
    """All of stdin as text; bytes that are not valid in its encoding become U+FFFD. A closed stdin is ''."""
    if sys.stdin is None or sys.stdin.closed:
        return ""
    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:  # replaced by a plain text stream
        return replace_surrogates(sys.stdin.read())
    text: str = raw.read().decode(sys.stdin.encoding or "utf-8", "replace")
    return replace_surrogates(text.removeprefix("\ufeff"))


def read_text_file(path: str, what: str) -> str:
    """The text of a UTF-8 file. PromptError names `what` and the file if it is missing, too large, or not text."""
    file = Path(path).expanduser()
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"{what} '{path}' cannot be read: {reason}.") from error
    if len(data) > MAX_FILE_BYTES:
        raise PromptError(f"{what} '{path}' is larger than {MAX_FILE_BYTES:,} bytes; give a shorter file.")
    if b"\x00" in data:
        raise PromptError(f"{what} '{path}' is not a text file (it has NUL bytes); give a UTF-8 text file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{what} '{path}' is not UTF-8 text (byte {error.start}); convert it to UTF-8 first."
        ) from error


def read_prompt(argument: str | None, file: str | None, *, raw: bool, dash_is_stdin: bool = True) -> str:
    """The prompt of `generate`: `argument` ('-' = stdin) or the text of `file`; stdin is read only when asked for.

    The line ending that editors and `echo` add is dropped unless `raw`. An empty prompt is a PromptError that names it.
    """
    if argument is not None and file is not None:
        raise PromptError("Both a prompt and --prompt-file were given; give one of them.")
    if argument is None and file is None:
        raise PromptError(
            "No prompt was given: pass it as an argument, name a file with --prompt-file, or use - for stdin."
        )
    if file is not None:
        text, source = read_text_file(file, "The prompt file"), f"The prompt file '{file}'"
    elif argument == "-" and dash_is_stdin:
        text, source = read_stdin(), "The prompt on stdin"
    else:
        return _not_empty(replace_surrogates(argument or ""), "The prompt", raw)
    return _not_empty(text if raw else unix_lines(text).removesuffix("\n"), source, raw)


def unix_lines(text: str) -> str:
    """`text` with every CR LF turned into LF."""
    return text.replace("\r\n", "\n")


def _not_empty(text: str, source: str, raw: bool) -> str:
    if not (text if raw else text.strip()):
        raise PromptError(f"{source} is empty; give at least one word.")
    return text
