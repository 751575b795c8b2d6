"""From parsed flags to a running engine, in one place for all commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli import options
from edgespec.cli.terminal import stderr
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig
    from edgespec.engine import Engine


def engine_class() -> type[Engine]:
    """The Engine class, imported when an engine is really needed."""
    from edgespec.engine import Engine

    return Engine


def configured(args: argparse.Namespace) -> RuntimeConfig:
    """The settings in force: flags over environment over file over defaults."""
    from edgespec.config import RuntimeConfig

    return RuntimeConfig.load(args.config, **options.engine_values(args))


@contextmanager
def open_engine(args: argparse.Namespace, config: RuntimeConfig) -> Iterator[Engine]:
    """The engine of `config`, closed at the end. The trace of --trace is written even if the request failed."""
    from edgespec.config import DEFAULT_POLICY
    from edgespec.telemetry.trace import NULL_TRACER, Tracer

    tracer: Any = NULL_TRACER
    if config.gamma != "auto" and config.policy != DEFAULT_POLICY and not args.quiet:
        unused = f"with a fixed gamma no policy is asked, so that {config.policy} changes nothing"
        stderr().line(f"mind: {unused}; leave --gamma out to use it")
    with ExitStack() as stack:
        if args.trace is not None:
            _check_writable(args.trace)
            tracer = Tracer()
            stack.callback(tracer.write, args.trace)
        with LazyProgress(enabled=not args.quiet, message=f"loading {config.model} ...") as progress:
            engine = engine_class().from_pretrained(config=config, progress=progress, tracer=tracer)
        yield stack.enter_context(engine)


def _check_writable(path: str) -> None:
    """Refuse a trace that could not be written, before minutes of work go into it."""
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"The trace cannot be written to '{path}': give --trace a file in a folder that exists.")


class LazyProgress:
    """A progress bar on stderr, built when there is progress to show; until then, `message` on a terminal."""

    def __init__(self, *, enabled: bool, message: str = "") -> None:
        self._enabled = enabled
        self._message = message
        self._stack = ExitStack()
        self._show: Any = None

    def __enter__(self) -> LazyProgress:
        if self._enabled and self._message:
            stderr().transient(self._message)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._show is None and self._enabled and self._message:
            stderr().transient("")
        self._stack.close()

    def __call__(self, label: str, done: int, total: int | None) -> None:
        if not self._enabled or stderr().stream is None:
            return
        if self._show is None:
            stderr().transient("")
            from edgespec.download import progress_bar

            self._show = self._stack.enter_context(progress_bar(stderr().stream))
        self._show(label, done, total)


def describe(engine: Engine, config: RuntimeConfig) -> str:
    """One line about what is running: model, weights, and each draft with its state."""
    states = engine.drafts
    drafts = [name for name, state in states.items() if state == "active"]
    drafts += [f"{name} (failed)" for name, state in states.items() if state.startswith("failed")]
    away = len(states) - len(drafts)
    drafts += [f"{away} more on storage"] if away else []
    weights = f"{config.weight_format} weights" + ("" if config.device == "auto" else f" on {config.device}")
    parts = [f"{config.model}, {weights}", f"context {engine.context}", f"gamma {engine.gamma}"]
    return "; ".join([*parts, f"drafts: {', '.join(drafts) or 'none, plain decoding'}"])


def history_file(config: RuntimeConfig) -> Path:
    """Where what is typed in chats is kept."""
    from edgespec import catalog

    return catalog.home(config.home) / "chat_history"
