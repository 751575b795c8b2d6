"""`edgespec drafts train`: make a draft for a target from prompts, by the target's own answers."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli import options
from edgespec.cli.runtime import LazyProgress
from edgespec.cli.terminal import stderr, stdout
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from drafts.train.config import TrainConfig, TrainTarget
    from drafts.train.pipeline import Result
    from edgespec.models.base import Decoder
    from edgespec.models.weights.opening import WeightFile

HELP = "make a draft for a target from prompts"
DESCRIPTION = (
    "Let the target answer prompts, fit a draft to its answers, calibrate and measure it, and write it as an entry of "
    "a draft set. Interrupted runs go on where they were when the same command is given again. Prompts are JSON lines "
    'with "prompt" or "text" and, if known, "id", "source" and "license".'
)
LINE_SECONDS = 20.0  # between progress lines where there is no terminal
_FLAGS = (
    "kind",
    "max_new_tokens",
    "sampled",
    "limit",
    "batch",
    "epochs",
    "updates",
    "learning_rate",
    "vocab",
    "layers",
    "seed",
    "device",
    "licence",
)
STAGES = {
    "answers": "answers of the target",
    "read": "reading answers",
    "fit": "fitting",
    "calibrate": "calibrating",
    "measure": "measuring acceptance",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of the command."""
    add = parser.add_argument
    add("--target", metavar="MODEL", help="a name of the catalogue, a folder, a .gguf file, or a hub id")
    add("--prompts", nargs="+", required=True, metavar="FILE", help="prompt files (JSON lines)")
    add("--domain", required=True, metavar="NAME", help="what the draft is for: code, math, general, ...")
    add("--out", required=True, metavar="DIR", help="the draft's folder; it appears when the draft is complete")
    add("--name", metavar="NAME", help="the draft's name (default: the folder's)")
    add(
        "--kind",
        default="head",
        metavar="KIND",
        help="head (default), standalone (an ordinary small checkpoint), or phrases (a table, counted in the answers)",
    )
    add(
        "--from",
        dest="start",
        default="auto",
        metavar="DRAFT",
        help="head to start from: auto (the set's general one, if there is one), none, or a name or folder",
    )
    add(
        "--exclude",
        metavar="FILE",
        help="JSON lines of test questions; prompts that share 13 words in a row are left out",
    )
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=_count(4), metavar="N", help="longest answer (160)")
    group.add_argument("--sampled", type=_share, metavar="S", help="share answered once more at temperature 0.7 (0.3)")
    group.add_argument("--limit", type=_count(1), metavar="N", help="at most N prompts of each file")
    group.add_argument("--batch", type=_count(1), metavar="N", help="answers written at once (96)")
    group = parser.add_argument_group("fit")
    group.add_argument("--epochs", type=_positive, metavar="N", help="how often each answer is seen (4)")
    group.add_argument("--updates", type=_count(1), metavar="N", help="number of updates, instead of --epochs")
    group.add_argument("--learning-rate", type=_positive, metavar="R", help="largest step (by kind and start)")
    group.add_argument("--vocab", type=_count(1), metavar="N", help="tokens that a head may propose (4096)")
    group.add_argument("--layers", metavar="I,...", help="the target's layers of a standalone draft (0,1,-2,-1)")
    group.add_argument("--seed", type=_count(0), metavar="N", help="of everything random (0)")
    group = parser.add_argument_group("run")
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where answers and fit run (cpu)")
    group.add_argument("--threads", type=_count(1), metavar="N", help="CPU threads (one a core)")
    group.add_argument(
        "--work", metavar="DIR", help="kept between runs: answers and checkpoints (.NAME.work beside --out)"
    )
    group.add_argument("--restart", action="store_true", help="begin anew where flags have changed; replace a draft")
    group.add_argument("--licence", metavar="ID", help="of the finished draft (Apache-2.0)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no warnings")
    options.add_debug_flag(parser)


def _count(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"wants a whole number from {least} up, not '{text}'")
        return int(text)

    return convert


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _share(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"wants a share from 0 to 1, not '{text}'")
    return value


def _positive(text: str) -> float:
    if not 0 < (value := _number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"wants a number above 0, not '{text}'")
    return value


def run(args: argparse.Namespace) -> int:
    """Train, and print the finished draft's folder (the only line on stdout)."""
    from edgespec import catalog
    from edgespec.config import RuntimeConfig
    from edgespec.models.weights.opening import open_weights

    out = Path(args.out)
    _prepare_torch(args.device, args.threads)
    config = training_config(args, out)
    settings = RuntimeConfig.load(None, **({"model": args.target} if args.target else {}))
    with LazyProgress(enabled=not args.quiet) as fetching:
        path = catalog.resolve(settings.model, home=settings.home, progress=fetching)
    from drafts.train.pipeline import train_draft

    home = catalog.home(settings.home)
    with open_weights(path) as weights, _progress(quiet=args.quiet) as progress:
        result = train_draft(
            training_target(settings.model, path, weights, home, args.threads),
            [Path(name) for name in args.prompts],
            out,
            config,
            work=Path(args.work) if args.work else None,
            start=starting_draft(args.start, out, config, home, weights.fingerprint(), weights.model_fingerprint()),
            exclude=Path(args.exclude) if args.exclude else None,
            restart=args.restart,
            command=recorded_command(sys.argv[1:]),
            progress=progress,
        )
    if result is not None:
        _report(result, quiet=args.quiet)
    return 0


def recorded_command(words: Sequence[str]) -> str:
    """The command line for the manifest; where files lay on this machine is nobody's business."""
    return "edgespec " + shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)


