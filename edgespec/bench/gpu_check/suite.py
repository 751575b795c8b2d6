"""The tests that need a GPU, in a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from edgespec.bench.gpu_check.report import Check

ROOT = Path(__file__).parents[3]


def run(check: Check) -> None:
    """In what is left of the time; a first run compiles every kernel in every form that a test asks for."""
    if not (ROOT / "tests" / "kernels").is_dir():
        check.found("tests", "tests that need a GPU", None, note="there are no tests beside this installation")
        return
    chosen = "tests/kernels/test_acceptance.py" if check.tiny else "tests"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", chosen]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=max(20.0, min(check.left, 280.0))
        )
    except subprocess.TimeoutExpired:
        check.found("tests", "tests that need a GPU", None, note=f"not done in time; run {' '.join(command[1:])}")
        return
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    counted = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    wrong = counted.get("failed", 0) + counted.get("error", 0)
    ok = None if check.device.type != "cuda" else wrong == 0 and done.returncode == 0
    check.found("tests", "tests that need a GPU: passed", counted.get("passed", 0), goal="all", ok=ok, note=last)
