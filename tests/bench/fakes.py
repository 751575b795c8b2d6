"""Contenders with a known clock: in this process for the harness's logic, or as a peer in a worker of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.bench.peers.base import Contender
from edgespec.bench.prompts import Prompt
from edgespec.bench.speed import Plan
from edgespec.bench.workers import WorkerFailure

PREFILL_S, STEP_S = 0.1, 0.01


def clocked(
    token_ids: list[int], *, chunk: int = 1, prefill: float = PREFILL_S, step: float = STEP_S
) -> dict[str, Any]:
    """A reply: the first token after `prefill` seconds, then `chunk` tokens every `step` seconds."""
    emissions = [(prefill, 1)] if token_ids else []
    left, seconds = len(token_ids) - 1, prefill
    while left > 0:
        seconds += step
        emissions.append((seconds, min(chunk, left)))
        left -= chunk
    return {"token_ids": token_ids, "emissions": emissions, "stats": {}}


Script = Callable[[list[int], int], dict[str, Any]]


class FakeChannel:
    """A worker without a process. `script(ids, new_tokens)` answers; it may raise WorkerFailure."""

    def __init__(self, name: str, script: Script, log: list[tuple[str, str]] | None = None) -> None:
        self.name, self.script, self.log = name, script, log if log is not None else []
        self.closed = self.killed = False

    def request(self, op: str, *, timeout: float = 1.0, **fields: Any) -> dict[str, Any]:
        self.log.append((self.name, op))
        if op == "call":
            return {"ok": True, "result": self.script(fields["arguments"]["ids"], fields["arguments"]["new_tokens"])}
        return {"ok": True, "peak_memory_bytes": 123_000_000}

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        self.killed = True


def contender(name: str, **changes: Any) -> Contender:
    """A contender that needs nothing."""
    return Contender(name, "tests.bench.fakes:FakePeer", "none", **changes)


def plan(names: list[str], prompts: list[Prompt], **changes: Any) -> Plan:
    """A plan over prompts whose ids are [10 * position + 1, ...], so that scripts can tell them apart."""
    ids = {prompt.name: [10 * i + 1, 10 * i + 2] for i, prompt in enumerate(prompts)}
    settings: dict[str, Any] = {"repeats": 3, "new_tokens": 9, "threads": 1, **changes}
    made = [name if isinstance(name, Contender) else contender(name) for name in names]
    return Plan(Path("model.gguf"), made, prompts, ids, warm_up=[7, 8], **settings)


class FakePeer:
    """A peer in a real worker process. What it does wrong is chosen by `mode`."""

    def __init__(self, model: str, threads: int, mode: str = "good", chunk: int = 1) -> None:
        self.mode, self.chunk = mode, chunk
        if mode == "noise":
            print("this line would break the protocol", flush=True)
            os.write(1, b"so would this one\n")
        if mode == "no load":
            raise FileNotFoundError("weights.bin")

    def generate(self, ids: list[int], new_tokens: int) -> dict[str, Any]:
        if self.mode == "raises" and len(ids) > 3:
            raise ValueError("this prompt is too difficult\nand more lines")
        if self.mode == "exits":
            print("fatal: out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        if self.mode == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "hangs":
            time.sleep(600)
        return clocked([(ids[0] + i) % 100 for i in range(new_tokens)], chunk=self.chunk)


def failing(message: str, *, alive: bool) -> WorkerFailure:
    return WorkerFailure(message, alive=alive)
