"""`edgespec convert`: a model in 4 or 8 bits, in a folder that every engine reads and a board can load quickly."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec import __version__
from edgespec.cli.options import add_debug_flag
from edgespec.cli.report import size
from edgespec.cli.runtime import LazyProgress, configured
from edgespec.cli.terminal import stderr, stdout
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec.models.convert.conversion import Kind, Wanted
    from edgespec.models.tokenizer import Tokenizer
    from edgespec.models.weights.opening import WeightFile

HELP = "quantise a model to 4 or 8 bits"
DESCRIPTION = (
    "Write a model as a folder of 4- or 8-bit weights. GGUF (Q4_0, Q4_1, Q8_0), GPTQ and AWQ weights of the same "
    "number of bits keep their very numbers; others are rounded. Memory stays small whatever the model's size. "
    "A conversion that was interrupted is gone on with by the same command."
)
_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "kiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_TABLES = {"int4": 4, "int8": 8, "float16": 16}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser("convert", help=HELP, description=DESCRIPTION)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name of the catalogue, a folder, a .gguf file, or a hub id")
    add("--dtype", required=True, metavar="DTYPE", help="int4 or int8")
    add("--out", required=True, metavar="DIR", help="folder to write; it appears when it is complete")
    add(
        "--group", type=int, metavar="N", help="numbers that share a scale: 32, 64 or 128 (default: the model's, or 32)"
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--symmetric", action="store_true", help="no zero points: smaller, a little less exact")
    modes.add_argument(
        "--zeros", action="store_true", help="a zero point for each group (int4 only; the default there)"
    )
    add(
        "--embeddings",
        metavar="DTYPE",
        help="int4, int8 or float16 for embedding and LM head (default: int8; a quantised model's floats stay float16)",
    )
    add("--shard-size", default="2GB", metavar="SIZE", help="largest file, such as 500MB (default 2GB)")
    add("--force", action="store_true", help="replace DIR if edgespec convert wrote it")
    add("--threads", type=int, metavar="N", help="threads that quantise (default: one a core)")
    add("--config", metavar="FILE", help="settings from a TOML file")
    add("-q", "--quiet", action="store_true", help="no progress and no table")
    add_debug_flag(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert, print what became of each kind of tensor, and the folder as the last line on stdout."""
    from edgespec import catalog
    from edgespec.loading import tokenizer_of
    from edgespec.models.convert import conversion
    from edgespec.models.convert import folder as convert_folder
    from edgespec.models.weights.opening import open_weights

    wanted, shard_bytes = _wanted(args), _bytes(args.shard_size)
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads is {args.threads}; it must be at least 1.")
    out = Path(args.out).expanduser().absolute()
    config = configured(args)
    with LazyProgress(enabled=not args.quiet, message=f"opening {args.model} ...") as progress:
        path = catalog.resolve(args.model, home=config.home, progress=progress)
    convert_folder.check_target(out, path, force=args.force)  # before a tokenizer is built
    with open_weights(path) as weights:
        steps = conversion.plan(weights, wanted)
        convert_folder.check_disk(out, sum(step.nbytes for step in steps))
        tokenizer = tokenizer_of(path, weights, catalog.home(config.home))
        if not args.quiet:
            _say_beforehand(weights, tokenizer, wanted, steps)
        kinds = conversion.convert(
            weights,
            tokenizer,
            out,
            wanted,
            licence=_licence(args.model, path, weights),
            shard_bytes=shard_bytes,
            force=args.force,
            threads=args.threads,
            report=_Progress(quiet=args.quiet),
            note=None if args.quiet else _note,
            program=__version__,
        )
    if not args.quiet:
        for line in _table(kinds):
            stdout().line(line)
    stdout().line(str(out))
    return 0


