"""The slash commands of the chat. Each raises EdgespecError with what is wrong; a failure never ends the chat."""

from __future__ import annotations

import dataclasses
import difflib
import glob
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.cli import report, transcript
from edgespec.cli.options import SAMPLING, count_value, parse_setting
from edgespec.cli.prompts import read_text_file, unix_lines
from edgespec.errors import EdgespecError, ParameterError

if TYPE_CHECKING:
    from edgespec.cli.chat import Chat

HELP_NOTES = """\
Multi-line: end a line with \\, or put the message between two \"\"\".
A message that begins with a slash: write two slashes.
Ctrl-C stops an answer; what was shown so far stays in the chat (/undo drops it).
Ctrl-C twice at the prompt leaves, and so does Ctrl-D."""


class CommandError(EdgespecError):
    """A slash command is unknown, or has arguments that it cannot use."""


class Leave(Exception):
    """/exit was typed."""


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command: its usage after the name, its help line, other names, and what runs it."""

    run: Callable[[Chat, str], None]
    usage: str
    help: str
    aliases: tuple[str, ...] = ()


def execute(chat: Chat, line: str) -> None:
    """Run `line`, which begins with a slash."""
    name, _, argument = line[1:].partition(" ")
    command = _BY_NAME.get(name.lower())
    if command is None:
        near = difflib.get_close_matches(name.lower(), _BY_NAME, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join('/' + word for word in near)}?" if near else "/help lists the commands."
        raise CommandError(f"There is no command /{name}; {hint} (To send it as a message, begin it with two slashes.)")
    argument = argument.strip()
    if argument and not command.usage:
        raise CommandError(f"/{name} takes no argument.")
    command.run(chat, argument)


def complete(chat: Chat, text: str) -> tuple[int, list[str]]:
    """Completions of a command line before the cursor: (how many characters they replace, candidates)."""
    if not text.startswith("/") or "\n" in text:
        return 0, []
    name, space, argument = text[1:].partition(" ")
    if not space:
        return len(text), [f"/{word}" for word in COMMANDS if word.startswith(name)]
    if name in ("draft", "drafts"):
        words = [*chat.engine.drafts, "auto", "off"]
    elif name == "set":
        words = [f"{word}=" for word in ("gamma", *SAMPLING)]
    elif name in ("save", "load", "read"):
        paths = sorted(glob.glob(glob.escape(os.path.expanduser(argument)) + "*"))
        words = [path + os.sep if os.path.isdir(path) else path for path in paths]
        return len(argument), words
    else:
        return 0, []
    return len(argument), [word for word in words if word.startswith(argument)]


def _help(chat: Chat, argument: str) -> None:
    rows = []
    for name, command in COMMANDS.items():
        names = ", ".join(f"/{word}" for word in (name, *command.aliases))
        rows.append((f"{names} {command.usage}".rstrip(), command.help))
    width = max(len(left) for left, _ in rows)
    for left, right in rows:
        chat.notes.line(f"{left:<{width}}  {right}")
    for line in HELP_NOTES.splitlines():
        chat.notes.line(line)


def _exit(chat: Chat, argument: str) -> None:
    raise Leave


def _clear(chat: Chat, argument: str) -> None:
    chat.conversation.clear()
    chat.attachments.clear()
    chat.notes.line("The chat starts anew; system message and settings are kept.", dim=True)


def _regen(chat: Chat, argument: str) -> None:
    _last_question(chat)
    if chat.params.temperature == 0:
        chat.notes.line(
            "Temperature is 0, so the same answer comes again; /set temperature=0.8 allows others.", dim=True
        )
    elif chat.params.seed is not None:
        chat.notes.line("The seed is fixed, so the same answer comes again; /set seed=default allows others.", dim=True)
    chat.answer(chat.conversation.regenerate)


def _undo(chat: Chat, argument: str) -> None:
    question = _last_question(chat)
    chat.conversation.undo()
    chat.notes.line(f"Dropped the last question and its answer: {_shortened(question)}", dim=True)


def _last_question(chat: Chat) -> str:
    for message in reversed(chat.conversation.messages):
        if message["role"] == "user":
            return str(message["content"])
    raise CommandError("Nothing has been asked yet.")


def _system(chat: Chat, argument: str) -> None:
    if not argument:
        current = chat.conversation.system
        chat.notes.line("There is no system message." if current is None else f"System message: {current}")
        return
    chat.conversation.system = None if argument == "off" else argument
    chat.notes.line("The system message is removed." if argument == "off" else "The system message is set.", dim=True)


def _set(chat: Chat, argument: str) -> None:
    if not argument:
        chat.notes.line(f"gamma = {chat.engine.gamma}")
        for field in dataclasses.fields(chat.params):
            chat.notes.line(f"{field.name} = {getattr(chat.params, field.name)}")
        return
    name, equals, value = (part.strip() for part in argument.partition("="))
    if not equals:
        raise CommandError("/set wants NAME=VALUE, such as /set temperature=0.8; /set alone shows all settings.")
    name = name.replace("-", "_")
    if name == "gamma":
        try:
            chat.engine.gamma = count_value("auto" if value == "default" else value)
        except ParameterError as error:
            raise ParameterError(f"gamma {error}.") from None
        chat.notes.line(f"gamma = {chat.engine.gamma}", dim=True)
        return
    if name not in SAMPLING:
        near = difflib.get_close_matches(name, ["gamma", *SAMPLING], n=1)
        hint = f"did you mean {near[0]}?" if near else "/set alone shows all settings."
        raise CommandError(f"There is no setting '{name}'; {hint}")
    default = type(chat.params)()
    new = getattr(default, name) if value in ("default", "none", "None") else parse_setting(name, value)
    chat.params = dataclasses.replace(chat.params, **{name: new})
    chat.notes.line(f"{name} = {getattr(chat.params, name)}", dim=True)


def _stats(chat: Chat, argument: str) -> None:
    if chat.last is None:
        raise CommandError("There are no statistics before the first answer.")
    for line in report.details(chat.last.stats):
        chat.notes.line(line)
    totals = chat.totals
    speed = totals.decoded / totals.seconds if totals.seconds else 0.0
    accepted = f"{totals.accepted / totals.proposed:.0%}" if totals.proposed else "nothing drafted"
    chat.notes.line(f"all answers: {totals.answers}, {totals.tokens} tokens, {speed:.1f} tokens/s, accepted {accepted}")


def _draft(chat: Chat, argument: str) -> None:
    if argument:
        chat.engine.use_draft(argument)
        text = {"auto": "Drafts are chosen automatically.", "off": "Drafts are off: plain decoding."}
        chat.notes.line(text.get(argument, f"Only draft {argument} is used."), dim=True)
        return
    if not chat.engine.drafts:
        chat.notes.line("No draft is loaded: plain decoding.")
    for line in report.draft_table(chat.engine.draft_infos()):
        chat.notes.line(line)


def _save(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    file = transcript.save(_one_path("save", argument), conversation.system, conversation.messages, chat.params)
    chat.notes.line(f"Saved {len(conversation.messages)} messages to {file}.", dim=True)


def _load(chat: Chat, argument: str) -> None:
    loaded = transcript.load(_one_path("load", argument))
    chat.replace_conversation(loaded.system, loaded.messages)
    chat.params = loaded.params
    chat.attachments.clear()
    chat.notes.line(f"Loaded {len(loaded.messages)} messages; the chat goes on after them.", dim=True)


def _read(chat: Chat, argument: str) -> None:
    path = _one_path("read", argument)
    text = unix_lines(read_text_file(path, "The file"))
    if not text.strip():
        raise CommandError(f"The file '{path}' is empty.")
    chat.attachments.append(f"{os.path.basename(path)}:\n{text.strip(chr(10))}\n\n")
    chat.notes.line(f"{len(text):,} characters of {path} go before your next message.", dim=True)


def _one_path(command: str, argument: str) -> str:
    """The path in `argument`: as typed if such a file exists, else without the quotes of a shell."""
    if not argument:
        raise CommandError(f"/{command} wants a file name.")
    if os.path.exists(os.path.expanduser(argument)):
        return argument
    try:
        words = shlex.split(argument)
    except ValueError:
        return argument
    return words[0] if len(words) == 1 else argument


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


COMMANDS: dict[str, Command] = {
    "help": Command(_help, "", "this list"),
    "exit": Command(_exit, "", "leave", ("quit",)),
    "clear": Command(_clear, "", "forget all questions and answers", ("reset",)),
    "regen": Command(_regen, "", "answer the last question again"),
    "undo": Command(_undo, "", "drop the last question and its answer"),
    "system": Command(_system, "[TEXT|off]", "show, set or remove the system message"),
    "set": Command(_set, "[NAME=VALUE]", "show or change sampling settings and gamma; VALUE default resets one"),
    "stats": Command(_stats, "", "counters of the last answer and of the chat"),
    "draft": Command(
        _draft, "[NAME|auto|off]", "show the drafts, use one, let edgespec choose, or decode plainly", ("drafts",)
    ),
    "save": Command(_save, "FILE", "save system message, messages and settings"),
    "load": Command(_load, "FILE", "go on with a saved chat"),
    "read": Command(_read, "FILE", "put a text file before your next message"),
}
_BY_NAME = {name: command for key, command in COMMANDS.items() for name in (key, *command.aliases)}
