"""`edgespec`: parse the command line, run one command, turn what goes wrong into a sentence and an exit code.

Exit codes: 0 done, 1 something failed, 2 wrong input, 130 Ctrl-C, 141 the reader of a pipe went away.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from edgespec import __version__
from edgespec.cli import chat, convert, demo, doctor, drafts, generate, predictor, pull, serve, show_config
from edgespec.cli.terminal import stderr, stdout
from edgespec.errors import EdgespecError

FAILED, WRONG_INPUT, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


class Parser(argparse.ArgumentParser):
    """argparse without guessing: no abbreviated flags; errors are a sentence and exit code 2.

    commands: the parsers of the commands, by name (of the top parser only).
    """

    commands: dict[str, Parser]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        stderr().line(f"error: {message} (see {self.prog} --help)")
        raise SystemExit(WRONG_INPUT)

    def refuse_unknown(self, words: list[str]) -> NoReturn:
        """Say which flag is unknown, and which known one is near."""
        flag = words[0].partition("=")[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1) if flag.startswith("-") else []
        hint = f"; did you mean {near[0]}?" if near else ""
        kind = "flag" if flag.startswith("-") else "extra argument"
        self.error(f"unknown {kind} '{flag}'{hint}")


def build_parser(argv: Sequence[str]) -> Parser:
    """The parser of all commands. The benchmark's own flags are only built when it is the command."""
    parser = Parser(prog="edgespec", description="Speculative decoding on one device, with the target's exact output.")
    parser.add_argument("--version", action="version", version=f"edgespec {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for command in (generate, chat, serve, demo, doctor, pull, convert, show_config):
        command.add_parser(subparsers)
    drafts.add_parser(subparsers, argv[1:2] if argv[:1] == ["drafts"] else ())
    predictor.add_parser(subparsers)
    if argv[:1] == ["bench"]:
        importlib.import_module("edgespec.bench.cli").add_parser(subparsers)
        subparsers.choices["bench"].set_defaults(run=_bench)
    else:
        subparsers.add_parser("bench", help="measure speed and equality (see edgespec bench --help)")
    parser.commands = dict(subparsers.choices)
    return parser


def _bench(args: argparse.Namespace) -> int:
    return int(importlib.import_module("edgespec.bench.cli").run(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    code = _guarded(words, "--debug" in words or os.environ.get("EDGESPEC_DEBUG", "") not in ("", "0"))
    return code if _flush_stdout() else BROKEN_PIPE


def _guarded(words: list[str], debug: bool) -> int:
    try:
        return _run(words, debug)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    except EdgespecError as error:
        _explain(f"error: {error}", debug)
        return WRONG_INPUT
    except MemoryError:
        _explain("error: out of memory; use a smaller model, --weight-format exact, or a smaller --context.", debug)
        return FAILED
    except Exception as error:
        _explain(f"error: {type(error).__name__}: {error} (run with --debug to see where)", debug)
        return FAILED


def _run(words: list[str], debug: bool) -> int:
    parser = build_parser(words)
    if words and not words[0].startswith("-") and words[0] not in parser.commands:
        near = difflib.get_close_matches(words[0], parser.commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(parser.commands)}"
        parser.error(f"unknown command '{words[0]}'; {hint}")
    args, unknown = parser.parse_known_args(words)
    if args.command is None and not unknown:
        stdout().write(parser.format_help())
        return WRONG_INPUT
    if unknown:
        (getattr(args, "parser", None) or parser.commands.get(args.command, parser)).refuse_unknown(unknown)
    _log_to_stderr(debug=debug, quiet=getattr(args, "quiet", False))
    return int(args.run(args))


def _log_to_stderr(*, debug: bool, quiet: bool) -> None:
    """Warnings of the engine as single lines on stderr; in detail with --debug, none with --quiet."""
    for name in ("edgespec", "drafts", "predictor"):
        logger = logging.getLogger(name)
        logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, _StderrHandler)]
        logger.addHandler(_StderrHandler())
        logger.propagate = False
        logger.setLevel(logging.DEBUG if debug else logging.ERROR if quiet else logging.WARNING)


class _StderrHandler(logging.Handler):
    """One line a record, to whatever stderr is at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        output = stderr()
        output.line(f"{record.levelname.lower()}: {record.getMessage()}")
        if record.exc_info:
            output.line("".join(traceback.format_exception(*record.exc_info)).rstrip())


def _explain(message: str, debug: bool) -> None:
    if debug:
        stderr().line(traceback.format_exc().rstrip())
    stderr().line(" ".join(message.split()))


def _flush_stdout() -> bool:
    """Write out what argparse printed; False if nobody reads it, and then nothing is tried again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    except ValueError:  # closed
        pass
    return True


if __name__ == "__main__":
    sys.exit(main())
