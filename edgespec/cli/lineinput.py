"""Reading a person's messages: prompt_toolkit on a terminal, plain lines elsewhere; multi-line input; completion."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from edgespec.cli.terminal import Output, is_terminal, replace_surrogates, stderr

PROMPT = "> "
CONTINUATION = ". "
QUOTES = '"""'

# The text before the cursor -> (characters to replace, candidates)
Complete = Callable[[str], tuple[int, list[str]]]


class LineReader(Protocol):
    """Reads one message. EOFError = the input has ended (Ctrl-D); KeyboardInterrupt = Ctrl-C on an empty line."""

    def read(self) -> str: ...


def is_incomplete(text: str) -> bool:
    """Whether the message goes on after this Enter: it ends with an odd number of backslashes, or \"\"\" is open."""
    if text.lstrip().startswith(QUOTES):
        return QUOTES not in text.lstrip()[len(QUOTES) :]
    return _goes_on(text)


def _goes_on(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def unfold(text: str) -> str:
    """The message behind multi-line input: without the quotes around it (exact inside), or without its backslashes."""
    body = text.strip()
    if body.startswith(QUOTES):
        inner = body[len(QUOTES) :]
        end = inner.rfind(QUOTES)
        text = inner if end < 0 else inner[:end] + inner[end + len(QUOTES) :]
        return re.sub(r"\n[ \t]*\Z", "", text).removeprefix("\n")  # the editor indents the line of the closing quotes
    lines = text.split("\n")
    return "\n".join([*(line[:-1] if _goes_on(line) else line for line in lines[:-1]), lines[-1]])


class PlainReader:
    """Lines of stdin with a bare prompt on stderr: for dumb terminals and when stdout is no terminal."""

    def __init__(self, output: Output | None = None) -> None:
        self.output = output or stderr()

    def read(self) -> str:
        text = self._line(PROMPT)
        while is_incomplete(text):
            text += "\n" + self._line(CONTINUATION)
        return replace_surrogates(unfold(text))

    def _line(self, prompt: str) -> str:
        self.output.write(prompt)
        raw = getattr(sys.stdin, "buffer", None)
        line = raw.readline().decode(sys.stdin.encoding or "utf-8", "replace") if raw else sys.stdin.readline()
        if not line:
            raise EOFError
        return str(line).rstrip("\r\n")


class TerminalReader:
    """prompt_toolkit: editing, history, completion. Ctrl-C clears a line that has text."""

    def __init__(self, complete: Complete, history_file: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.filters import Condition

        self._session: PromptSession[str] = PromptSession(
            history=_history(history_file),
            completer=_completer(complete),
            complete_while_typing=False,
            multiline=Condition(lambda: is_incomplete(get_app().current_buffer.text)),
            prompt_continuation=CONTINUATION,
            key_bindings=_key_bindings(),
            enable_open_in_editor=False,
        )

    def read(self) -> str:
        return replace_surrogates(unfold(self._session.prompt(PROMPT)))


def make_reader(complete: Complete, history_file: Path | None) -> LineReader:
    """The reader that suits stdin and stdout."""
    if is_terminal(sys.stdin) and is_terminal(sys.stdout) and os.environ.get("TERM") not in (None, "", "dumb"):
        return TerminalReader(complete, history_file)
    return PlainReader()


def _history(file: Path | None) -> Any:
    """The history kept in `file`, readable by its owner only; in memory if the file cannot be used."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class TextHistory(FileHistory):
        def store_string(self, string: str) -> None:
            try:
                super().store_string(replace_surrogates(string))
            except OSError:  # disk full or folder gone: the chat matters more than its history
                pass

    if file is None:
        return InMemoryHistory()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        file.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return TextHistory(str(file))


def _completer(complete: Complete) -> Any:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class FromFunction(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            length, candidates = complete(document.text_before_cursor)
            return (Completion(candidate, start_position=-length) for candidate in candidates)

    return FromFunction()


def _key_bindings() -> Any:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return bindings
