"""Compiles the kernels for a compute capability without a device: `python -m tests.kernels.compiling 87`.

The operations are called with tensors on the CPU and a driver that only knows its target; Triton then compiles what it
would launch, to machine code. Prints one JSON line a kernel: name, shared memory, bytes of local memory (registers that
did not fit), and how wide it loads from global memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from edgespec.kernels import ops, tuning
from edgespec.kernels.paged import PagedLayer
from tests.kernels.cases import quantised

HALF = torch.float16


class Target:
    """What Triton asks a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_all(capability: int) -> list[dict[str, Any]]:
    compiled: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(_facts(run(self, *arguments, grid=grid, warmup=True, **options)))

    driver.set_active(Target(capability))
    JITFunction.run = compile_only  # type: ignore[method-assign]
    chosen = tuning.for_capability(capability)
    tuning.of = lambda _device: chosen
    ops.use("triton")
    _products()
    _layers()
    _blocks()
    _acceptance()
    return compiled


def _products() -> None:
    x = torch.zeros(4, 1024, dtype=HALF)
    for bits, group, mode in ((4, 32, "shift"), (4, 128, "zeros"), (4, 32, "symmetric"), (8, 32, "symmetric")):
        weight = quantised(0, 2048, 1024, bits=bits, group=group, mode=mode)
        ops.linear(x, weight, bias=torch.zeros(2048, dtype=HALF))
        ops.linear(x[:1], weight, same_bits=False)
    ops.gated_linear(x, weight)
    ops.linear(x.bfloat16(), weight)
    ops.linear(x.float(), weight)
    ops.linear(torch.zeros(100, 1024, dtype=HALF), weight, prompt=True)
    ops.linear(x, torch.zeros(2048, 1024, dtype=HALF), residual=torch.zeros(4, 2048, dtype=HALF))


def _layers() -> None:
    ops.rms_norm(torch.zeros(2, 896, dtype=HALF), torch.zeros(896, dtype=HALF), 1e-6, torch.zeros(2, 896, dtype=HALF))
    for head_dim, dtype, window in ((128, HALF, None), (64, torch.bfloat16, 100)):
        slab, tables = torch.zeros(8, 2, 64, head_dim, dtype=dtype), torch.zeros(512, head_dim // 2)
        blocks = torch.zeros(1, 8, dtype=torch.int64)
        kv = PagedLayer((slab,), (slab.clone(),), blocks, blocks.clone(), torch.zeros(1, dtype=torch.int64))
        weight = torch.zeros(head_dim, dtype=dtype)
        norms = None if window is None else (weight, weight, 1e-6)
        for width, span in ((4, None), (100, 200)):
            qkv = torch.zeros(width, 12 * head_dim, dtype=dtype)
            q = ops.rotary_and_write(qkv, tables, tables, kv, width, 8, norms=norms)
            ops.attention(q, kv, width, window, span=span)


def _blocks() -> None:
    for head_dim, dtype in ((128, HALF), (64, torch.bfloat16), (128, torch.float32)):
        slab = torch.zeros(2, 3, 8, 2, 64, head_dim, dtype=dtype)
        ops.move_blocks((slab, slab.clone()), torch.zeros(5, 4, dtype=torch.int64))
    ops.remap(torch.zeros(17, 2, 514, dtype=torch.int64), torch.zeros(5, 4, dtype=torch.int64))


def _acceptance() -> None:
    guesses = torch.zeros(4, dtype=torch.int64)
    best = ops.best_tokens(torch.zeros(10, 151936, dtype=HALF)).view(2, 5)
    ops.accept_greedy(best, best.clone(), best[:, 0].contiguous(), best[:, 4].contiguous())
    p = torch.zeros(5, 151936)
    ops.accept_sampled(p, p[:4], guesses, torch.zeros(5))
    ops.accept_sampled(p, None, guesses, torch.zeros(5))


def _facts(kernel: Any) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    loads = re.findall(r"ld\.global(?:\.[\w:]+)*", ptx)
    widths = [_bytes(load) for load in loads]
    widths += [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, 0x(\w+)", ptx)]
    local = re.findall(r"(?m)^\s*(?:ld|st)\.local", ptx)
    return {
        "name": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "local": len(local) + _spilled(kernel.asm["cubin"]),
        "widest": max(widths, default=0),
    }


def _bytes(load: str) -> int:
    """How many bytes an instruction such as ld.global.v4.b32 loads."""
    vector, bits = re.search(r"\.v(\d)", load), re.search(r"\.[a-z]+(\d+)$", load)
    return (int(vector[1]) if vector else 1) * (int(bits[1]) if bits else 0) // 8


def _spilled(cubin: bytes) -> int:
    """Bytes of stack that a thread needs, by the cuobjdump that comes with Triton; 0 where it does not come."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False)
    return sum(int(found) for found in re.findall(r"STACK:(\d+)", usage.stdout + usage.stderr))


if __name__ == "__main__":
    for entry in compile_all(int(sys.argv[1])):
        print(json.dumps(entry))
