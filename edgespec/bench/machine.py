"""What the numbers were measured on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "edgespec",
    "numpy",
    "onnxruntime",
    "torch",
    "transformers",
    "llama-cpp-python",
    "onnxruntime-genai",
    "tokenizers",
)
# Variables that change how fast, or with how many threads, the engines run.
PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ORT_", "GGML_", "EDGESPEC_", "MALLOC_")
# Commands are shown to others with what was measured; these hold secrets (EDGESPEC_API_KEY of the server).
SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


def describe(threads: int) -> dict[str, Any]:
    """Processor, cores, threads used, memory, system, versions and code."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": threads,
        "memory_bytes": psutil.virtual_memory().total,
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "code": code_print(),
    }


@cache
def code_print() -> str:
    """Which code this is, in 12 hex digits: of one version there are many."""
    import drafts
    import edgespec
    import predictor

    made = hashlib.sha256()
    for package in (drafts, edgespec, predictor):
        root = Path(str(package.__file__)).parent
        for file in sorted(root.rglob("*.py")):
            made.update(f"{package.__name__}/{file.relative_to(root).as_posix()}\n".encode())
            made.update(file.read_bytes())
    return made.hexdigest()[:12]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for key in ("model name", "Hardware", "Model"):
        for line in lines:
            if line.partition(":")[0].strip() == key:
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def command_line(arguments: Sequence[str]) -> str:
    """A command as one can type it again, with the variables that matter in front."""
    variables = [
        f"{name}={shlex.quote(value)}"
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and not name.endswith(SECRETS)
    ]
    return " ".join([*variables, shlex.join(arguments)])


def this_command() -> str:
    """The command line of this process."""
    return command_line(["edgespec", *sys.argv[1:]])


def command_to_resume() -> str:
    """The command line that goes on with what this process began, as one can type it again here."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "edgespec" else "edgespec"
    return shlex.join([program, *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
