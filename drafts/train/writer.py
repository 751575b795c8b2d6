"""The target answers many prompts at once: a batched decoder in torch with continuous batching.

Not an engine: texts are training data, so the last bits may differ from the engine that ships (see docs/drafts.md for
how little that matters). bfloat16 products, float32 keys, values and scores on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.models.reference.layers import LayerWeights, WeightReader, hidden_keys, rms_norm, rotate
from edgespec.models.rope import rotary_tables
from edgespec.models.weights.opening import WeightFile

TOP_K = 50  # sampled answers choose among this many
_PREFILL_TOKENS = 2048  # padded tokens of one prefill pass

Hidden = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer. temperature 0 is greedy; `seed` makes a sampled answer repeatable."""

    key: str
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """An answer with the target's final hidden states (after the norm): float16 [n, hidden_size].

    hidden: of the last `window` prompt tokens and of all answer tokens but the last: what each answer token was chosen
    from. answer: ids, the end token included if there was one.
    """

    request: Request
    answer: list[int]
    hidden: Hidden


@dataclass(slots=True)
class _Slot:
    request: Request
    draws: npt.NDArray[np.float64] | None
    answer: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    def done(self, eos_ids: frozenset[int]) -> bool:
        return len(self.answer) >= self.request.max_new_tokens or self.answer[-1] in eos_ids


