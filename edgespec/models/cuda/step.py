"""One forward of the CUDA engine: tensors in, tensors out, nothing that the host must know on the way."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.kernels import ops
from edgespec.kernels.paged import PagedLayer
from edgespec.kernels.weights import QuantisedTorch
from edgespec.models.cuda.kv import PagedPool
from edgespec.models.cuda.weights import CudaModel, Linear


class _How(NamedTuple):
    """Of products, see `ops.linear`."""

    same_bits: bool = True
    prompt: bool = False


_STEP = _How()


def run(
    model: CudaModel,
    pool: PagedPool,
    ids: Tensor,
    starts: Tensor,
    blocks: Tensor,
    distances: Tensor,
    width: int,
    *,
    span: int | None = None,
    same_bits: bool = True,
) -> Tensor:
    """Final hidden states [S * width, hidden_size] of S sequences, whose keys and values are written to their blocks.

    ids int64 [S * width], starts int64 [S], blocks and distances int64 [S, n] (see `PagedLayer`). span: no sequence is
    longer after the step, where that is known on the host (a prompt's piece); a captured step must not be told.
    same_bits: see `ops.linear`; a draft's guesses do without.
    """
    spec, epsilon = model.spec, model.spec.rms_norm_eps
    how = _How(same_bits, prompt=span is not None)
    branch, residual = embed(model, ids), None
    for index, layer in enumerate(model.layers):
        kv = PagedLayer(pool.keys(index), pool.values(index), blocks, distances, starts)
        normed, residual = ops.rms_norm(branch, layer.input_norm, epsilon, residual)
        norms = None if layer.head_norms is None else (*layer.head_norms, epsilon)
        queries = ops.rotary_and_write(
            product(normed, layer.qkv, how), model.cos, model.sin, kv, width, spec.num_heads, norms=norms
        )
        if len(starts) > 1:
            _clean(pool, index)
        attended = ops.attention(queries, kv, width, spec.windows[index], span=span)
        normed, residual = ops.rms_norm(product(attended, layer.output, how), layer.mlp_norm, epsilon, residual)
        branch = product(gated(normed, layer.gate_up, how), layer.down, how)
    return ops.rms_norm(branch, model.norm, epsilon, residual)[0]


def _clean(pool: PagedPool, layer: int) -> None:
    """Make the scratch block's values numbers again.

    Rows that only fill a sequence up may write there what a damaged sequence left them, and those of another one read
    it; the weight 0 that its own rows give to it would not help, as 0 times NaN is NaN.
    """
    values = pool.values(layer)
    slab, place = divmod(pool.scratch, len(values[0]))
    values[slab][place].nan_to_num_(0.0, 0.0, 0.0)


def embed(model: CudaModel, ids: Tensor) -> Tensor:
    """Input embeddings [n, hidden_size] of ids int64 [n]."""
    if isinstance(model.embedding, QuantisedTorch):
        return model.embedding.gather(ids, model.dtype)
    return F.embedding(ids, model.embedding)


def logits(model: CudaModel, hidden: Tensor, *, same_bits: bool = True, prompt: bool = False) -> Tensor:
    """float32 [n, vocab_size] of final hidden states [n, hidden_size]."""
    return product(hidden, model.head, _How(same_bits, prompt)).float()


def weight_rows(linear: Linear, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [n, K] of a weight of one part."""
    weight = linear.parts[0]
    return weight.gather(ids, dtype) if isinstance(weight, QuantisedTorch) else weight[ids]


def product(x: Tensor, linear: Linear, how: _How = _STEP) -> Tensor:
    """x [n, K] times a weight [N, K] transposed, plus its bias: [n, N]."""
    if len(linear.parts) == 1:
        return ops.linear(x, linear.parts[0], bias=linear.bias, same_bits=how.same_bits, prompt=how.prompt)
    parts = [ops.linear(x, part, same_bits=how.same_bits, prompt=how.prompt) for part in linear.parts]
    result = torch.cat(parts, dim=-1)
    return result if linear.bias is None else result + linear.bias


def gated(x: Tensor, gate_up: Linear, how: _How = _STEP) -> Tensor:
    """silu(gate) * up: [n, intermediate_size]."""
    if len(gate_up.parts) == 1:
        return ops.gated_linear(x, gate_up.parts[0], bias=gate_up.bias, same_bits=how.same_bits, prompt=how.prompt)
    gate, up = product(x, gate_up, how).chunk(2, dim=-1)
    return F.silu(gate) * up
