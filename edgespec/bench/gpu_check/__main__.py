"""`python -m edgespec.bench.gpu_check`: run the parts, print one table, write one JSON."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from edgespec.bench.gpu_check import bandwidth, loading, memory, parity, rounds, steps, suite
from edgespec.bench.gpu_check.report import Check, table, write
from edgespec.models.cuda.memory import return_memory

PARTS: dict[str, Callable[[Check], None]] = {
    "parity": parity.run,
    "rounds": rounds.run,
    "bandwidth": bandwidth.run,
    "steps": steps.run,
    "loading": loading.run,
    "memory": memory.run,
    "tests": suite.run,  # last: what it compiles may take all the time that is left
}
NO_DEVICE = "no CUDA device: nothing was measured"
_SECONDS = 330.0


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all goals met. 1: one was missed, or a part failed. 3: there is no CUDA device."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(NO_DEVICE)
        return 3
    begin = time.monotonic()
    check = Check(torch.device(args.device), args.tiny, begin + args.seconds)
    for name in args.parts.split(",") if args.parts else PARTS:
        _run(check, name)
    seconds = time.monotonic() - begin
    print(table(check.findings))
    write(args.json, check, seconds)
    print(f"{seconds:.0f} s; {args.json}")
    return 1 if check.failed else 0


def _run(check: Check, name: str) -> None:
    """A part that fails costs its own numbers only."""
    if check.left <= 0:
        check.found(name, "all of it", None, ok=False, note="the time is up")
        return
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        PARTS[name](check)
    except Exception as error:
        traceback.print_exc()
        check.found(name, "this part", None, ok=False, note=f"failed: {type(error).__name__}: {error}"[:200])
    return_memory(check.device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see whether it runs")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, in seconds; for tests")
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="after which no part is begun (default 330)")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
