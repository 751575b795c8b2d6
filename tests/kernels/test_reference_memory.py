"""What the torch references work in: it is planned for devices where Triton cannot run, and never a whole matrix."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgespec.kernels import paged, reference
from edgespec.kernels.paged import PagedLayer
from tests.kernels.cases import normal, quantised


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside it held at once."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[int, int]] = {}  # address of a storage: its bytes, tensors on it
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                place = tensor.untyped_storage().data_ptr()
                if place in known and place not in self._held:
                    continue  # a view of something that was there before
                nbytes, users = self._held.get(place, (tensor.untyped_storage().nbytes(), 0))
                self._held[place] = nbytes, users + 1
                weakref.finalize(tensor, self._gone, place)
        self.bytes = max(self.bytes, sum(nbytes for nbytes, _ in self._held.values()))
        return result

    def _gone(self, place: int) -> None:
        nbytes, users = self._held[place]
        if users == 1:
            del self._held[place]
        else:
            self._held[place] = nbytes, users - 1


def peak_of(run: Any) -> int:
    gc.collect()
    with torch.no_grad(), Peak() as peak:
        run()
    return peak.bytes


@pytest.mark.parametrize("mode", ["symmetric", "zeros", "shift"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_unpacks_a_tile_at_a_time(bits: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE", 1 << 14)
    weight, x = quantised(1, 4096, 128, bits=bits, mode=mode), normal(2, 3, 128)
    whole = torch.nn.functional.linear(x, weight.dequantise())
    made = reference.linear(x, weight, bias=torch.ones(4096), residual=whole)
    assert torch.allclose(made, 2 * whole + 1, rtol=1e-4, atol=1e-4)
    results = 4 * 3 * 4096 * 4  # tiles of the result, and the result; the sums after it
    peak = peak_of(lambda: reference.linear(x, weight))
    tile = 8 * (1 << 14)
    assert reference.TILE_BYTES == 8 << 20
    assert tile // 2 < peak <= tile + tile // 8 + results
    assert peak < 4 * 4096 * 128


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("slabs", [1, 3])
def test_attention_takes_what_is_told(rows: int, slabs: int) -> None:
    heads, kv_heads, head_dim, block, count = 4, 2, 16, 64, 12
    keys, values = (
        tuple(normal(seed + part, count // slabs, kv_heads, block, head_dim).half() for part in range(slabs))
        for seed in (1, 7)
    )
    ids = torch.arange(count)[None]
    span = count * block
    layer = PagedLayer(keys, values, ids, ids * block, torch.tensor([span - rows]))
    q = normal(3, rows, heads, head_dim).half()
    peak = peak_of(lambda: paged.attention(q, layer, rows, span=span))
    told = paged.attention_bytes(rows, span, heads, kv_heads, head_dim, 2)
    small = 64 * rows * heads * head_dim
    assert told // 6 < peak <= told + small
