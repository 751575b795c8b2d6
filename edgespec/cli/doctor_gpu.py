"""`edgespec doctor`: can the installed packages use this board's GPU? torch, ONNX Runtime, Triton and its compilers.

torch is asked in a process of its own: a wheel for another CUDA may abort the process that imports it. Tests ask
stand-ins (`Probes`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from edgespec.cli.doctor_check import Check, finding
from edgespec.telemetry.board import Board, detect

_PROBE_SECONDS = 120  # the first import of torch from a microSD card takes most of a minute
_INDEX_6 = "--index-url https://pypi.jetson-ai-lab.io/jp6/cu126"
_TORCH_PROBE = """
import json, torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda or "", "available": torch.cuda.is_available()}
if facts["available"]:
    seen = torch.cuda.get_device_properties(0)
    facts.update(name=seen.name, total_bytes=seen.total_memory, capability=[seen.major, seen.minor])
    facts["archs"] = torch.cuda.get_arch_list()
    facts["free_bytes"] = torch.cuda.mem_get_info()[0]
    try:
        wrong = float((torch.ones(64, device="cuda") * 2).sum()) != 128.0
        facts["error"] = "a sum on the GPU gave a wrong result" if wrong else ""
    except Exception as error:
        facts["error"] = str(error)
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What an installed torch says. error: of its import, or of a small sum on the GPU; "" where all went well.

    free_bytes: of the GPU's memory, after what CUDA took for the process that was asked.
    """

    version: str = ""
    cuda: str = ""
    available: bool = False
    name: str = ""
    total_bytes: int = 0
    capability: tuple[int, ...] = ()
    archs: tuple[str, ...] = ()
    error: str = ""
    free_bytes: int = 0


def probe_torch() -> TorchFacts | None:
    """None if torch is not installed."""
    if not installed("torch"):
        return None
    answer, error = _ask(_TORCH_PROBE)
    if not isinstance(answer, dict):
        return TorchFacts(version=installed("torch"), error=error)
    lists = {key: tuple(answer[key]) for key in ("capability", "archs") if key in answer}
    return TorchFacts(**{**answer, **lists})


def probe_providers() -> tuple[str, ...]:
    """The execution providers of ONNX Runtime, none if it is not installed or cannot be imported."""
    try:
        import onnxruntime
    except ImportError:
        return ()
    return tuple(onnxruntime.get_available_providers())


def _ask(code: str) -> tuple[Any, str]:
    """What a Python of its own prints as JSON, or None and the last line of its complaint."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    with suppress(ValueError, IndexError):
        return json.loads(done.stdout.splitlines()[-1]), ""
    return None, (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]


def installed(package: str) -> str:
    """The version of an installed package, "" if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def headers_installed() -> bool:
    """Whether Python's own header files are there, against which Triton compiles its launcher."""
    return Path(sysconfig.get_paths()["include"], "Python.h").exists()


@dataclass(frozen=True, slots=True)
class Probes:
    """Where the checks look. which: the path of a program or None."""

    torch: Callable[[], TorchFacts | None] = probe_torch
    providers: Callable[[], tuple[str, ...]] = probe_providers
    version: Callable[[str], str] = installed
    which: Callable[[str], str | None] = shutil.which
    headers: Callable[[], bool] = headers_installed
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


def checks(root: Path, probes: Probes) -> list[Check]:
    """Nothing where there is no NVIDIA GPU: the CPU engine needs none of it."""
    board = detect(root)
    if not board.has_gpu:
        return []
    return [*torch(board, probes.torch()), *providers(board, probes.providers()), *triton(board, root, probes)]


def torch(board: Board, facts: TorchFacts | None) -> list[Check]:
    """Whether torch can compute on this GPU; the first thing that is wrong with it."""
    consequence = "the CUDA engine cannot run, only the CPU engine"
    install = _install("torch", board)
    if facts is None:
        return [finding("torch", "torch is not installed", consequence, install)]
    problem = _torch_problem(board, facts)
    if problem is not None:
        title, command = problem
        return [finding("torch", title, consequence, command or install)]
    native = f"sm_{facts.capability[0]}{facts.capability[1]}" in facts.archs
    note = "" if native else " (by kernels of an older chip of its family, which run on it)"
    detail = f"{facts.version}, CUDA {facts.cuda}, {facts.name} with {facts.total_bytes / 2**30:.1f} GiB{note}"
    return [Check("torch", "ok", detail)]


def problem_of(board: Board, facts: TorchFacts) -> str:
    """Why the CUDA engine cannot run with this torch; "" if it can."""
    found = _torch_problem(board, facts)
    return "" if found is None else found[0]


def _torch_problem(board: Board, facts: TorchFacts) -> tuple[str, str] | None:
    """(what is wrong, the command that mends it or "" for another torch), or None."""
    if not facts.available:
        return _no_gpu_seen(board, facts)
    if facts.total_bytes <= 0:
        return f"the GPU ({facts.name}) reports no memory at all, so its driver is broken", "sudo reboot"
    if not covers(facts.archs, facts.capability):
        chip = ".".join(map(str, facts.capability))
        return f"torch {facts.version} has no kernels for this GPU ({chip}; it has {', '.join(facts.archs)})", ""
    if facts.error:
        return f"torch {facts.version} fails on this GPU: {facts.error}", ""
    return None


