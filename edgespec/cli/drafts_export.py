"""`edgespec drafts export`: a draft in the format of other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli import options
from edgespec.cli.runtime import LazyProgress
from edgespec.cli.terminal import stderr, stdout
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from drafts.train.config import TrainTarget
    from edgespec.models.base import Decoder

HELP = "write a draft in the format of other programs"
DESCRIPTION = (
    "hf: a standalone draft as an ordinary checkpoint for transformers, vLLM, llama.cpp's converter. eagle: a head in "
    "the layout of EAGLE-1 for vLLM and SGLang, as near as that layout comes; the output says what differs."
)
TEXTS = 8  # on which a head's typical sizes are measured
ANSWER_TOKENS = 64
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 3 boxes with 12 apples each and gives away 7 apples. How many are left? Show the steps.",
    "Translate to English: Der Zug nach Berlin ist heute pünktlich.",
    "Summarize in one sentence: The river rose for three days. On Monday it flooded the old town, and people left.",
    "Who painted the ceiling of the Sistine Chapel?",
    "Give three tips for a good night's sleep.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of the command."""
    add = parser.add_argument
    add("name", metavar="NAME", help="a draft of a set for the target, or the path of its folder")
    add("--format", required=True, metavar="FORMAT", help="hf or eagle")
    add("--out", required=True, metavar="DIR", help="folder to write; it must not be there yet")
    add("--target", metavar="MODEL", help="the draft's target: a name of the catalogue, a folder, or a .gguf file")
    add(
        "--prompts",
        metavar="FILE",
        help="JSON lines; eagle: typical sizes are measured on answers to the first of them",
    )
    add("--threads", type=int, metavar="N", help="threads of the CPU engine")
    add("-q", "--quiet", action="store_true", help="no progress and no warnings")
    options.add_debug_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Export, say what differs on stderr, and print the folder."""
    from edgespec import catalog
    from edgespec.cli.drafts_train import import_torch, training_target
    from edgespec.config import RuntimeConfig
    from edgespec.models.weights.opening import open_weights

    if args.format not in ("hf", "eagle"):
        raise ConfigError(f"--format {args.format!r} is unknown; it is hf or eagle.")
    import_torch()
    from drafts.train.export import export_eagle, export_hf

    settings = RuntimeConfig.load(None, **({"model": args.target} if args.target else {}))
    with LazyProgress(enabled=not args.quiet) as fetching:
        path = catalog.resolve(settings.model, home=settings.home, progress=fetching)
    home = catalog.home(settings.home)
    with open_weights(path) as weights:
        folder = draft_folder(args.name, home, weights.fingerprint(), weights.model_fingerprint())
        if args.format == "hf":
            done = export_hf(folder, Path(args.out))
        else:
            target = training_target(settings.model, path, weights, home, args.threads)
            decoder = target.decoder(min(2048, weights.spec.max_positions))
            try:
                texts = [_answered(target, decoder, words) for words in _prompts(args.prompts)]
                done = export_eagle(folder, Path(args.out), decoder, texts)
            finally:
                decoder.close()
    for note in done.notes if not args.quiet else ():
        stderr().line(f"note: {note}")
    stdout().line(str(done.folder))
    return 0


def draft_folder(name: str, home: Path, fingerprint: str, model: str = "") -> Path:
    """The folder of a draft by path or by its name in the sets for this target. ConfigError if there is none."""
    from drafts import zoo

    if Path(name).is_dir():
        return Path(name)
    entries = zoo.for_target(home, fingerprint, model=model)
    for entry in entries:
        if entry.name == name:
            return entry.folder
    known = ", ".join(sorted(entry.name for entry in entries)) or "none"
    raise ConfigError(f"there is no draft {name!r} for this target (there are: {known}), and no such folder.")


def _prompts(file: str | None) -> list[str]:
    if file is None:
        return list(PROMPTS)
    from drafts.train.prompts import load_prompts

    found = load_prompts([Path(file)], lambda text: [], 1, domain="export")
    return [prompt.text for prompt in (*found.held_out, *found.train)[:TEXTS]]


def _answered(target: TrainTarget, decoder: Decoder, words: str) -> list[int]:
    """A prompt with the target's own answer, as ids that fit the engine."""
    from drafts.recording import record

    ids = target.encode(words)[-(target.weights.spec.max_positions - ANSWER_TOKENS - 1) :]
    found = record(decoder, ids, ANSWER_TOKENS, eos_ids=target.eos_ids, token_count=target.tokenizer.size)
    return [*found.prompt, *found.answer]
