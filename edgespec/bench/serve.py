"""The worker's side of the pipes: `python -m edgespec.bench.serve` answers requests, one line of JSON each.

load {factory, options}: make the contender. prepare {factory, options}: what may be built once and kept on disk.
call {method, arguments}: call the contender. memory {}: peak resident bytes of this process.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import IO, Any


def peak_memory_bytes() -> int:
    """The highest resident size this process has had since it was started (VmHWM where the system has it)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _private_channel() -> IO[str]:
    """Keep the real standard output for replies; whatever libraries print goes to standard error instead."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _find(factory: str) -> Any:
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)


class Server:
    """Holds the one contender of this process and answers requests about it."""

    def __init__(self) -> None:
        self.contender: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request; errors become {"error": text}."""
        try:
            return self._answer(request)
        except Exception as error:  # the parent decides what an error means
            text = str(error).strip().splitlines()
            return {"error": f"{type(error).__name__}: {text[0][:400] if text else 'no message'}"}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "load":
            self.contender = _find(request["factory"])(**request["options"])
            return {"ok": True}
        if op == "prepare":
            prepare = getattr(_find(request["factory"]), "prepare", None)
            if prepare is not None:
                prepare(**request["options"])
            return {"ok": True, "peak_memory_bytes": peak_memory_bytes()}
        if op == "call":
            return {"ok": True, "result": getattr(self.contender, request["method"])(**request["arguments"])}
        if op == "memory":
            return {"ok": True, "peak_memory_bytes": peak_memory_bytes()}
        raise ValueError(f"unknown request {op!r}")

    def close(self) -> None:
        """Release the contender."""
        close = getattr(self.contender, "close", None)
        if close is not None:
            close()


def main() -> None:
    """Serve until standard input ends."""
    channel = _private_channel()
    server = Server()
    for line in sys.stdin:
        channel.write(json.dumps(server.answer(json.loads(line))) + "\n")
        channel.flush()
    server.close()


if __name__ == "__main__":
    main()