def training_config(args: argparse.Namespace, out: Path) -> TrainConfig:
    """The flags that were given, over the defaults. TrainingError for a value that cannot work."""
    from drafts.train.config import TrainConfig

    given = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    name = args.name or out.resolve().name
    return TrainConfig(domain=args.domain, name=name, **given)


def starting_draft(
    word: str, out: Path, config: TrainConfig, home: Path, fingerprint: str, model: str = ""
) -> Path | None:
    """The folder of the head to start from, None for random weights. ConfigError for a name that is not there."""
    from drafts import zoo

    if word == "none" or (word == "auto" and (config.domain == "general" or config.kind != "head")):
        return None
    if word != "auto" and Path(word).is_dir():
        return Path(word)
    beside = [e for e in zoo.read_set(out.resolve().parent).entries if e.folder != out.resolve()]
    known = [
        e
        for e in (*beside, *zoo.for_target(home, fingerprint, model=model))
        if e.manifest is not None and not e.problem
    ]
    fitting = [e for e in known if e.manifest is not None and e.manifest.target.is_for(fingerprint, model)]
    if word == "auto":
        heads = [e for e in fitting if e.manifest is not None and e.manifest.kind == "head"]
        return next((e.folder for e in heads if e.manifest is not None and e.manifest.domain == "general"), None)
    for entry in fitting:
        if entry.name == word:
            return entry.folder
    names = ", ".join(sorted({entry.name for entry in fitting})) or "none"
    raise ConfigError(
        f"--from {word}: there is no such draft for this target (there are: {names}), and no such folder."
    )


def training_target(name: str, path: Path, weights: WeightFile, home: Path, threads: int | None) -> TrainTarget:
    """The target with its tokenizer, its chat template, and the engine that measures."""
    from drafts.train.config import TrainTarget
    from edgespec.decoding.template import ChatTemplate
    from edgespec.models.build import build_decoder
    from edgespec.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    ends = {*tokenizer.eos_ids, *weights.spec.eos_token_ids}
    encode: Callable[[str], list[int]]
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer.chat_template, tokenizer)
        ends |= set() if template.turn_end_id is None else {template.turn_end_id}

        def encode(text: str) -> list[int]:
            return template.encode([{"role": "user", "content": text}])
    else:

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special=True)

    engine = "cpu" if weights.spec.head_dim % 16 == 0 else "torch-cpu"
    form = "exact" if engine == "cpu" else "float32"

    def decoder(positions: int) -> Decoder:
        return build_decoder(
            weights,
            device=engine,
            weight_format=form,
            threads=threads,
            positions=positions,
            cache_dir=home / "graphs",
        )

    label = name if len(Path(name).parts) == 1 else Path(name).stem
    return TrainTarget(label, path, weights, tokenizer, encode, tuple(sorted(ends)), decoder, form)


def import_torch() -> None:
    """ConfigError unless what training needs is installed."""
    try:
        import safetensors  # noqa: F401
        import torch
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}: pip install 'edgespec[train]'.") from error
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"training needs torch 2.9 or later (this is {torch.__version__}): pip install -U torch.")


def _prepare_torch(device: str, threads: int | None) -> None:
    import_torch()
    import torch

    from edgespec.models.cpu import usable_threads

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; leave the flag out.")
    torch.set_num_threads(threads or usable_threads())
    if device == "cpu":
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Let glibc keep the big blocks that torch frees: faulting them in again took half of all time."""
    import ctypes

    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(m_mmap_threshold, 32 << 20)  # the most that glibc allows
        mallopt(m_trim_threshold, 1 << 30)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, float, float, str], None]]:
    """A bar for each stage on a terminal, lines elsewhere, nothing if `quiet`."""
    output = stderr()
    if quiet or output.stream is None:
        yield lambda stage, done, total, note: None
        return
    if not output.is_terminal:
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(file=output.stream), speed_estimate_period=300) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: float, total: float, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES.get(stage, stage), total=total, note=note)
            bars.update(tasks[stage], completed=done, total=total, note=note)

        yield show


class Lines:
    """Progress as lines for logs: one at a stage's start and end, and every 20 seconds between, with the time left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stages: dict[str, tuple[float, float]] = {}  # when it began here, and how much was done then
        self._shown = 0.0

    def __call__(self, stage: str, done: float, total: float, note: str) -> None:
        now = self._clock()
        if stage in self._stages and done < total and now - self._shown < LINE_SECONDS:
            return
        began, before = self._stages.setdefault(stage, (now, done))
        self._shown = now
        speed = (done - before) / (now - began) if now > began else 0.0
        left = f", about {duration((total - done) / speed)} left" if speed > 0 and done < total else ""
        after = f" ({note})" if note else ""
        stderr().line(f"{STAGES.get(stage, stage)}: {done:.0f} of {total:.0f}{after}{left}")


def duration(seconds: float) -> str:
    """ "40 s", "12 min" or "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _report(result: Result, *, quiet: bool) -> None:
    manifest, lines = result.manifest, []
    for group, found in manifest.acceptance.items():
        lines.append(
            f"{group}: {found.tokens:.2f} draft tokens accepted a round at gamma 3 (95%: {found.low:.2f} to "
            f"{found.high:.2f}), first guess right {found.first:.0%}, on held-out prompts"
        )
    calibrated = result.calibration
    lines.append(
        f"confidence: temperature {calibrated.temperature:.2f}, calibration error {calibrated.before:.3f} before and "
        f"{calibrated.after:.3f} after"
    )
    for line in lines if not quiet else ():
        stderr().line(line)
    stdout().line(str(result.folder))
