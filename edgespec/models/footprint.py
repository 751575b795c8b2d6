"""What an engine takes in memory for a model, known from headers alone. Each engine says it for itself."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from edgespec.errors import ConfigError
from edgespec.models.build import planned_bytes
from edgespec.models.weights.opening import WeightFile

WORKSPACE = 160 << 20  # the interpreter, ONNX Runtime's code and arena, and activations of a prefill chunk (measured)
# Of a CUDA process before any weight. Assumed: nobody has measured it with this engine. On the GPU, reports of x86
# machines say 300 to 400 MB, with kernels loaded when they are first used (pytorch issue 109888); on a Jetson the pages
# of torch and Python lie in the same memory.
CUDA_CONTEXT = 400 << 20
CUDA_PROCESS = 1_000_000_000


@dataclass(frozen=True)
class Footprint:
    """Bytes of the CPU's engines. weights: of all tensors. position: of keys and values of one token (float32)."""

    weights: int
    position: int

    def held(self, positions: int) -> int:
        """How many positions memory is taken for, when one text may have `positions`."""
        return positions

    def cache(self, positions: int) -> int:
        """Bytes of keys and values of one text of up to `positions`."""
        return self.held(positions) * self.position

    def before(self) -> dict[str, int]:
        """By part, what the device's library takes when it starts: it is gone before anything is planned."""
        return {}

    def beside(self, positions: int) -> dict[str, int]:
        """By part, what a target takes beside weights, keys and values."""
        return {"workspace": WORKSPACE}

    def slot(self, positions: int) -> int:
        """Bytes of a draft for texts of up to `positions`: all that it holds, for one of them."""
        return self.weights + self.cache(positions)

    def pinned(self, positions: int) -> int:
        """Bytes of the host's memory that the system may not move, beside those of the device."""
        return 0


def footprint(
    weights: WeightFile, device: str, weight_format: str, *, unified: bool = False, plain: bool | None = None
) -> Footprint:
    """What the engine of `device` takes for these weights; none is read.

    unified: CPU and GPU share one memory. plain: Triton cannot run there, None = as it is here. Raises ConfigError
    where the engine's package is not installed.
    """
    nbytes = planned_bytes(weights, device, weight_format)
    if device != "cuda":
        return Footprint(nbytes, weights.spec.position_bytes())
    try:
        from edgespec.models.cuda.footprint import CudaFootprint
        from edgespec.models.cuda.weights import host_bytes
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError('device "cuda" needs the package torch; install it or use device "cpu"') from error
    exact = weight_format == "exact"
    itemsize, reading = 2 if exact else 4, host_bytes(weights, keep_blocks=exact)
    position = weights.spec.position_bytes(itemsize)
    return CudaFootprint(
        nbytes, position, weights.spec, itemsize, unified, without_triton() if plain is None else plain, reading
    )


def without_triton() -> bool:
    """Whether a CUDA engine has to do without; before CUDA was started, whether Triton is not even installed."""
    import torch

    from edgespec.kernels import ops

    if not torch.cuda.is_initialized():
        return find_spec("triton") is None
    return ops.backend(torch.device("cuda", torch.cuda.current_device())) == "torch"
