"""Out of memory on a CUDA device, in all the forms in which it shows."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Held by a thread that captures a graph, or does what would break another thread's capture: a process may have one at a
# time, and no memory is given back meanwhile. A decoder's lock comes before it.
exclusive = threading.RLock()

# Lower case. On Jetson, torch asks NVML for details when an allocation fails; Orin has no NVML, so the assert about it
# is what "out of memory" looks like there (pytorch issue 185240). NvMap is Tegra's allocator: error 12 is ENOMEM.
_SIGNS = (
    "out of memory",
    "cudaerrormemoryallocation",
    "nvml_success == r internal assert failed",
    "nvmapmemalloc",
    "nvmap_ioc_alloc failed",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cuda_error_out_of_memory",
    "nvrm: out of memory",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception (or what caused it) says that device memory ran out.

    MemoryError, torch's OutOfMemoryError, and the texts that CUDA, cuBLAS, NVML's assert and NvMap leave in other
    exceptions. No torch is imported.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, MemoryError) or "OutOfMemory" in type(link).__name__:
            return True
        text = str(link).lower()
        if any(sign in text for sign in _SIGNS):
            return True
        link = link.__cause__ or link.__context__
    return False


@contextmanager
def suppress_out_of_memory() -> Iterator[None]:
    """Leave the block where memory runs out."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise


def return_memory(device: Any) -> None:
    """Hand what torch's allocator has cached on `device` back: on a Jetson it is everybody's memory."""
    if device.type == "cuda":
        import torch

        gc.collect()  # tensors in a cycle hold their memory
        with exclusive:
            torch.cuda.empty_cache()


def start() -> bool:
    """Let CUDA take what it needs for itself; False without a device (who loads the model says what is missing)."""
    try:
        import torch
    except ModuleNotFoundError:
        return False
    if not torch.cuda.is_available():
        return False
    torch.cuda.mem_get_info()
    return True


def device_memory() -> tuple[int, int]:
    """(free, total) bytes of the first CUDA device. Free is what its driver has, and what torch has cached of it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), total
