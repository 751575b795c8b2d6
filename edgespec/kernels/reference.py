"""What each kernel computes, in plain torch.

These run on any device, give the kernels' tests their meaning, and are what runs where Triton cannot. None looks at a
tensor's value on the host, so a CUDA graph can capture them; shapes depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.kernels.weights import QuantisedTorch

Weight = QuantisedTorch | Tensor
# Numbers of a quantised matrix that are unpacked at once. A whole LM head of 150,000 tokens would be half a gigabyte,
# and would stay with a captured graph.
TILE = 1 << 20
TILE_BYTES = 8 * TILE  # at most: four bits apart, float32, and half precision
ROWS = 16  # of queries that attention has scores of at once; a piece of a prompt has more


def tiles(weight: QuantisedTorch, dtype: torch.dtype) -> Iterator[Tensor]:
    """The weight [N, K] as `dtype`, some rows at a time."""
    rows, columns = weight.shape
    step = max(1, TILE // columns)
    for begin in range(0, rows, step):
        yield weight.rows(begin, min(begin + step, rows)).dequantise(dtype)


def linear(x: Tensor, weight: Weight, *, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N], plus residual [M, N]: [M, N] of x's dtype."""
    bias = None if bias is None else bias.to(x.dtype)
    if isinstance(weight, Tensor):
        result = F.linear(x, weight.to(x.dtype), bias)
    else:
        result = torch.cat([F.linear(x, tile) for tile in tiles(weight, x.dtype)], dim=-1)
        result = result if bias is None else result + bias
    return result if residual is None else result + residual


def gated_linear(x: Tensor, gate_up: Weight, *, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up: [M, N] for gate_up [2 N, K], whose first N rows are the gate's."""
    gate, up = linear(x, gate_up, bias=bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(normed, summed): summed = x + residual [M, H] in x's dtype, normed = its root-mean-square norm times weight."""
    summed = x if residual is None else x + residual
    wide = summed.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype), summed


def _at(tensor: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """The slice at `index`, a tensor of no dimensions; plain indexing would read it on the host."""
    return tensor.index_select(dim, index[None]).squeeze(dim)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [M, heads, d] turned by cos, sin [M, d/2]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)
    c, s = cos[:, None].to(wide), sin[:, None].to(wide)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, span: int, window: int | None = None
) -> Tensor:
    """Attention of q [M, heads, d] over keys, values [kv_heads, capacity, d]: [M, heads * d] of q's dtype.

    Row m sees positions p with p <= positions[m] (and p > positions[m] - window) among the first `span`, of which all
    must have been written. Head h reads key head h // (heads / kv_heads). Rows of negative position give zeros.
    """
    rows, heads, width = q.shape
    kv_heads = keys.shape[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    place = torch.arange(span, device=q.device)
    visible = place <= positions[:, None]
    if window is not None:
        visible = visible & (place > positions[:, None] - window)
    used = visible.any(dim=0)[None, :, None]  # what no row sees may hold anything, NaN too
    k = keys[:, :span].to(wide).masked_fill(~used, 0.0)
    v = values[:, :span].to(wide).masked_fill(~used, 0.0)
    results = []
    for begin in range(0, rows, ROWS):
        part, seen = q[begin : begin + ROWS], visible[begin : begin + ROWS]
        grouped = part.to(wide).view(len(part), kv_heads, heads // kv_heads, width)
        scores = torch.einsum("mkgd,ksd->kgms", grouped, k) * width**-0.5
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
        weights = weights.masked_fill(~seen, 0.0)  # a row that sees nothing has NaN here
        results.append(torch.einsum("kgms,ksd->mkgd", weights, v).reshape(len(part), heads * width))
    return torch.cat(results).to(q.dtype)


def best_tokens(logits: Tensor) -> Tensor:
    """int64 [M]: the best token of each row of logits [M, V], the lowest of equals.

    -1 for a row that has NaN or +inf, or nothing finite.
    """
    top = logits.amax(dim=-1)  # NaN is the maximum of its row
    places = torch.arange(logits.shape[-1], device=logits.device)  # torch's own argmax may return any of equals
    lowest = torch.where(logits == top[:, None], places, logits.shape[-1]).amin(dim=-1)
    return torch.where(torch.isfinite(top), lowest, -1)


def accept_greedy(best: Tensor, tokens: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """int64 [S, 2] = (accepted, next token) of S sequences, whose W tokens each the target was just given.

    best int64 [S, W]: `best_tokens` of the rows, tokens int64 [S, W]. Row r says what follows tokens[s, r]; the guesses
    of sequence s are tokens[s, begins[s] + 1] to tokens[s, ends[s]]. They stand while they are the best token of the
    row before, a negative one never; the next token is the best of the first row whose guess falls, of row ends[s] if
    none does. begins, ends: int64 [S], 0 <= begins[s] <= ends[s] < W; where that is not so, the numbers mean nothing.
    """
    rows = torch.arange(best.shape[1], device=best.device)
    agree = (best[:, :-1] == tokens[:, 1:]) & (tokens[:, 1:] >= 0) & (rows[:-1] < ends[:, None])
    stands = F.pad(agree | (rows[:-1] < begins[:, None]), (0, 1))
    last = stands.to(torch.int64).cumprod(1).sum(1, keepdim=True).clamp(max=best.shape[1] - 1)
    return torch.cat((last - begins[:, None], best.gather(1, last)), dim=1)


def accept_sampled(p: Tensor, q: Tensor | None, proposed: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [2] = (accepted, next token) by the rejection rule of Leviathan et al. 2023 and Chen et al. 2023.

    p [M, V]: the target's distributions; q [M - 1, V]: those that `proposed` int64 [M - 1] was drawn from, None if each
    guess was certain (one-hot q); uniforms [M] in [0, 1). Guess x_i stands if uniforms[i] * q_i(x_i) < p_i(x_i), and if
    it is a token. At the first that does not, the next token comes from max(p_i - q_i, 0), or from p_i if rounding
    leaves nothing of it; if all stand, from p_{M-1}; either by the inverse of its cumulative sum at uniforms[M - 1]. It
    is -1 for a row without mass.
    """
    count = proposed.shape[0]
    index = torch.arange(count, device=p.device)
    known, there = (proposed >= 0) & (proposed < p.shape[1]), proposed.clamp(0, p.shape[1] - 1)
    token_q = torch.ones(count, dtype=p.dtype, device=p.device) if q is None else q[index, there]
    stands = known & (uniforms[:count] * token_q < p[index, there])
    accepted = stands.to(torch.int64).cumprod(0).sum()
    row, places = _at(p, accepted), torch.arange(p.shape[1], device=p.device)
    residual = row
    if count:
        at = accepted.clamp(max=count - 1)
        guess = _at(proposed, at)
        less = torch.where(places == guess, row, 0.0) if q is None else _at(q, at)
        residual = torch.where(accepted < count, (row - less).clamp(min=0.0), row)
    residual = torch.where(residual.sum() > 0, residual, row)
    sums = residual.to(torch.float64).cumsum(0)
    token = torch.searchsorted(sums, (uniforms[count].to(torch.float64) * sums[-1])[None], right=True)[0]
    last = torch.where(residual > 0, places, -1).max()
    token = torch.where(sums[-1] > 0, torch.minimum(token, last), -1)
    return torch.stack((accepted, token))
