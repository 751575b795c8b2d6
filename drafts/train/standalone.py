"""Standalone drafts: some of the target's own layers, fitted to its answers, as a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafts.train.errors import TrainingError
from drafts.train.fit import Example, FitConfig, HeadFit
from edgespec.models.reference.layers import rms_norm, rotate
from edgespec.models.rope import rotary_tables
from edgespec.models.spec import ModelSpec
from edgespec.models.weights.opening import WeightFile

_CHUNK = 256  # positions whose logits over the whole vocabulary are held at once

Rotary = tuple[Tensor, Tensor]


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """ "0,1,-2,-1": indices of a target's layers, ascending. TrainingError for what is no such list."""
    try:
        chosen = [int(part) for part in text.split(",")]
    except ValueError:
        raise TrainingError(f"--layers {text!r}: give whole numbers separated by commas, such as 0,1,-2,-1.") from None
    layers = [layer + count if layer < 0 else layer for layer in chosen]
    if layers != sorted(set(layers)) or not all(0 <= layer < count for layer in layers):
        raise TrainingError(f"--layers {text!r}: give different layers of 0..{count - 1} in ascending order.")
    return tuple(layers)


def default_layers(count: int) -> tuple[int, ...]:
    """The first two and the last two; all of a target that has no more."""
    return tuple(sorted({0, min(1, count - 1), max(0, count - 2), count - 1}))