def _wanted(args: argparse.Namespace) -> Wanted:
    from edgespec.models.convert.conversion import Wanted
    from edgespec.models.weights.quantised import GROUPS

    if args.dtype not in ("int4", "int8"):
        raise ConfigError(f"--dtype {args.dtype!r} is unknown; it is int4 or int8.")
    if args.group is not None and args.group not in GROUPS:
        raise ConfigError(f"--group is {args.group}; it must be {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]}.")
    if args.embeddings is not None and args.embeddings not in _TABLES:
        raise ConfigError(f"--embeddings {args.embeddings!r} is unknown; it is int4, int8 or float16.")
    if args.zeros and args.dtype == "int8":
        raise ConfigError("--zeros is for int4; 8-bit weights are symmetric.")
    mode: Any = "symmetric" if args.symmetric else "zeros" if args.zeros else None
    return Wanted(int(args.dtype[3:]), args.group, mode, _TABLES.get(args.embeddings))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]i?B)?", text.strip())
    count = int(float(match.group(1)) * _UNITS[match.group(2) or ""]) if match else 0
    if count < 1_000_000:
        raise ConfigError(f"--shard-size {text!r} is not a size of at least 1MB, such as 500MB or 2GB.")
    return count


def _note(text: str) -> None:
    stderr().line(f"note: {text}")


def _say_beforehand(weights: WeightFile, tokenizer: Tokenizer, wanted: Wanted, steps: list[Any]) -> None:
    rows = weights.spec.vocab_size
    if tokenizer.size < rows:
        _note(f"{rows - tokenizer.size} of the {rows} rows of the vocabulary are padding; they are kept.")
    elif tokenizer.size > rows:
        _note(f"the tokenizer has {tokenizer.size} tokens and the model {rows} rows; the rest is never written.")
    rounded = {weights.kind(step.name) for step in steps if step.layout is not None and not step.kept}
    again = sorted(rounded - {"F64", "F32", "F16", "BF16"})
    if again:
        _note(
            f"weights stored as {', '.join(again)} are rounded once more; an unquantised checkpoint gives better ones."
        )


def _licence(model: str, path: Path, weights: WeightFile) -> str | None:
    """As the model's files say it, else the catalogue or the list of sets, by the model's name on the hub."""
    from drafts import hub_sets
    from edgespec import catalog
    from edgespec.models.convert.folder import licence_of

    said = licence_of(weights)
    if said is not None:
        return said
    known = catalog.find(model) or next(
        (each for each in catalog.MODELS if path.name == each.file and path.stat().st_size == each.size), None
    )
    if known is not None:
        return known.licence
    for each in hub_sets.hub_sets():
        for candidate in (each.target, *each.drafts):
            for build in candidate.builds.values():
                if f"models--{build.model.partition(':')[0].replace('/', '--')}" in path.parts:
                    return candidate.licence
    return None


def _table(kinds: Mapping[str, Kind]) -> list[str]:
    lines = [f"{'tensors':<28} {'count':>5} {'before':>9} {'after':>9} {'error':>8}  form"]
    for name, kind in kinds.items():
        error = f"{kind.relative_error:.2%}" if kind.error else "0"
        lines.append(
            f"{name:<28} {kind.tensors:>5} {size(kind.bytes_before):>9} {size(kind.bytes_after):>9} {error:>8}  "
            + "; ".join(sorted(kind.forms))
        )
    before, after = (sum(getattr(k, f"bytes_{when}") for k in kinds.values()) for when in ("before", "after"))
    lines.append(f"{'all':<28} {sum(k.tensors for k in kinds.values()):>5} {size(before):>9} {size(after):>9}")
    return lines


class _Progress:
    """How far the conversion is: in place on a terminal, else a line for each quarter."""

    def __init__(self, *, quiet: bool) -> None:
        self._output = stderr()
        self._quiet = quiet or self._output.stream is None
        self._quarter = 0

    def __call__(self, name: str, done: int, total: int) -> None:
        if self._quiet:
            return
        if self._output.is_terminal:
            self._output.transient("" if done == total else f"{done / total:4.0%} of {size(total)}: {name}")
        elif 4 * done // total > self._quarter:
            self._quarter = 4 * done // total
            self._output.line(f"converted {done / total:.0%} of {size(total)}")
