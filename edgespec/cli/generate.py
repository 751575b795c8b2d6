"""`edgespec generate`: one prompt, one answer."""

from __future__ import annotations

import argparse
import json
import math
from contextlib import closing
from typing import TYPE_CHECKING, Any

from edgespec.cli import options, report, runtime
from edgespec.cli.prompts import read_prompt
from edgespec.cli.terminal import interrupt_calls, replace_surrogates, stderr, stdout
from edgespec.errors import PromptError

if TYPE_CHECKING:
    from edgespec.decoding.params import SamplingParams
    from edgespec.engine import Engine
    from edgespec.results import GenerationResult

INTERRUPTED = 130
HELP = "answer one prompt"
EPILOG = """\
The answer goes to stdout, everything else to stderr. Stdin is read only for the prompt "-".
Examples:
  edgespec generate "Write a binary search in Python"
  edgespec generate - --system "Summarise in one sentence." < article.txt
  edgespec generate "Count to five" --draft off --json
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate", help=HELP, description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from stdin")
    parser.add_argument(
        "-p",
        "--prompt",
        dest="prompt_flag",
        metavar="TEXT",
        help="the prompt; one that begins with a dash needs the form -p=TEXT",
    )
    parser.add_argument("-f", "--prompt-file", metavar="FILE", help="read the prompt from a text file")
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument(
        "--raw", action="store_true", help="no chat template: continue the prompt as plain text, exactly as given"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: text, token ids, finish reason, statistics"
    )
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print the answer piece by piece (default) or at the end",
    )
    options.add_sampling_flags(parser)
    options.add_engine_flags(parser)
    options.add_output_flags(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Answer and return the exit code. All that can be refused without a model is refused before one is loaded."""
    prompt = _prompt(args)
    if args.json and args.stream:
        raise PromptError("--json prints one object at the end and cannot be combined with --stream.")
    params = options.sampling_params(args)
    with runtime.open_engine(args, runtime.configured(args)) as engine:
        result, interrupted = _answer(engine, prompt, params, args)
        if args.stats:
            stderr().line(report.status_line(result, engine.memory_bytes(), engine.held()))
            for row in report.details(result.stats):
                stderr().line(row)
    note = report.finish_note(result, params.max_new_tokens)
    if note and not args.json and not args.quiet:
        stderr().line(note, dim=True)
    return INTERRUPTED if interrupted else 0


def _prompt(args: argparse.Namespace) -> str | list[dict[str, str]]:
    if args.prompt is not None and args.prompt_flag is not None:
        raise PromptError("Both PROMPT and --prompt were given; give one of them.")
    given = args.prompt if args.prompt_flag is None else args.prompt_flag
    text = read_prompt(given, args.prompt_file, raw=args.raw, dash_is_stdin=args.prompt_flag is None)
    if args.system is None:
        return text
    if args.raw:
        raise PromptError("--system needs a chat template and cannot be combined with --raw.")
    return [{"role": "system", "content": replace_surrogates(args.system)}, {"role": "user", "content": text}]


def _answer(
    engine: Engine, prompt: Any, params: SamplingParams, args: argparse.Namespace
) -> tuple[GenerationResult, bool]:
    """Run the request and print it; Ctrl-C ends the answer early and keeps what there is."""
    output = stdout()
    live = not args.json and args.stream is not False
    with closing(engine.stream(prompt, params, raw=args.raw)) as stream, interrupt_calls(stream.cancel) as pressed:
        for delta in stream:
            if live:
                output.write(delta.text)
        result = stream.result
    if args.json:
        output.line(json.dumps(json_ready(result.to_dict())))
    elif not live:
        output.write(result.text)
    output.fresh_line()
    return result, pressed.is_set()


def json_ready(value: Any) -> Any:
    """`value` with what JSON has no word for (NaN, infinities) as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value
