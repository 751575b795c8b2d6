"""`edgespec chat`: talk to the model; or, when stdin is no terminal, answer the one question that it holds."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli import commands, lineinput, options, report, runtime
from edgespec.cli.prompts import read_stdin, unix_lines
from edgespec.cli.terminal import Output, interrupt_calls, is_terminal, replace_surrogates, stderr, stdout
from edgespec.errors import EdgespecError, PromptError

if TYPE_CHECKING:
    from edgespec.conversation import Conversation
    from edgespec.decoding.params import SamplingParams
    from edgespec.engine import Engine
    from edgespec.results import GenerationResult
    from edgespec.stream import Stream

logger = logging.getLogger(__name__)

INTERRUPTED = 130
HELP = "talk to the model"
EPILOG = """\
On a terminal: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.
From a pipe or a file, all of stdin is one question: it is answered once, as plain text, and commands are not read.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "chat", help=HELP, description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--no-history", action="store_true", help="do not keep what you type for the next chat")
    options.add_sampling_flags(parser)
    options.add_engine_flags(parser)
    options.add_output_flags(parser)
    parser.set_defaults(run=run)
    return parser


@dataclass(slots=True)
class Totals:
    """Sums over the answers of one chat. decoded and seconds leave out each answer's first token."""

    answers: int = 0
    tokens: int = 0
    decoded: int = 0
    seconds: float = 0.0
    proposed: int = 0
    accepted: int = 0

    def add(self, result: GenerationResult) -> None:
        stats = result.stats
        self.answers += 1
        self.tokens += stats.new_tokens
        self.decoded += max(0, stats.new_tokens - 1)
        self.seconds += stats.decode_seconds
        self.proposed += stats.proposed_tokens
        self.accepted += stats.accepted_tokens


class Chat:
    """One conversation with its settings; what the commands work on.

    answers: where the model's text goes; notes: where everything else goes.
    attachments: texts of /read that go before the next message.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, *, system: str | None, answers: Output, notes: Output
    ) -> None:
        self.engine = engine
        self.params = params
        self.answers = answers
        self.notes = notes
        self.show_status = answers.is_terminal
        self.conversation: Conversation = engine.conversation(system=system)
        self.attachments: list[str] = []
        self.last: GenerationResult | None = None
        self.totals = Totals()

    def answer(self, start: Callable[[SamplingParams], Stream]) -> bool:
        """Start an answer and show it; True if Ctrl-C stopped it.

        What was shown of a stopped answer stays in the chat. A turn that failed, or showed nothing, leaves no trace.
        """
        before = list(self.conversation.messages)
        try:
            stream = start(self.params)
            with closing(stream), interrupt_calls(stream.cancel) as pressed:
                for delta in stream:
                    self.answers.write(delta.text)
                result = stream.result
        except BaseException:
            self.conversation.messages = before
            raise
        finally:
            self.answers.fresh_line()
        if pressed.is_set() and not result.text:
            self.conversation.messages = before
        self.last = result
        self.totals.add(result)
        self._show_status(result)
        return pressed.is_set()

    def send(self, text: str) -> bool:
        """Answer `text` with the attached files before it; they stay attached if that fails, unless they are why."""
        question = "".join(self.attachments) + text
        try:
            interrupted = self.answer(lambda params: self.conversation.stream(question, params))
        except PromptError as error:
            if not self.attachments:
                raise
            self.attachments.clear()
            raise PromptError(f"{error} What /read had attached was dropped.") from error
        self.attachments.clear()
        return interrupted

    def _show_status(self, result: GenerationResult) -> None:
        if self.show_status:
            self.notes.line(report.status_line(result, self.engine.memory_bytes(), self.engine.held()), dim=True)
        note = report.finish_note(result, self.params.max_new_tokens)
        if note and self.answers.is_terminal:
            limited = report.hit_limit(result, self.params.max_new_tokens)
            advice = "/set max_new_tokens=N allows more." if limited else "/clear or /undo frees some of it."
            self.notes.line(f"{note} {advice}", dim=True)

    def replace_conversation(self, system: str | None, messages: Sequence[Mapping[str, Any]]) -> None:
        """Go on with other messages. If the engine refuses them, the chat is as before."""
        new = self.engine.conversation(system=system, messages=messages)
        self.conversation.close()
        self.conversation = new


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    config = runtime.configured(args)
    system = None if args.system is None else replace_surrogates(args.system)
    interactive = is_terminal(sys.stdin)
    question = None if interactive else unix_lines(read_stdin()).strip("\n")
    if question is not None and not question.strip():
        return 0  # nothing was asked: no model is loaded
    answers = stdout()
    notes = answers if answers.is_terminal else stderr()
    with runtime.open_engine(args, config) as engine:
        chat = Chat(engine, params, system=system, answers=answers, notes=notes)
        chat.show_status = args.stats or (interactive and answers.is_terminal)
        if question is not None:
            chat.notes = stderr() if args.stats else notes
            return INTERRUPTED if chat.send(question) else 0
        notes.line(runtime.describe(engine, config), dim=True)
        notes.line("/help lists the commands, Ctrl-D leaves.", dim=True)
        return _converse(chat, None if args.no_history else runtime.history_file(config), debug=args.debug)


def _converse(chat: Chat, history: Path | None, *, debug: bool) -> int:
    """Read and answer until the person leaves; nothing that goes wrong in a turn ends the chat."""
    reader = lineinput.make_reader(lambda text: commands.complete(chat, text), history)
    leaving = False
    while True:
        try:
            text = reader.read()
        except EOFError:
            chat.notes.fresh_line()
            return 0
        except KeyboardInterrupt:
            if leaving:
                return INTERRUPTED
            leaving = True
            chat.notes.line("Ctrl-C again leaves; so does Ctrl-D.", dim=True)
            continue
        leaving = False
        try:
            _turn(chat, text)
        except commands.Leave:
            return 0
        except KeyboardInterrupt:
            leaving = True
            chat.notes.line("Stopped; this turn is dropped. Ctrl-C again leaves.", dim=True)
        except EdgespecError as error:
            chat.notes.line(f"error: {error}")
        except (BrokenPipeError, MemoryError):
            raise
        except Exception as error:
            if debug:
                logger.exception("this turn failed")
            chat.notes.line(f"error: this turn failed with {type(error).__name__}: {error} (--debug shows where)")


def _turn(chat: Chat, text: str) -> None:
    if text.startswith("/") and not text.startswith("//"):
        commands.execute(chat, text.rstrip())
    elif text.strip():
        chat.send(text[1:] if text.startswith("//") else text)
