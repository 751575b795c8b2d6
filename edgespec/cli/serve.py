"""`edgespec serve`: an OpenAI-compatible server, and a page to chat and watch."""

from __future__ import annotations

import argparse
import importlib.util
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from edgespec.cli import options, runtime
from edgespec.cli.terminal import stderr, stdout
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig
    from edgespec.server.settings import ServerSettings

INTERRUPTED = 130
KEY_VARIABLE = "EDGESPEC_API_KEY"
_MORE_CLIENTS = 64  # than may run and wait: those that are told that the queue is full, and those that only look
HELP = "answer over HTTP as OpenAI's API does"
EPILOG = """\
Sampling flags are what requests get that do not say otherwise. See docs/serving.md.
Examples:
  edgespec serve
  edgespec serve --port 9000 --max-sessions 4 --memory-budget 1GiB
  EDGESPEC_API_KEY=secret edgespec serve --host 0.0.0.0
"""
# flag, name in Limits, type, metavar, help
_LIMITS = (
    ("--max-body", "body_bytes", "size", "SIZE", "bytes of one request, such as 2MiB (default: 8MiB)"),
    ("--max-prompt-tokens", "prompt_tokens", int, "N", "tokens of a prompt (default: what the context takes)"),
    ("--max-connections", "connections", int, "N", "connections open at once (default: 512 or more)"),
    ("--request-timeout", "request_seconds", float, "S", "seconds from the request to the last token (600)"),
    ("--header-timeout", "header_seconds", float, "S", "seconds until a request's head has come (default: 15)"),
    ("--body-timeout", "body_seconds", float, "S", "seconds until its body has (default: 60)"),
    ("--idle-timeout", "idle_seconds", float, "S", "seconds that an idle connection is kept (default: 75)"),
    ("--stall-timeout", "stall_seconds", float, "S", "seconds after which a client that reads nothing is cut off (30)"),
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve", help=HELP, description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_server_flags(parser)
    _add_limit_flags(parser)
    options.add_sampling_flags(parser)
    options.add_engine_flags(parser)
    options.add_serving_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the rounds to FILE at the end")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress and no warnings")
    options.add_debug_flag(group)
    parser.set_defaults(run=run)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="port (default: 8000; 0 = any free one)")
    group.add_argument("--api-key", metavar="KEY", help=f"ask for this key; better given in {KEY_VARIABLE}")
    group.add_argument("--insecure", action="store_true", help="listen for other machines without a key")
    group.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="let web pages of this origin ask (CORS)"
    )
    group.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a further name of this server"
    )
    group.add_argument("--grace", type=float, default=30.0, metavar="S", help="seconds for running answers at the end")
    group.add_argument("--model-name", metavar="NAME", help="the name under which the model is offered")


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    for flag, name, kind, metavar, text in _LIMITS:
        group.add_argument(flag, dest=name, type=str if kind == "size" else kind, metavar=metavar, help=text)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it. What can be refused without a model is refused before one is loaded."""
    _need_packages()
    from edgespec.server import lifecycle

    defaults = options.sampling_values(args)
    defaults.pop("logprobs", None)  # a client that did not ask for them has no use for them
    options.sampling_params(args)  # refuses wrong ones
    config = runtime.configured(args)
    settings = server_settings(args, defaults, clients_of(config))
    lifecycle.room_for_connections(settings.limits.connections)
    few, wanted = settings.limits.connections, clients_of(config)
    if few < wanted and not args.quiet:
        stderr().line(
            f"--max-connections {few} is less than the {wanted} that --max-sessions and --max-queue can use: clients "
            "get a 503 where a full queue would tell them when to come again"
        )
    socks = lifecycle.listen(settings)
    with ExitStack() as stack:
        for sock in socks:
            stack.enter_context(sock)
        engine = stack.enter_context(runtime.open_engine(args, config))
        if not args.quiet:
            stderr().line(runtime.describe(engine, config), dim=True)
        line = f"edgespec serves {lifecycle.url(socks[0])} and {lifecycle.url(socks[0], '/v1')} (Ctrl-C ends it)"
        log = (lambda line: None) if args.quiet else stderr().line
        signals = lifecycle.serve(engine, settings, socks, log, lambda: stdout().line(line))
    return INTERRUPTED if signals > 1 else 0


def clients_of(config: RuntimeConfig) -> int:
    """Connections of as many clients as may be served or wait, and of some more."""
    return config.max_sessions + config.max_queue + _MORE_CLIENTS


def server_settings(args: argparse.Namespace, defaults: dict[str, Any], clients: int = 0) -> ServerSettings:
    """The flags as settings; at least so many clients may be connected, unless a flag says otherwise. Raises
    ConfigError."""
    from edgespec.memory.budget import parse_bytes
    from edgespec.server.settings import Limits, ServerSettings

    given = {name: getattr(args, name) for _flag, name, *_ in _LIMITS if getattr(args, name) is not None}
    if "body_bytes" in given:
        try:
            given["body_bytes"] = parse_bytes(given["body_bytes"], None)
        except ConfigError as error:
            raise ConfigError(f"--max-body {args.body_bytes!r}: give bytes, or a form such as 2MiB or 800kB") from error
    given.setdefault("connections", max(Limits.connections, clients))
    return ServerSettings(
        host=args.host,
        port=args.port,
        api_key=args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE) or None,
        allow_origins=tuple(args.allow_origin),
        allow_hosts=tuple(args.allow_host),
        insecure=args.insecure,
        grace_seconds=args.grace,
        limits=Limits(**given),
        defaults=defaults,
        model_name=args.model_name,
    )


def _need_packages() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"edgespec serve needs {', '.join(missing)}: pip install 'edgespec[serve]'")
