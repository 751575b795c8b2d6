"""Products with quantised and plain matrices, against float64."""

from __future__ import annotations

import pytest
import torch

from edgespec.kernels import ops, reference
from edgespec.kernels.weights import QuantisedTorch
from tests.kernels.cases import HALVES, close, normal, quantised, tuned

LAYOUTS = [
    (bits, mode, group) for bits in (4, 8) for mode in ("symmetric", "zeros", "shift") for group in (32, 64, 128)
]


def wide(weight: QuantisedTorch) -> torch.Tensor:
    return weight.dequantise(torch.float64)


@pytest.mark.parametrize(("bits", "mode", "group"), LAYOUTS)
def test_every_layout_in_every_kernel(bits: int, mode: str, group: int, device: torch.device) -> None:
    seed = bits * 1000 + group + len(mode)
    rows, columns = 17 + seed % 40, group * (1 + seed % 3)
    weight = quantised(seed, rows, columns, bits=bits, group=group, mode=mode, device=device)
    for dtype, m in ((torch.float32, 3), (HALVES[seed % 2], 1 + seed % 16)):
        x = normal(seed + 1, m, columns, dtype=dtype, device=device)
        expected = reference.linear(x.double(), wide(weight))
        close(ops.linear(x, weight), expected)
        close(ops.linear(x[:1], weight, same_bits=False), expected[:1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_scales_may_be_float32(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = quantised(5, 33, 96, bits=bits, mode="shift", scale_type=torch.float32, device=device)
    x = normal(6, 2, 96, dtype=dtype, device=device)
    close(ops.linear(x, weight), reference.linear(x.double(), wide(weight)))
    close(ops.linear(x[:1], weight, same_bits=False), reference.linear(x[:1].double(), wide(weight)))


@pytest.mark.parametrize("parts", [1, 4], ids=["whole", "split"])
@pytest.mark.parametrize(("m", "same_bits"), [(1, False), (1, True), (5, True)], ids=["vector", "row", "rows"])
def test_bias_residual_and_gate(
    m: int, same_bits: bool, parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"block_n": 16, "block_k": 32, "programs": 1 if parts == 1 else 64}
    tuned(monkeypatch, {"dot": sizes, "vector": sizes})
    weight = quantised(m, 2 * 11, 32 * (11 if m == 5 else 9), mode="zeros", device=device)
    x = normal(m + 1, m, weight.shape[1], dtype=torch.float16, device=device)
    bias = normal(m + 2, 22, dtype=torch.float16, device=device)
    residual = normal(m + 3, m, 22, dtype=torch.float16, device=device)
    exact = (x.double(), wide(weight))
    expected = reference.linear(*exact, bias=bias.double(), residual=residual.double())
    close(ops.linear(x, weight, bias=bias, residual=residual, same_bits=same_bits), expected)
    expected = reference.gated_linear(*exact, bias=bias.double())
    close(ops.gated_linear(x, weight, bias=bias, same_bits=same_bits), expected)


@pytest.mark.parametrize("parts", [1, 8], ids=["whole", "split"])
@pytest.mark.parametrize("kind", ["int4", "int8", "plain"])
def test_a_row_has_the_same_bits_at_every_width(
    kind: str, parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, {"dot": {"block_n": 32, "block_k": 64, "programs": 1 if parts == 1 else 16}})
    for dtype in (torch.float16, torch.float32):  # the latter rounds less away at the end
        if kind == "plain":
            weight: QuantisedTorch | torch.Tensor = normal(1, 30, 512, dtype=dtype, device=device)
        else:
            weight = quantised(1, 30, 512, bits=int(kind[-1]), device=device)
        x = normal(2, 35, 512, dtype=dtype, device=device)
        together, gated = ops.linear(x, weight), ops.gated_linear(x, weight)  # of several sequences: over a tile
        for some in (slice(0, 7), slice(9, 10), slice(30, 35), slice(0, 16)):
            assert torch.equal(ops.linear(x[some], weight), together[some])
            assert torch.equal(ops.gated_linear(x[some], weight), gated[some])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("m", "rows", "columns"), [(1, 17, 72), (4, 65, 130), (70, 19, 96)])
def test_plain_matrices(m: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = normal(3, rows, columns, dtype=dtype, device=device)
    x = normal(4, m, columns, dtype=dtype, device=device)
    residual = normal(5, m, rows, dtype=dtype, device=device)
    expected = reference.linear(x.double(), weight.double(), residual=residual.double())
    close(ops.linear(x, weight, residual=residual), expected)
    close(ops.linear(x, weight, residual=residual, prompt=True), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_prompt_is_longer_than_a_tile(bits: int, device: torch.device) -> None:
    weight = quantised(7, 2 * 33, 192, bits=bits, group=64, mode="zeros", device=device)
    x = normal(8, 65, 192, dtype=torch.float16, device=device)
    for prompt in (True, False):
        close(ops.linear(x, weight, prompt=prompt), reference.linear(x.double(), wide(weight)))
        close(ops.gated_linear(x, weight, prompt=prompt), reference.gated_linear(x.double(), wide(weight)))
    some = ops.linear(x[10:50], weight, prompt=True)
    assert torch.equal(some, ops.linear(x, weight, prompt=True)[10:50])  # however a prompt is cut into long pieces


def test_slices_of_larger_tensors_are_taken(device: torch.device) -> None:
    whole = quantised(9, 60, 64, device=device)
    x = normal(10, 4, 128, device=device)[:, 32:96]
    close(ops.linear(x, whole.rows(20, 53)), reference.linear(x.double(), wide(whole)[20:53]))


def test_what_does_not_fit_is_refused() -> None:
    weight = quantised(0, 5, 64)
    with pytest.raises(ValueError, match="does not fit"):
        ops.linear(torch.zeros(1, 32), weight)
    with pytest.raises(ValueError, match="even number"):
        ops.gated_linear(torch.zeros(1, 64), weight)