class BatchWriter:
    """Answers requests with one target, `batch` at a time.

    window: prompt positions whose hidden states are kept. positions: of the longest prompt with its answer.
    """

    def __init__(
        self,
        weights: WeightFile,
        *,
        eos_ids: Sequence[int],
        token_count: int,
        batch: int = 96,
        positions: int = 1024,
        window: int = 256,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.spec = spec = weights.spec
        self.positions = min(positions, spec.max_positions)
        self._device, self._dtype = torch.device(device), dtype
        self._eos = frozenset((*eos_ids, *spec.eos_token_ids))
        self._token_count = min(token_count, spec.vocab_size)
        self._batch, self._window = batch, window
        reader = WeightReader(weights, self._device, dtype)
        self._embedding = reader.tensor("model.embed_tokens.weight")
        self._layers: list[LayerWeights] = [reader.layer(spec, i) for i in range(spec.num_layers)]
        self._norm = reader.tensor("model.norm.weight")
        self._head = self._embedding if spec.tie_embeddings else reader.tensor("lm_head.weight")
        cos, sin = rotary_tables(spec, self.positions + 1)
        self._cos, self._sin = torch.from_numpy(cos).to(self._device), torch.from_numpy(sin).to(self._device)
        # Scores of bfloat16 keys are slow on CPUs: their products repack the keys at every step.
        self._cache_dtype = torch.float32 if self._device.type == "cpu" else dtype

    @torch.inference_mode()
    def write(
        self, requests: Sequence[Request], progress: Callable[[int], None] = lambda tokens: None
    ) -> Iterator[Written]:
        """Yield answers as they end, in no particular order. Prompts and answers must fit `positions` (ValueError)."""
        for request in requests:
            if len(request.prompt) + request.max_new_tokens > self.positions:
                raise ValueError(f"{request.key}: {len(request.prompt)} + {request.max_new_tokens} tokens do not fit")
        waiting = sorted(requests, key=lambda r: (len(r.prompt) + r.max_new_tokens, r.key), reverse=True)
        keys, values = self._caches(min(self._batch, len(waiting)), waiting)
        slots: list[_Slot | None] = [None] * len(keys[0])
        while waiting or any(slots):
            empty = [i for i, slot in enumerate(slots) if slot is None]
            if waiting and (len(empty) >= min(8, len(slots)) or not any(slots)):
                filled = [waiting.pop() for _ in empty[: len(waiting)]]
                yield from self._prefill(filled, empty, slots, keys, values)
            elif not waiting and len(empty) > len(slots) // 2:
                kept = [i for i, slot in enumerate(slots) if slot is not None]
                keys, values = [k[kept] for k in keys], [v[kept] for v in values]
                slots = [slots[i] for i in kept]
            yield from self._step(slots, keys, values)
            progress(sum(slot is not None for slot in slots))

    def _caches(self, batch: int, requests: Sequence[Request]) -> tuple[list[Tensor], list[Tensor]]:
        spec = self.spec
        longest = max((len(r.prompt) + r.max_new_tokens for r in requests), default=1)
        # Keys lie with positions last: scores then read them in order (half the time on CPUs).
        shapes = (batch, spec.num_kv_heads, spec.head_dim, longest), (batch, spec.num_kv_heads, longest, spec.head_dim)
        make = [[torch.zeros(s, dtype=self._cache_dtype, device=self._device) for _ in self._layers] for s in shapes]
        return make[0], make[1]

    def _prefill(
        self,
        requests: list[Request],
        empty: list[int],
        slots: list[_Slot | None],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Iterator[Written]:
        """Run prompts of similar length together, padded on the right: what pads is masked, later overwritten."""
        begin = 0
        while begin < len(requests):
            count = 1
            while (
                begin + count < len(requests) and (count + 1) * len(requests[begin + count].prompt) <= _PREFILL_TOKENS
            ):
                count += 1
            group, places = requests[begin : begin + count], empty[begin : begin + count]
            lengths = torch.tensor([len(r.prompt) for r in group], device=self._device)
            longest = int(lengths.max())
            ids = torch.tensor([r.prompt + [0] * (longest - len(r.prompt)) for r in group], device=self._device)
            states = self._prompt_states(ids, torch.tensor(places, device=self._device), keys, values)
            last = states[torch.arange(count, device=self._device), lengths - 1]
            logits = F.linear(last, self._head)
            for row, (request, place) in enumerate(zip(group, places)):
                n = len(request.prompt)
                draws = np.random.default_rng([request.seed, *request.key.encode()]).random(request.max_new_tokens)
                slot = slots[place] = _Slot(request, draws if request.temperature > 0 else None)
                slot.hidden.append(states[row, max(0, n - self._window) : n].to(torch.float16))
            yield from self._choose(slots, places, logits, None)
            begin += count

    def _prompt_states(self, ids: Tensor, places: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Final hidden states [prompts, tokens, hidden_size]; keys and values go to the slots `places`."""
        spec, (count, length) = self.spec, ids.shape
        cos, sin = self._cos[:length, None], self._sin[:length, None]
        x = F.embedding(ids, self._embedding)
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(rms_norm(x, layer.input_norm, spec.rms_norm_eps), layer, cos, sin)
            keys[index][places, :, :, :length] = k.permute(0, 2, 3, 1).to(self._cache_dtype)
            values[index][places, :, :length] = v.transpose(1, 2).to(self._cache_dtype)
            mask, causal = self._window_mask(length, spec.windows[index] if spec.windows else None)
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=mask,
                is_causal=causal,
                enable_gqa=True,
            )
            x = self._rest(x, mixed.transpose(1, 2).reshape(count, length, -1), layer)
        return rms_norm(x, self._norm, spec.rms_norm_eps)

    def _window_mask(self, length: int, window: int | None) -> tuple[Tensor | None, bool]:
        if window is None or window >= length:
            return None, True
        return ~hidden_keys(torch.arange(length, device=self._device), length, window), False

    def _project(self, x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [..., heads, head_dim] of normed x [..., hidden_size], rotated."""
        spec = self.spec
        heads, kv = spec.num_heads, spec.num_kv_heads
        packed = F.linear(x, layer.qkv, layer.qkv_bias).unflatten(-1, (heads + 2 * kv, spec.head_dim))
        q, k, v = packed.split([heads, kv, kv], dim=-2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, spec.rms_norm_eps), rms_norm(k, layer.k_norm, spec.rms_norm_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _rest(self, x: Tensor, mixed: Tensor, layer: LayerWeights) -> Tensor:
        """What follows attention in a layer: output projection and MLP, with their residuals."""
        x = x + F.linear(mixed, layer.output, layer.output_bias)
        normed = rms_norm(x, layer.mlp_norm, self.spec.rms_norm_eps)
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _step(self, slots: list[_Slot | None], keys: list[Tensor], values: list[Tensor]) -> Iterator[Written]:
        """One more token for every slot (empty ones compute nothing that is looked at)."""
        places = [i for i, slot in enumerate(slots) if slot is not None]
        if not places:
            return
        ids = torch.tensor([slot.answer[-1] if slot else 0 for slot in slots], device=self._device)
        at = [len(slot.request.prompt) + len(slot.answer) - 1 if slot else 0 for slot in slots]
        states = self._token_states(ids, torch.tensor(at, device=self._device), max(at) + 1, keys, values)
        logits = F.linear(states, self._head)
        yield from self._choose(slots, places, logits[places] if len(places) < len(slots) else logits, states)

    def _token_states(self, ids: Tensor, at: Tensor, span: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Final hidden states [slots, hidden_size] of one new token per slot at position `at`."""
        spec, count = self.spec, len(ids)
        rows = torch.arange(count, device=self._device)
        cos, sin = self._cos[at][:, None], self._sin[at][:, None]
        group, kv, width = spec.num_heads // spec.num_kv_heads, spec.num_kv_heads, spec.head_dim
        x = F.embedding(ids, self._embedding)
        biases = {
            window: torch.zeros(count, 1, 1, span, dtype=self._cache_dtype, device=self._device).masked_fill_(
                hidden_keys(at, span, window)[:, None, None], float("-inf")
            )
            for window in set(spec.windows or (None,))
        }
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(rms_norm(x, layer.input_norm, spec.rms_norm_eps), layer, cos, sin)
            keys[index][rows, :, :, at] = k.to(self._cache_dtype)
            values[index][rows, :, at] = v.to(self._cache_dtype)
            known = keys[index].flatten(0, 1)[:, :, :span], values[index].flatten(0, 1)[:, :span]
            q = q.reshape(count * kv, group, width).to(self._cache_dtype)
            scores = torch.bmm(q, known[0]).mul_(width**-0.5).view(count, kv, group, span)
            scores += biases[spec.windows[index] if spec.windows else None]
            mixed = torch.bmm(torch.softmax(scores, -1).view(count * kv, group, span), known[1])
            x = self._rest(x, mixed.view(count, -1).to(self._dtype), layer)
        return rms_norm(x, self._norm, spec.rms_norm_eps)

    def _choose(
        self, slots: list[_Slot | None], places: list[int], logits: Tensor, states: Tensor | None
    ) -> Iterator[Written]:
        """Append the next token to each slot; yield and empty those that end. states: of the tokens just run."""
        logits = logits[:, : self._token_count].float()
        best = logits.argmax(-1).tolist()
        kept = None if states is None else states.to(torch.float16)
        for row, place in enumerate(places):
            slot = slots[place]
            assert slot is not None
            if kept is not None:
                slot.hidden.append(kept[place])
            token = best[row]
            if slot.draws is not None:
                token = _draw(logits[row], slot.request.temperature, slot.draws[len(slot.answer)])
            slot.answer.append(token)
            if slot.done(self._eos):
                slots[place] = None
                hidden = torch.cat([part.view(-1, part.shape[-1]) for part in slot.hidden])
                yield Written(slot.request, slot.answer, hidden.cpu().numpy())


def _draw(logits: Tensor, temperature: float, uniform: float) -> int:
    """A token of the TOP_K likeliest, by inverting their distribution at `uniform`."""
    values, ids = torch.topk(logits, min(TOP_K, len(logits)))
    chances = torch.softmax(values.double() / temperature, -1).cumsum(-1)
    return int(ids[min(int(torch.searchsorted(chances, uniform)), len(ids) - 1)])