def _no_gpu_seen(board: Board, facts: TorchFacts) -> tuple[str, str]:
    if "GLIBCXX" in facts.error:  # Ubuntu 22.04's is older than the one that the wheels for JetPack 6 want
        libraries = "sudo add-apt-repository -y ppa:ubuntu-toolchain-r/test && sudo apt install libstdc++6"
        return f"torch {facts.version} needs a newer C++ library ({facts.error})", libraries
    if facts.error:
        return f"torch {facts.version} cannot be imported: {facts.error}", ""
    if not facts.cuda:
        return f"torch {facts.version} is built without CUDA", ""
    built, there = _major(facts.cuda), _major(board.cuda)
    if board.jetson and built and there and built != there:
        return f"torch {facts.version} is built for CUDA {facts.cuda}, this board has CUDA {board.cuda}", ""
    if board.jetson:
        access = "sudo usermod -aG video,render $USER, and log in again; in a container: docker run --runtime nvidia"
        return f"torch {facts.version} sees no GPU: this user or container may not use it", access
    return f"torch {facts.version} sees no GPU: the driver does not work with CUDA {facts.cuda}", "nvidia-smi"


def covers(archs: tuple[str, ...], capability: tuple[int, ...]) -> bool:
    """Whether kernels for `archs` run on a GPU of that compute capability.

    "sm_80" runs on 8.0 and on later minors of 8 (NVIDIA's rule of binary compatibility), "sm_90a" on 9.0 alone, and
    "compute_80" is compiled on first use for anything newer.
    """
    if len(capability) != 2:
        return False
    own = capability[0], capability[1]
    for arch in archs:
        kind, _, digits = arch.partition("_")
        exact = digits[-1:].isalpha()
        digits = digits.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdigit() or len(digits) < 2:
            continue
        built = int(digits[:-1]), int(digits[-1])
        if built == own or (not exact and built <= own and (kind == "compute" or built[0] == own[0])):
            return True
    return False


def providers(board: Board, names: tuple[str, ...]) -> list[Check]:
    """The CUDA provider of ONNX Runtime."""
    if "CUDAExecutionProvider" in names:
        return [Check("onnxruntime", "ok", "has its CUDA provider")]
    command = "pip uninstall -y onnxruntime && " + _install("onnxruntime-gpu", board)
    return [finding("onnxruntime", "it has no CUDA provider", "what it computes runs on the CPU cores", command)]


def triton(board: Board, root: Path, probes: Probes) -> list[Check]:
    """Triton, the C compiler and headers for its launcher, and an assembler (ptxas) that knows this chip."""
    slower = "kernels run in plain torch, which is slower and takes more memory (the plan below counts it)"
    version = probes.version("triton")
    if not version:
        return [finding("triton", "Triton is not installed", slower, _install("triton", board))]
    found = []
    if not _compiler(probes):
        found.append(finding("triton", "there is no C compiler for Triton", slower, "sudo apt install gcc"))
    if not probes.headers():
        found.append(
            finding("triton", "Python's headers are missing for Triton", slower, "sudo apt install python3-dev")
        )
    found.extend(_ptxas(board, root, probes.environment, slower))
    return found or [Check("triton", "ok", version)]


def _compiler(probes: Probes) -> bool:
    return bool(probes.environment.get("CC") or probes.which("gcc") or probes.which("clang"))


def plain(probes: Probes) -> bool:
    """Whether Triton cannot compile anything here, as far as that shows before it tries."""
    return not (probes.version("triton") and _compiler(probes) and probes.headers())


def _ptxas(board: Board, root: Path, environment: Mapping[str, str], slower: str) -> list[Check]:
    """On a Jetson the ptxas of its own CUDA must be used: Triton's may not know the chip (pytorch issue 170117)."""
    if not board.jetson:
        return []
    own, set_to = "usr/local/cuda/bin/ptxas", environment.get("TRITON_PTXAS_PATH", "")
    if set_to and (root / set_to.lstrip("/")).exists():
        return []
    if not (root / own).exists():
        package = "cuda-nvcc-" + "-".join((board.cuda or "12.6").split(".")[:2])
        return [finding("triton", "there is no ptxas of this board's CUDA", slower, f"sudo apt install {package}")]
    title = f"TRITON_PTXAS_PATH is {set_to}, which is not there" if set_to else "TRITON_PTXAS_PATH is not set"
    consequence = "Triton uses the assembler that it brings, which may not know this GPU"
    return [finding("triton", title, consequence, f"export TRITON_PTXAS_PATH=/{own}")]


def _install(package: str, board: Board) -> str:
    """JetPack 6 has an index of its own (the usual wheels are for CUDA 13); from JetPack 7 on the usual wheels fit."""
    command = f"pip install --force-reinstall {package}"
    return f"{command} {_INDEX_6}" if board.jetpack_major == 6 else command


def _major(version: str) -> str:
    return version.split(".")[0]
