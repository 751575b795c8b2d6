"""A standalone draft as an ordinary Hugging Face checkpoint: its settings, weights and tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save

from drafts.train.config import TrainConfig, TrainTarget
from drafts.train.fit import Example, FitConfig, HeadFit, micro_batches
from drafts.train.fitting import Ranks
from drafts.train.standalone import StandaloneFit, StandaloneModule, default_layers, draft_spec, padded, parse_layers
from edgespec.files import write_bytes, write_text

if TYPE_CHECKING:
    from drafts.base import Draft
    from drafts.train.kinds import Judged
    from edgespec.models.base import Decoder
    from edgespec.models.tokenizer import Tokenizer

_LEARNING_RATE = 0.002
_WHOLE = 1 << 20  # context: the whole prompt is read
_CHUNK = 256
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


class StandaloneRecipe:
    """Layers of the target as a small model; see `drafts.train.kinds.Recipe`."""

    dtype = "float16"

    def __init__(self, target: TrainTarget, config: TrainConfig) -> None:
        count = target.weights.spec.num_layers
        self.target, self.config = target, config
        self.layers = parse_layers(config.layers, count) if config.layers else default_layers(count)
        self._settings = draft_spec(target.weights.spec, self.layers)
        self._module: StandaloneModule | None = None

    def prepare(self, examples: Sequence[Example], updates: int, where: Ranks) -> HeadFit:
        config = self.config
        self._module = StandaloneModule(self.target.weights, self.layers, config.device)
        return StandaloneFit(
            where.share(examples),
            self._module,
            FitConfig(
                updates,
                max(1, config.tokens_per_update // where.world),
                config.learning_rate or _LEARNING_RATE,
                context=_WHOLE,
                seed=config.seed,
            ),
            token_count=min(self.target.tokenizer.size, self.target.weights.spec.vocab_size),
            dtype=getattr(torch, config.dtype),
            reduce_gradients=where.average,
        )

    @property
    def fitted(self) -> StandaloneModule:
        if self._module is None:
            raise RuntimeError("nothing was fitted yet")
        return self._module

    @torch.no_grad()
    def judged(self, held_out: Sequence[Example]) -> Judged:
        """At every position of the answers: while guesses are right, a chain of them sees the very same text."""
        module = self.fitted
        rows = module.head[: min(self.target.tokenizer.size, self.target.weights.spec.vocab_size)]
        for micro in micro_batches(list(held_out), _WHOLE):
            ids, guessing, labels, _ = padded(micro, module.embedding.device)
            features = module(ids)[guessing]
            for begin in range(0, len(features), _CHUNK):
                logits = F.linear(features[begin : begin + _CHUNK], rows)
                right = logits.argmax(-1) == labels[begin : begin + _CHUNK]
                yield logits.cpu().numpy(), right.cpu().numpy()

    def write(self, folder: Path) -> None:
        write_checkpoint(folder, self.fitted, self._settings, getattr(torch, self.dtype))
        write_tokenizer(folder, self.target.tokenizer, self.target.path)
        write_generation_config(folder, self.target)

    def draft(self, folder: Path, name: str, temperature: float, decoder: Decoder) -> Draft:
        from drafts.standalone import StandaloneDraft
        from edgespec.models.build import build_decoder
        from edgespec.models.tokenizer import load_tokenizer
        from edgespec.models.weights.opening import open_weights

        with open_weights(folder) as weights:
            small = weights.spec.head_dim % 16 != 0  # the CPU engine has no such heads
            built = build_decoder(weights, device="torch-cpu" if small else "cpu")
        return StandaloneDraft.for_target(name, built, load_tokenizer(folder), self.target.tokenizer)

    def architecture(self) -> dict[str, int | float]:
        spec = self.target.weights.spec
        return {
            "hidden_size": spec.hidden_size,
            "num_layers": len(self.layers),
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "intermediate_size": spec.intermediate_size,
        }


def write_checkpoint(folder: Path, module: StandaloneModule, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """config.json and model.safetensors. Raises OSError."""
    tensors = {name: value.to("cpu", dtype).contiguous() for name, value in module.named().items()}
    write_bytes(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    text = json.dumps({**settings, "dtype": str(dtype).removeprefix("torch.")}, indent=2)
    write_text(folder / "config.json", f"{text}\n")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, source: Path) -> None:
    """The tokenizer's files: copies where the target has them, else written from what was loaded. Raises OSError."""
    origin = source if source.is_dir() else source.parent
    if source.suffix.lower() != ".gguf" and (origin / "tokenizer.json").exists():
        for name in _TOKENIZER_FILES:
            if (origin / name).exists():
                shutil.copyfile(origin / name, folder / name)
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer-") as scratch:
        tokenizer.save(Path(scratch))
        os.replace(Path(scratch) / "tokenizer.json", folder / "tokenizer.json")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {**tokenizer.named_tokens, "add_bos_token": tokenizer.adds_bos}
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def write_generation_config(folder: Path, target: TrainTarget) -> None:
    """Where answers end, and that they are greedy unless asked otherwise."""
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": sorted(target.eos_ids)}
    if target.tokenizer.bos_id is not None:
        settings["bos_token_id"] = target.tokenizer.bos_id
    write_text(folder / "generation_config.json", json.dumps(settings, indent=2) + "\n")
