"""The head draft as a torch module, and its unrolled forward pass over whole answers (docs/drafts.md has the picture).

Training in parallel over all positions follows EAGLE-3's "training-time test" (arXiv 2503.01840, section 3.2): step 0
sees the target's own hidden states; step s sees, at the newest s positions, what the head itself produced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MATRICES = ("fc", "qkv", "o", "gate_up", "down")
NORMS = ("embed_norm", "hidden_norm", "input_norm", "mlp_norm", "out_norm")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The architecture numbers a head is made of; see `drafts.head.HeadSpec` for their meaning."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    window: int = 256
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class Rows:
    """A padded batch. Columns 0..context-1 are prompt rows (aligned right), the others the answer's anchors.

    embeds, hidden: float [batch, columns, hidden_size]; valid: bool [batch, columns].
    """

    embeds: Tensor
    hidden: Tensor
    valid: Tensor
    context: int


class HeadModule(nn.Module):
    """One decoder layer on [embedding of the next token ; the target's hidden state]."""

    fc: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    embed_norm: Tensor
    hidden_norm: Tensor
    input_norm: Tensor
    mlp_norm: Tensor
    out_norm: Tensor

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        h, inner, d = shape.hidden_size, shape.intermediate_size, shape.head_dim
        sizes = {
            "fc": (h, 2 * h),
            "qkv": ((shape.num_heads + 2 * shape.num_kv_heads) * d, h),
            "o": (h, shape.num_heads * d),
            "gate_up": (2 * inner, h),
            "down": (h, inner),
        }
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)))
        for name in NORMS:
            self.register_parameter(name, nn.Parameter(torch.ones(h)))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, feature_scale: Tensor) -> None:
        """Random start. feature_scale: float [hidden_size], root mean square of the target's hidden states."""
        for name in MATRICES:
            matrix = getattr(self, name)
            matrix.normal_(0.0, matrix.shape[1] ** -0.5, generator=generator)
        self.o.zero_()  # both branches start silent: the first features are a mixture of the two inputs
        self.down.zero_()
        for name in NORMS:
            getattr(self, name).fill_(1.0)
        self.out_norm.copy_(feature_scale)

    def unroll(self, rows: Rows, steps: int) -> list[Tensor]:
        """Features of `steps` draft steps from every anchor: each float [batch, anchors - step, hidden_size].

        Step s of anchor a guesses the token s + 2 places behind the hidden state of a; its inputs are the embedding s
        columns further on and the feature of step s - 1.
        """
        context, columns = rows.context, rows.embeds.shape[1]
        embeds = self._norm(rows.embeds, self.embed_norm)
        x = self._mix(embeds, rows.hidden)
        q, k, v = self._project(x, torch.arange(columns, device=x.device))
        x, q = x[:, context:], q[:, context:]
        own: list[tuple[Tensor, Tensor]] = []  # keys and values that the head's own features made, by step
        features = [self._rest(x, self._attend(q, k, v, own, rows, 0))]
        for step in range(1, steps):
            anchors = columns - context - step
            x = self._mix(embeds[:, context + step :], features[-1][:, :anchors])
            q, new_k, new_v = self._project(x, torch.arange(context + step, columns, device=x.device))
            own = [(keys[:, :anchors], values[:, :anchors]) for keys, values in own] + [(new_k, new_v)]
            features.append(self._rest(x, self._attend(q, k, v, own, rows, step)))
        return features

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self.shape.rms_norm_eps)

    def _mix(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return F.linear(torch.cat((embeds, self._norm(hidden, self.hidden_norm)), -1), self.fc).float()

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [batch, n, heads, head_dim], k and v [batch, n, kv_heads, head_dim]; q and k rotated."""
        s = self.shape
        packed = F.linear(self._norm(x, self.input_norm), self.qkv)
        packed = packed.unflatten(-1, (s.num_heads + 2 * s.num_kv_heads, s.head_dim))
        q, k, v = packed.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=-2)
        exponents = torch.arange(0, s.head_dim, 2, device=x.device) / s.head_dim
        angles = positions[:, None] * s.rope_theta**-exponents
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, own: list[tuple[Tensor, Tensor]], rows: Rows, step: int
    ) -> Tensor:
        """Attention of the anchors' queries over the true rows up to the anchor and over their own chain."""
        s = self.shape
        batch, anchors = q.shape[:2]
        group = s.num_heads // s.num_kv_heads
        q = (q * s.head_dim**-0.5).view(batch, anchors, s.num_kv_heads, group, s.head_dim)
        scores = torch.einsum("bankd,bcnd->bnkac", q, k)
        seen = self._seen(rows, anchors, step)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        chain = [torch.einsum("bankd,band->bnka", q, keys)[..., None] for keys, _ in own]
        weights = torch.softmax(torch.cat([scores, *chain], -1), -1).to(v.dtype)
        columns = k.shape[1]
        mixed = torch.einsum("bnkac,bcnd->bankd", weights[..., :columns], v)
        for index, (_, values) in enumerate(own):
            mixed = mixed + torch.einsum("bnka,band->bankd", weights[..., columns + index], values)
        return mixed.reshape(batch, anchors, -1)

    def _seen(self, rows: Rows, anchors: int, step: int) -> Tensor:
        """Bool [batch, anchors, columns]: true rows that the query of each anchor's step may look at."""
        columns = torch.arange(rows.valid.shape[1], device=rows.valid.device)
        at = rows.context + torch.arange(anchors, device=columns.device)[:, None]
        return rows.valid[:, None] & ((columns <= at) & (columns > at + step - self.shape.window)) | (columns == at)

    def _rest(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + F.linear(mixed, self.o)
        gate, up = F.linear(self._norm(x, self.mlp_norm), self.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, self.down)
        return self._norm(x, self.out_norm)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
