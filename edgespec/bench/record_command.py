"""The command line of `edgespec bench record`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bench.words import are, counted
from edgespec.errors import ConfigError, DraftError, PromptError

if TYPE_CHECKING:
    from drafts.base import Draft
    from drafts.manifest import Manifest
    from drafts.zoo import Entry
    from edgespec.bench.record import Recorder
    from edgespec.decoding.session import Session
    from edgespec.engine import Engine
    from edgespec.evaluation.prompts import Item, Skipped
    from predictor.traces import TraceDraft, TraceHeader

HELP = "traces for a ranker: every draft scored at every position of the target's own answers"
DESCRIPTION = (
    "Let the target answer the prompts plainly, ask every draft at every position of the answers, and keep how many of "
    "its guesses are right, with the target's hidden states. 'edgespec predictor train' makes a ranker of it. Prompts: "
    "JSON lines with a 'prompt' each (the file's name is the domain), or Spec-Bench's questions."
)
INTERRUPTED = 130
MOST_GAMMA = 16
MOST_SHOWN = 10  # lines that are left out


def add_arguments(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """All arguments of the command. count: converts a whole number from 1 up."""
    add = parser.add_argument
    add("prompts", nargs="+", metavar="PROMPTS", help="prompt files (JSON lines)")
    add("--out", required=True, metavar="DIR", help="the folder of the traces")
    add("--resume", action="store_true", help="go on with a folder that has traces of the same drafts and settings")
    add(
        "--drafts",
        action="append",
        metavar="NAMES",
        help="auto = all that fit the target (default), or names and paths with commas between; may be repeated",
    )
    add("-n", "--max-new-tokens", type=count, default=128, metavar="N", help="longest answer (128)")
    add("--gamma-max", type=count, default=5, metavar="N", help="tokens of the longest block that is tried (5)")
    add("--stride", type=count, default=1, metavar="N", help="score every N-th position only (1)")
    add(
        "--confidences",
        action="store_true",
        help="make blocks whole and keep the drafts' confidences, as simulations of rounds want (twice the time)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--limit", type=count, metavar="N", help="at most N prompts of each domain, evenly spread")
    which.add_argument("--last", type=count, metavar="N", help="the last N prompts of each domain")
    add("--domain", metavar="NAME", help="the domain of all prompts, whatever their files say")
    add(
        "--cache",
        metavar="DIR",
        help="where recorded answers are kept and reused (EDGESPEC_HOME/answers); off = nowhere",
    )
    group = parser.add_argument_group("engine")
    group.add_argument("-m", "--model", metavar="MODEL", help="a name of the catalogue, a folder, or a .gguf file")
    group.add_argument("--weight-format", metavar="FORMAT", help="exact (the file's own blocks), int8, or float32")
    group.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda, or torch-cpu (the float32 reference)")
    group.add_argument("--threads", type=count, metavar="N", help="threads of the CPU engine")
    group.add_argument("--context", type=count, metavar="N", help="longest conversation in tokens")
    group.add_argument("--memory-budget", metavar="SIZE", help="such as 1GiB or 80%%; what does not fit is refused")
    group.add_argument("--config", metavar="FILE", help="settings from a TOML file; flags go before it")
    add("-q", "--quiet", action="store_true", help="no progress and no warnings")
    add("--debug", action="store_true", help="log in detail, and show a traceback when something fails")


def run(args: argparse.Namespace, progress: Callable[[int], Any]) -> int:
    """Record all prompts that are not there yet; 130 after Ctrl-C, with what was recorded kept.

    progress: of a number of steps, a context manager of two functions: for a text, and for steps done.
    """
    from edgespec.cli.drafts_evaluate import configured_drafts
    from edgespec.cli.runtime import LazyProgress, engine_class
    from edgespec.evaluation.prompts import limited, read_prompts
    from predictor.traces import TraceError

    if args.gamma_max > MOST_GAMMA or args.max_new_tokens < 2:
        raise ConfigError(f"--gamma-max must be at most {MOST_GAMMA}, and --max-new-tokens at least 2.")
    everything, unread = read_prompts(args.prompts, domain=args.domain)
    _left_out(args, unread)
    items = limited(everything, args.limit) if args.last is None else last_of_each(everything, args.last)
    config = configured_drafts(args)
    with LazyProgress(enabled=not args.quiet, message=f"loading {config.model} ...") as loading:
        engine = engine_class().from_pretrained(config=config, progress=loading)
    with engine:
        try:
            recorder = prepare(args, engine)
            return _record_all(args, recorder, items, unread, progress)
        except TraceError as error:
            raise ConfigError(f"{error}.") from error


def _left_out(args: argparse.Namespace, skipped: Sequence[Skipped]) -> None:
    """Name lines or prompts that cannot be used; the command's last line counts all of them."""
    from edgespec.cli.terminal import stderr

    if args.quiet:
        return
    for one in skipped[:MOST_SHOWN]:
        stderr().line(f"left out: {one}")
    if len(skipped) > MOST_SHOWN:
        stderr().line(f"and {len(skipped) - MOST_SHOWN} more")