class StandaloneModule(nn.Module):
    """Layers of a decoder-only transformer over padded batches. Embedding and LM head are the target's and stay.

    Parameters are named as in a checkpoint ("model.layers.0.self_attn.q_proj.weight"), layers numbered anew.
    """

    def __init__(self, weights: WeightFile, layers: Sequence[int], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.target, self.layers = weights.spec, tuple(layers)
        self.windows = tuple((self.target.windows or (None,) * self.target.num_layers)[layer] for layer in layers)
        names = {"model.norm.weight": "model.norm.weight"}
        for place, layer in enumerate(layers):
            prefix = f"model.layers.{layer}."
            names |= {
                f"model.layers.{place}.{name.removeprefix(prefix)}": name
                for name in weights.names()
                if name.startswith(prefix)
            }
        tensors = {new: nn.Parameter(_read(weights, old, device)) for new, old in names.items()}
        self.tensors = nn.ParameterDict({name.replace(".", "/"): value for name, value in tensors.items()})
        self.embedding = _read(weights, "model.embed_tokens.weight", device)
        self.head = self.embedding if self.target.tie_embeddings else _read(weights, "lm_head.weight", device)

    def tensor(self, name: str) -> Tensor | None:
        key = name.replace(".", "/")
        return self.tensors[key] if key in self.tensors else None  # noqa: SIM401 - it has no typed `get`

    def named(self) -> dict[str, Tensor]:
        """Every tensor of the checkpoint by its name there."""
        named = {name.replace("/", "."): value.detach() for name, value in self.tensors.items()}
        named["model.embed_tokens.weight"] = self.embedding
        return named if self.target.tie_embeddings else named | {"lm_head.weight": self.head}

    def forward(self, ids: Tensor) -> Tensor:
        """Final hidden states, float [batch, columns, hidden_size], of ids int64 [batch, columns], padded right."""
        columns, epsilon = ids.shape[1], self.target.rms_norm_eps
        cos, sin = (torch.from_numpy(table).to(ids.device)[:, None] for table in rotary_tables(self.target, columns))
        masks = {window: _mask(columns, window, ids.device) for window in set(self.windows)}
        x = F.embedding(ids, self.embedding)
        for place, window in enumerate(self.windows):
            prefix = f"model.layers.{place}."
            normed = self._norm(x, f"{prefix}input_layernorm.weight")
            x = x + self._attention(normed, f"{prefix}self_attn.", (cos, sin), masks[window])
            normed = self._norm(x, f"{prefix}post_attention_layernorm.weight")
            gate, up = (self._linear(normed, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"{prefix}mlp.down_proj")
        return rms_norm(x.float(), self.tensors["model/norm/weight"], epsilon)

    def _attention(self, x: Tensor, prefix: str, rotary: Rotary, mask: Tensor) -> Tensor:
        width = self.target.head_dim
        q, k, v = (self._linear(x, f"{prefix}{name}_proj").unflatten(-1, (-1, width)) for name in "qkv")
        if self.target.qk_norm:
            q, k = self._norm(q, f"{prefix}q_norm.weight"), self._norm(k, f"{prefix}k_norm.weight")
        q, k = rotate(q, *rotary).to(v.dtype), rotate(k, *rotary).to(v.dtype)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self._linear(mixed.transpose(1, 2).flatten(2), f"{prefix}o_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x.float(), self.tensors[name.replace(".", "/")], self.target.rms_norm_eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.tensor(f"{name}.bias")
        return F.linear(x, self.tensors[f"{name}.weight".replace(".", "/")], bias)


def draft_spec(target: ModelSpec, layers: Sequence[int]) -> dict[str, Any]:
    """config.json of a model made of these layers of `target`. TrainingError for what that file cannot say."""
    if target.rope.kind == "factors":
        raise TrainingError(
            "this target's GGUF file scales its rotary embedding by a table, which config.json cannot say; "
            "train the standalone draft from the original safetensors checkpoint."
        )
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config: dict[str, Any] = {
        "architectures": [f"{names[target.architecture]}ForCausalLM"],
        "model_type": target.architecture,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": target.tie_embeddings,
        "attention_dropout": 0.0,
    }
    if target.bos_token_id is not None:
        config["bos_token_id"] = target.bos_token_id
    if target.eos_token_ids:
        ids = list(target.eos_token_ids)
        config["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    if target.architecture in ("llama", "qwen3"):
        config["attention_bias"] = target.output_bias
    if target.architecture == "llama":
        config["mlp_bias"] = target.mlp_bias
    return config | _rope(target) | _windows(target, layers)


def _rope(target: ModelSpec) -> dict[str, Any]:
    rope = target.rope
    if rope.kind == "default":
        return {}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            if getattr(rope, name) is not None:
                scaling[name] = getattr(rope, name)
    if rope.original_max_positions is not None:
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    return {"rope_scaling": scaling}


def _windows(target: ModelSpec, layers: Sequence[int]) -> dict[str, Any]:
    windows = [(target.windows or (None,) * target.num_layers)[layer] for layer in layers]
    widest = max((window for window in windows if window is not None), default=None)
    if target.architecture == "mistral":
        return {"sliding_window": widest}
    if target.architecture == "llama" or widest is None:
        return {}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"use_sliding_window": True, "sliding_window": widest, "max_window_layers": 0, "layer_types": kinds}


class StandaloneFit(HeadFit):
    """The loop of `HeadFit` with another model: every position of an answer guesses its token, from the whole text."""

    module: StandaloneModule  # type: ignore[assignment]

    def __init__(
        self,
        examples: Sequence[Example],
        module: StandaloneModule,
        config: FitConfig,
        *,
        token_count: int,
        dtype: torch.dtype = torch.bfloat16,
        reduce_gradients: Callable[[Any], None] = lambda module: None,
    ) -> None:
        self.examples = [example for example in examples if example.anchors > 0]
        self.config, self.dtype, self.module = config, dtype, module
        self.device = module.embedding.device
        self._rows = module.head[:token_count].to(dtype)
        self._reduce = reduce_gradients
        matrices = [value for value in module.tensors.values() if value.ndim == 2]
        others = [value for value in module.tensors.values() if value.ndim < 2]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.update = 0

    def _loss(self, micro: list[Example], steps: int, generator: torch.Generator) -> tuple[Tensor, float, float]:
        """As `HeadFit._loss`. Logits over the whole vocabulary are large, so only their gradient is kept."""
        ids, guessing, labels, teacher = padded(micro, self.device)
        with self.autocast():
            features = self.module(ids)[guessing]
        cut = features.detach().requires_grad_()
        loss, hits = 0.0, 0.0
        for begin in range(0, len(cut), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            one, right = self._chunk_loss(cut[part].to(self.dtype), teacher[part].to(self.dtype), labels[part])
            one.backward()
            loss, hits = loss + float(one.detach()), hits + right
        # A sum whose gradient is that of the loss, and whose value is the loss.
        carrier = (features * cut.grad).sum()
        return carrier - carrier.detach() + loss, hits, float(len(labels))

    def _chunk_loss(self, features: Tensor, teacher: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        """Cross-entropy to the text and to the target's distribution, mixed; and how many guesses are the text."""
        with torch.no_grad():
            chances = torch.softmax(F.linear(teacher, self._rows).float(), -1)
        logs = torch.log_softmax(F.linear(features, self._rows).float(), -1)
        hard = F.nll_loss(logs, labels, reduction="sum")
        soft = -(chances * logs).sum()
        right = float((logs.detach().argmax(-1) == labels).sum())
        return (1 - self.config.soft) * hard + self.config.soft * soft, right


def padded(micro: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids int64 [batch, columns] (without each text's last token); which of them guess; labels and teacher [n]."""
    columns = max(len(e.tokens) for e in micro) - 1
    ids = np.zeros((len(micro), columns), np.int64)
    guessing = np.zeros((len(micro), columns), bool)
    for row, e in enumerate(micro):
        ids[row, : len(e.tokens) - 1] = e.tokens[:-1]
        guessing[row, e.answer_start - 1 : len(e.tokens) - 1] = True
    labels = np.concatenate([e.tokens[e.answer_start :] for e in micro]).astype(np.int64)
    teacher = np.concatenate([e.hidden[e.answer_start - 1 - e.first_hidden :] for e in micro])
    tensors = [torch.from_numpy(array).to(device) for array in (ids, guessing, labels, teacher)]
    return tensors[0], tensors[1], tensors[2], tensors[3]


def _read(weights: WeightFile, name: str, device: torch.device | str) -> Tensor:
    return torch.from_numpy(weights.read(name)).to(device)


def _mask(columns: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [columns, columns]: what each position may look at."""
    at = torch.arange(columns, device=device)
    seen = at[None] <= at[:, None]
    return seen if window is None else seen & (at[None] > at[:, None] - window)
