"""`edgespec predictor`: make a ranker from traces, and judge one."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli import options
from edgespec.cli.terminal import stderr, stdout
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from predictor.train.samples import Corpus

HELP = "train and evaluate rankers, which say what every draft would do on a text"
TRAIN = (
    "Train a ranker on traces (see 'edgespec bench record'): whole texts are split, those held out give the figures. "
    "The same traces, flags and seed give the same ranker on one machine."
)
EVALUATE = (
    "Judge a ranker on traces, leaving out the texts it was trained on: whether the draft it ranks first is the best, "
    "what is lost where it is not, and whether its numbers are chances."
)
USAGE = 2
TABLE_WIDTH = 120  # where the output is no terminal
MOST_SEED = 2**31


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `predictor` with its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser("predictor", help=HELP, description=HELP)
    parser.set_defaults(run=lambda args: _help(parser), parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", parser_class=type(parser))
    train = actions.add_parser("train", help="make a ranker from traces", description=TRAIN)
    _common(train)
    train.add_argument("--out", required=True, metavar="FILE", help="the ranker's file (.onnx)")
    train.add_argument("--ablate", action="store_true", help="also train rankers that see only parts of the input")
    train.add_argument("--seed", type=_whole(0, MOST_SEED), default=0, metavar="N", help="of everything random (0)")
    train.add_argument("--passes", type=_whole(1, 10_000), metavar="N", help="over the samples, at most (60)")
    train.add_argument("--threads", type=_whole(1, 1024), metavar="N", help="CPU threads (one a core)")
    train.set_defaults(run=run_train, parser=train)
    evaluate = actions.add_parser("evaluate", help="judge a ranker on traces", description=EVALUATE)
    _common(evaluate)
    evaluate.add_argument("--ranker", required=True, metavar="FILE", help="the ranker's file (.onnx)")
    evaluate.add_argument("--out", metavar="FILE", help="also write the JSON to FILE")
    evaluate.set_defaults(run=run_evaluate, parser=evaluate)
    return parser


def _help(parser: argparse.ArgumentParser) -> int:
    stdout().write(parser.format_help())
    return USAGE


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", nargs="+", required=True, metavar="DIR", help="folders of traces")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no warnings")
    options.add_debug_flag(parser)


def _whole(least: int, most: int) -> Any:
    def convert(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"wants a whole number from {least} to {most}, not '{text}'")
        return int(text)

    return convert


@contextmanager
def _explained() -> Iterator[None]:
    """What is wrong with traces, rankers and files as a sentence for the user."""
    from predictor.ranker import RankerError
    from predictor.traces import TraceError

    try:
        yield
    except (TraceError, RankerError) as error:
        raise ConfigError(f"{str(error).rstrip('.')}.") from error
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror or error}.") from error


def run_train(args: argparse.Namespace) -> int:
    """Train, and say what the ranker is worth on held-out texts."""
    out = Path(args.out).expanduser()
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out {args.out}: give a file in a folder that exists.")
    _prepare_torch(args.threads)
    from predictor.train.fit import FitConfig
    from predictor.train.pipeline import train_ranker

    output = stderr()
    changes = {} if args.passes is None else {"epochs": args.passes}
    with _explained():
        try:
            made = train_ranker(
                _folders(args.traces),
                out,
                FitConfig(seed=args.seed, **changes),
                ablate=args.ablate,
                command=recorded_command(sys.argv[1:]),
                progress=(lambda text: None) if args.quiet else output.line,
            )
        except ValueError as error:
            raise ConfigError(f"{str(error).rstrip('.')}.") from error
    document = {"ranker": str(out), "seconds": made.seconds, **made.figures, "trained_apart": made.ablations}
    _publish(document, args.json)
    if not args.quiet:
        output.line(f"{out}: {out.stat().st_size} bytes, made in {made.seconds:.0f} s")
    return 0


def run_evaluate(args: argparse.Namespace) -> int:
    """Judge a ranker."""
    from predictor.ranker import Ranker
    from predictor.train.figures import evaluate
    from predictor.train.pipeline import unseen
    from predictor.train.samples import read_corpus

    with _explained():
        corpus = read_corpus(_folders(args.traces))
        ranker = Ranker.load(Path(args.ranker).expanduser(), target=corpus.target)
        _same_drafts(ranker.info.drafts, corpus, args.ranker)
        texts = unseen(ranker.info, corpus.texts)
        try:
            found = evaluate(corpus, texts, ranker.rates)
        except ValueError as error:
            raise ConfigError(f"There is nothing to judge the ranker on ({error}): it has seen all texts.") from error
    document = {"ranker": args.ranker, "texts_it_has_seen": len(corpus.texts) - len(texts), **found}
    if args.out is not None:
        from edgespec.files import write_text

        with _explained():
            write_text(Path(args.out).expanduser(), json.dumps(document, indent=1, allow_nan=False) + "\n")
    _publish(document, args.json)
    return 0


def _same_drafts(drafts: Sequence[Any], corpus: Corpus, file: str) -> None:
    if tuple(drafts) != corpus.drafts:
        raise ConfigError(
            f"The ranker {file} was trained with other drafts ({', '.join(draft.name for draft in drafts)}) than these "
            f"traces have ({', '.join(draft.name for draft in corpus.drafts)}), or with earlier ones of these names."
        )


def _folders(names: Sequence[str]) -> list[Path]:
    return [Path(name).expanduser() for name in names]


def recorded_command(words: Sequence[str]) -> str:
    """The command line for the file; where files lay on this machine is nobody's business."""
    return "edgespec " + shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)


def _prepare_torch(threads: int | None) -> None:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}: pip install 'edgespec[train]'.") from error
    from edgespec.models.cpu import usable_threads

    torch.set_num_threads(threads or usable_threads())


def _publish(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        stdout().line(json.dumps(document, indent=1, allow_nan=False))
    elif sys.stdout is not None:
        from rich.console import Console

        from edgespec.cli.predictor_tables import tables

        console = Console()
        tables(document, console if console.is_terminal else Console(width=TABLE_WIDTH))
