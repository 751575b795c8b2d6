"""The kernels compile to machine code for the boards they are meant for; no device is needed for that.

The interpreter forgives what the compiler does not: types of branches, tile sizes, what a register or a multiprocessor
can hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import INSTALLED

# Compute capability: bytes of shared memory that a program can have (CUDA C++ Programming Guide, technical
# specifications per compute capability).
BOARDS = {87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 110: 227 << 10}


@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed (it has wheels for Linux on x86_64 and aarch64)")
@pytest.mark.parametrize("capability", [87, *(pytest.param(other, marks=pytest.mark.slow) for other in (89, 90, 110))])
def test_all_kernels_compile(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", str(capability)],
        capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = {kernel["name"] for kernel in kernels}
    assert names >= {"_dot", "_vector", "_finish", "_rms_norm", "_rotary_and_write", "_chunk", "_merge", "_best",
                     "_join", "_greedy", "_judge", "_mass", "_draw", "_move", "_remap"}  # fmt: skip
    for kernel in kernels:
        assert kernel["shared"] <= BOARDS[capability], kernel
        assert kernel["local"] == 0, f"registers are spilled: {kernel}"
        if kernel["name"] in ("_dot", "_vector", "_chunk", "_move"):
            assert kernel["widest"] == 16, f"memory is not read 16 bytes at a time: {kernel}"