def last_of_each(items: Sequence[Item], most: int) -> list[Item]:
    """The last `most` prompts of each domain, in order."""
    kept: list[Item] = []
    for domain in dict.fromkeys(item.domain for item in items):
        kept += [item for item in items if item.domain == domain][-most:]
    return kept


def prepare(args: argparse.Namespace, engine: Engine) -> Recorder:
    """The recorder of all drafts of the engine but lookup, which is always recorded. A draft that cannot be used is an
    error: traces without it would be of no use for it."""
    from drafts.base import Loadable
    from drafts.load_now import load_now
    from drafts.recording import WINDOW
    from edgespec import catalog
    from edgespec.bench.record import Recorder
    from edgespec.evaluation.document import answer_key
    from edgespec.evaluation.run import Settings
    from edgespec.evaluation.trajectories import TrajectoryStore
    from predictor.features import PROMPT_WINDOW
    from predictor.traces import TraceWriter

    session = engine.session()
    statuses = [status for status in session.statuses.values() if status.draft.kind != "ngram"]
    failed = [f"{status.name} {status}" for status in statuses if not status.active]
    if failed or not statuses:
        raise DraftError(f"traces need drafts that work: {'; '.join(failed) or 'there are none'}")
    for status in statuses:
        if isinstance(status.draft, Loadable):
            load_now(status.draft)
    drafts = [status.draft for status in statuses]
    windows = [status.window for status in session.statuses.values()]
    settings = Settings(max_new_tokens=args.max_new_tokens, window=max([WINDOW, PROMPT_WINDOW, *windows]))
    folder = catalog.home(engine.config.home) / "answers" if args.cache is None else Path(args.cache).expanduser()
    return Recorder(
        session=session,
        encode=engine.encode,
        drafts=drafts,
        header=(header := trace_header(args, engine, session, drafts)),
        store=TrajectoryStore(None if args.cache == "off" else folder, answer_key(engine, session, settings)),
        writer=TraceWriter(Path(args.out).expanduser(), header, resume=args.resume),
        window=settings.window,
    )


def trace_header(args: argparse.Namespace, engine: Engine, session: Session, drafts: Sequence[Draft]) -> TraceHeader:
    """What these traces are of."""
    from edgespec.evaluation.document import target_build
    from predictor.features import PROMPT_WINDOW, RECENT
    from predictor.traces import TraceHeader

    manifests = _manifests(engine)
    return TraceHeader(
        target={"name": engine.target_facts.name, **target_build(engine)},
        hidden_size=engine.spec.hidden_size,
        gamma_max=args.gamma_max,
        stride=args.stride,
        max_new_tokens=args.max_new_tokens,
        recent=RECENT,
        prompt_window=PROMPT_WINDOW,
        confidences=args.confidences,
        drafts=tuple(_traced(draft, manifests.get(draft.name), session) for draft in drafts),
    )


