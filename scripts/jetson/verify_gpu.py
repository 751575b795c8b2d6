"""Runs one operation on the GPU and looks for the provider and the compiler that the engines use. 0 if the GPU works.

Standard library and the packages it checks; used by setup.sh and by the container's test.
"""

from __future__ import annotations

import os
import shutil
import sys


def torch_problem() -> str:
    """Why torch cannot compute on the GPU, or ""."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch cannot be imported ({error}): install it from the index for this L4T"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU: it is a build for CPUs, or for another CUDA than the board's"
    try:
        ones = torch.ones(256, 256, device="cuda", dtype=torch.float16)
        total = float((ones @ ones).float().sum())
    except RuntimeError as error:  # no kernels for this GPU, wrong libraries, or no memory: all end here
        return f"torch {torch.__version__} cannot multiply on the GPU: {error}"
    if total != 256.0**3:
        return f"torch {torch.__version__} computes wrongly on the GPU: {total} instead of {256.0**3}"
    major, minor = torch.cuda.get_device_capability()
    print(f"ok    torch {torch.__version__} on {torch.cuda.get_device_name()}, sm_{major}{minor}")
    return ""


def provider_problem() -> str:
    try:
        import onnxruntime
    except (ImportError, OSError) as error:
        return f"onnxruntime cannot be imported ({error})"
    providers = onnxruntime.get_available_providers()
    if "CUDAExecutionProvider" not in providers:
        return f"onnxruntime {onnxruntime.__version__} has no CUDA provider: side models run on the CPU"
    print(f"ok    onnxruntime {onnxruntime.__version__} with the CUDA provider")
    return ""


def compiler_problem() -> str:
    """Triton builds its kernels on the board."""
    try:
        import triton
    except ImportError:
        return "triton is not installed: the plain path is used, which is slower"
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        return "there is no C compiler, which triton needs: apt-get install gcc python3-dev"
    ptxas = os.environ.get("TRITON_PTXAS_PATH", "/usr/local/cuda/bin/ptxas")
    if not os.access(ptxas, os.X_OK):
        return f"there is no {ptxas}: set TRITON_PTXAS_PATH to the ptxas of the board's CUDA"
    print(f"ok    triton {triton.__version__}")
    return ""


def main() -> int:
    fatal = torch_problem()
    for problem in (provider_problem(), compiler_problem()):
        if problem:
            print(f"warn  {problem}")
    if fatal:
        print(f"fail  {fatal}")
    return 1 if fatal else 0


if __name__ == "__main__":
    sys.exit(main())
