"""Answers prompts over a local socket, one after the other, with one engine that stays in memory.

A line of JSON in: {"prompt": "text", "max_new_tokens": 128}; further keys are those of SamplingParams. A line of JSON
out: {"text": ..., "finish_reason": ..., "tokens_per_second": ...}, or {"error": ...}. What goes wrong with a line never
ends the service. Settings come from EDGESPEC_* variables.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

LONGEST_LINE = 1 << 20
IDLE_SECONDS = 60.0  # one client at a time: who says nothing makes room


def answer(engine: Any, line: bytes) -> dict[str, Any]:
    """The reply to one line."""
    from edgespec import SamplingParams
    from edgespec.errors import EdgespecError

    try:
        request = json.loads(line)
        prompt = request.pop("prompt")
        result = engine.generate(prompt, SamplingParams(**{"max_new_tokens": 256, **request}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return {"error": f'a line must be a JSON object with "prompt" and fields of SamplingParams ({error})'}
    except EdgespecError as error:
        return {"error": str(error)}
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "tokens_per_second": result.stats.tokens_per_second,
    }


def converse(engine: Any, connection: socket.socket) -> None:
    """Answer the lines of one client until it goes, says nothing for a minute, or sends no line."""
    connection.settimeout(IDLE_SECONDS)
    with connection, connection.makefile("rb") as lines:
        while line := lines.readline(LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) >= LONGEST_LINE:
                return
            connection.sendall(json.dumps(answer(engine, line)).encode() + b"\n")


def open_socket(path: Path) -> socket.socket:
    """A socket for its owner and group; what an earlier service left there is replaced."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o117)
    try:
        listening.bind(str(path))
    finally:
        os.umask(before)
    listening.listen(8)
    return listening


def serve(engine: Any, listening: socket.socket) -> None:
    """Until the process is told to end, or the socket is closed."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            if listening.fileno() < 0:
                return
            raise
        try:
            converse(engine, connection)
        except OSError:  # it went away, or said nothing for a minute
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    args = parser.parse_args()
    from edgespec import Engine
    from edgespec.config import RuntimeConfig

    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # The socket appears when the model is ready, so that a client can wait for it.
    with Engine.from_pretrained(config=RuntimeConfig.load()) as engine, open_socket(args.socket) as listening:
        try:
            serve(engine, listening)
        except KeyboardInterrupt:
            args.socket.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