def _traced(draft: Draft, manifest: Manifest | None, session: Session) -> TraceDraft:
    from predictor.traces import TraceDraft

    if manifest is None:
        raise ConfigError(
            f"draft {draft.name} has no draft.toml, so its weights cannot be told from others; name drafts of a set."
        )
    return TraceDraft(
        name=draft.name,
        kind=draft.kind,
        domain=manifest.domain,
        fingerprint=manifest.weights_fingerprint,
        nbytes=manifest.nbytes,
        free=session.statuses[draft.name].free,
        expected=manifest.expected,
    )


def _manifests(engine: Engine) -> dict[str, Manifest]:
    """Manifests of the drafts that the engine's configuration names, by name."""
    from drafts import zoo
    from edgespec import catalog

    facts, config = engine.target_facts, engine.config
    entries: list[Entry] = list(
        zoo.for_target(catalog.home(config.home), facts.fingerprint, facts.name, model=facts.model)
    )
    for name in () if config.drafts == "auto" else config.drafts:
        path = Path(name).expanduser()
        if path.is_dir():
            entries = [zoo.read_entry(path), *zoo.read_set(path).entries, *entries]
    found: dict[str, Manifest] = {}
    for entry in entries:
        if entry.manifest is not None and not entry.problem:
            found.setdefault(entry.name, entry.manifest)
    return found


def _record_all(
    args: argparse.Namespace,
    recorder: Recorder,
    items: Sequence[Item],
    unread: Sequence[Skipped],
    progress: Callable[[int], Any],
) -> int:
    from edgespec.cli.terminal import stderr

    if recorder.writer.damaged:
        stderr().line(f"{len(recorder.writer.damaged)} damaged texts are recorded anew")
    begin = time.monotonic()
    try:
        with progress(len(items)) as (say, advance):
            for item in items:
                say(f"{item.domain} {item.name}"[:40])
                recorder.add(item)
                advance(1)
            if len(recorder.writer) and (recorder.recorded or not recorder.writer.costs):
                say("costs")
                recorder.writer.set_costs(recorder.measure(_load_seconds(recorder.drafts)))
    except KeyboardInterrupt:
        kept = len(recorder.writer)
        told = f"{counted(kept, 'text')} {are(kept)} kept in {recorder.writer.folder}"
        stderr().line(f"interrupted; {told}, --resume goes on from there")
        return INTERRUPTED
    if not len(recorder.writer):
        raise PromptError(f"No prompt could be used. The first: {recorder.skipped[0]}.")
    _left_out(args, recorder.skipped)
    _report(args, recorder, len(unread), time.monotonic() - begin)
    return 0


def _load_seconds(drafts: Sequence[Draft]) -> Callable[[str], float | None]:
    """Times one load of a draft, with its file in the page cache."""
    from drafts.base import Loadable
    from drafts.load_now import load_now

    by_name = {draft.name: draft for draft in drafts}

    def load(name: str) -> float | None:
        draft = by_name[name]
        if not isinstance(draft, Loadable):
            return None
        draft.unload()
        begin = time.perf_counter()
        load_now(draft)
        return time.perf_counter() - begin

    return load


def _report(args: argparse.Namespace, recorder: Recorder, unread: int, seconds: float) -> None:
    if args.quiet:
        return
    made, parts = recorder.recorded, recorder.seconds
    each = ""
    if made:
        each = (
            f", {seconds / made:.2f} s each ({parts['answers'] / made:.2f} answer, {parts['drafts'] / made:.2f} drafts)"
        )
    print(
        f"{recorder.writer.folder}: {counted(len(recorder.writer), 'text')}, {made} of them new{each}; "
        f"{counted(unread + len(recorder.skipped), 'prompt')} skipped",
        file=sys.stderr,
    )
