"""Fitting a head draft to the target's answers: cross-entropy to the target's choice and to its distribution.

Every update takes whole answers until `tokens_per_update` positions are reached. Matrices are updated by Muon
(orthogonalised momentum), norms by AdamW. Everything random comes from the seed and the number of the update, so a run
that was interrupted goes on to the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from drafts.train.module import MATRICES, NORMS, HeadModule, HeadShape, Rows

_WARM_UP = 0.03  # share of the updates
_MICRO_TOKENS = 3072  # padded columns of one pass


@dataclass(frozen=True, slots=True)
class Example:
    """One answer. tokens: int32 [n], prompt and answer; answer_start: where the answer begins.

    hidden: float16 [m, hidden_size], the target's final states at the positions first_hidden .. n - 2.
    """

    tokens: npt.NDArray[np.int32]
    answer_start: int
    hidden: npt.NDArray[np.float16]

    @property
    def first_hidden(self) -> int:
        return len(self.tokens) - 1 - len(self.hidden)

    @property
    def anchors(self) -> int:
        """Positions from which a token of the answer is guessed: the first comes from the prefill."""
        return len(self.tokens) - 1 - self.answer_start


@dataclass(frozen=True, slots=True)
class FitConfig:
    """How a head is fitted. steps: draft steps trained at last (1, then 2, then `steps`)."""

    updates: int
    tokens_per_update: int = 3000
    learning_rate: float = 0.01
    steps: int = 3
    step_weight: float = 0.8
    soft: float = 0.5
    noise: float = 0.05
    context: int = 128
    decay_from: float = 0.3
    seed: int = 0


class Diverged(Exception):
    """The loss is no number any more."""


class HeadFit:
    """A head being fitted. `run` does the updates that are left; state can be saved and loaded in between.

    vocab: int64 [V] ids the head may guess, ascending; embedding, head: float32 [vocab, hidden_size] of the target.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        shape: HeadShape,
        config: FitConfig,
        *,
        vocab: npt.NDArray[np.int64],
        embedding: Tensor,
        head_rows: Tensor,
        start: dict[str, Tensor] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        reduce_gradients: Callable[[HeadModule], None] = lambda module: None,
    ) -> None:
        self.examples = [example for example in examples if example.anchors > 1]
        self.config, self.dtype = config, dtype
        self.device = embedding.device
        self.vocab = torch.from_numpy(vocab).to(self.device)
        self._place = torch.full((len(embedding),), -1, dtype=torch.int64, device=self.device)
        self._place[self.vocab] = torch.arange(len(vocab), device=self.device)
        self._embedding, self._rows = embedding, head_rows.to(dtype)
        self._reduce = reduce_gradients
        self.module = HeadModule(shape).to(self.device)
        if start is None:
            self.module.initialise(torch.Generator().manual_seed(config.seed), self._feature_scale())
        else:
            self.module.load_state_dict(start)
        matrices = [getattr(self.module, name) for name in MATRICES]
        norms = [getattr(self.module, name) for name in NORMS]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(norms, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.update = 0

    def _feature_scale(self) -> Tensor:
        picked = np.concatenate([e.hidden[:: max(1, len(e.hidden) // 8)] for e in self.examples[:256]]).astype(
            np.float32
        )
        return torch.from_numpy(np.sqrt((picked**2).mean(0))).to(self.device)

    def run(
        self, progress: Callable[[dict[str, float]], None] = lambda seen: None, *, until: int | None = None
    ) -> None:
        """Do the updates up to `until` (default: all). `progress` gets update, loss and first-token accuracy."""
        groups = self._groups()
        for number, group in enumerate(groups):
            if number < self.update:
                continue
            if number >= (self.config.updates if until is None else until):
                return
            progress(self._one(number, group))
            self.update = number + 1

    def _groups(self) -> Iterator[list[Example]]:
        """The examples of each update, epoch after epoch, each in an order of its own."""
        epoch = 0
        group: list[Example] = []
        while True:
            order = np.random.default_rng([self.config.seed, epoch]).permutation(len(self.examples))
            for index in order:
                group.append(self.examples[index])
                if sum(e.anchors for e in group) >= self.config.tokens_per_update:
                    yield group
                    group = []
            epoch += 1

    def _one(self, number: int, group: list[Example]) -> dict[str, float]:
        config, share = self.config, number / self.config.updates
        steps = min(config.steps, 1 + int(share >= 0.3) + int(share >= 0.5) * (config.steps - 2))
        rate = min(1.0, (number + 1) / max(1.0, _WARM_UP * config.updates), (1 - share) / (1 - config.decay_from))
        for optimizer in self.optimizers:
            for settings in optimizer.param_groups:
                settings["lr"] = config.learning_rate * rate
            optimizer.zero_grad(set_to_none=True)
        generator = torch.Generator(self.device).manual_seed(config.seed * 1_000_003 + number)
        total = sum(e.anchors for e in group)
        loss_sum, hits, tried = 0.0, 0.0, 0.0
        for micro in micro_batches(group, config.context):
            loss, hit, count = self._loss(micro, steps, generator)
            (loss / total).backward()
            loss_sum, hits, tried = loss_sum + float(loss.detach()), hits + hit, tried + count
        if not math.isfinite(loss_sum):
            raise Diverged(f"the loss is {loss_sum} at update {number}")
        self._reduce(self.module)
        for optimizer in self.optimizers:
            optimizer.step()
        return {"update": number + 1, "loss": loss_sum / total, "accuracy": hits / max(1.0, tried), "tokens": total}

    def _loss(self, micro: list[Example], steps: int, generator: torch.Generator) -> tuple[Tensor, float, float]:
        """Summed loss of a batch of answers; hits and tries of the first step."""
        config = self.config
        rows, labels, teacher = self.batch(micro)
        noise = torch.randn(rows.hidden.shape, generator=generator, device=self.device) * config.noise
        scale = rows.hidden.pow(2).mean(-1, keepdim=True).sqrt()
        rows = Rows(rows.embeds, rows.hidden + noise * scale, rows.valid, rows.context)
        total: Any = 0.0
        first = (0.0, 0.0)
        wanted, best = self._wanted(teacher)
        with self.autocast():
            for step, feature in enumerate(self.module.unroll(rows, steps)):
                kept = labels[:, step:] >= 0
                logits = F.linear(feature[kept], self._rows)
                laws = wanted[:, step:][kept], best[:, step:][kept]
                loss: Tensor = _CrossEntropy.apply(logits, *laws)  # type: ignore[no-untyped-call]
                total = total + config.step_weight**step * loss
                if step == 0:
                    first = (float((logits.argmax(-1) == laws[1]).sum()), float(len(logits)))
        return total, *first

    @torch.no_grad()
    def _wanted(self, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """What each anchor's token should look like: [batch, anchors, V], a mixture of the target's law and its
        likeliest token; and that token's place [batch, anchors]."""
        chances = torch.softmax(F.linear(teacher, self._rows), -1)
        best = chances.argmax(-1)
        chances.mul_(self.config.soft)
        return chances.scatter_add_(-1, best[..., None], torch.full_like(chances[..., :1], 1 - self.config.soft)), best

    def batch(self, micro: list[Example], context: int | None = None) -> tuple[Rows, Tensor, Tensor]:
        """Padded rows; labels int64 [batch, anchors], places in the vocabulary (-1 = none); teacher states."""
        context = self.config.context if context is None else context
        before = max(min(context, e.answer_start - 1 - e.first_hidden) for e in micro)
        after = max(e.anchors for e in micro)
        size = self._embedding.shape[1]
        ids = np.zeros((len(micro), before + after), np.int64)
        hidden = np.zeros((len(micro), before + after, size), np.float16)
        teacher = np.zeros((len(micro), after, size), np.float16)
        labels = np.full((len(micro), after), -1, np.int64)
        valid = np.zeros((len(micro), before + after), bool)
        for row, e in enumerate(micro):
            first = max(e.first_hidden, e.answer_start - 1 - before)
            count = len(e.tokens) - 1 - first  # rows first .. n - 2, the last of them guesses beyond the end
            begin = before - (e.answer_start - 1 - first)
            end = min(begin + count, before + after)
            span = end - begin
            ids[row, begin:end] = e.tokens[first + 1 : first + 1 + span]
            hidden[row, begin:end] = e.hidden[first - e.first_hidden :][:span]
            valid[row, begin:end] = True
            guessed = e.tokens[e.answer_start + 1 :]
            labels[row, : len(guessed)] = guessed
            teacher[row, : len(guessed)] = e.hidden[e.answer_start - e.first_hidden :][: len(guessed)]
        places = torch.from_numpy(labels).to(self.device)
        places = torch.where(places >= 0, self._place[places.clamp(min=0)], -1)
        rows = Rows(
            F.embedding(torch.from_numpy(ids).to(self.device), self._embedding),
            torch.from_numpy(hidden).to(self.device).float(),
            torch.from_numpy(valid).to(self.device),
            before,
        )
        return rows, places, torch.from_numpy(teacher).to(self.device, self.dtype)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, self.dtype) if self.dtype != torch.float32 else nullcontext()

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer state as flat named tensors, for `load`."""
        tensors = {f"weight.{name}": value.detach().clone() for name, value in self.module.state_dict().items()}
        for place, optimizer in enumerate(self.optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                for key, value in values.items():
                    tensors[f"optimizer.{place}.{index}.{key}"] = torch.as_tensor(value).detach().clone()
        tensors["update"] = torch.tensor(self.update)
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        prefix = "weight."
        self.module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        for place, optimizer in enumerate(self.optimizers):
            saved: dict[int, dict[str, Tensor]] = {}
            for name, value in tensors.items():
                if name.startswith(f"optimizer.{place}."):
                    _, _, index, key = name.split(".", 3)
                    saved.setdefault(int(index), {})[key] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": saved})
        self.update = int(tensors["update"])


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits [n, V] to laws `wanted` [n, V]: its gradient exactly, in one pass over the big arrays.

    The value is only reported: the summed negative log-likelihood of `best` [n], the likeliest token of each law.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, best: Tensor) -> Tensor:
        chances = torch.softmax(logits, -1)
        loss = -chances.gather(-1, best[:, None]).float().clamp_min(1e-30).log().sum()
        ctx.save_for_backward(chances.sub_(wanted))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None


def micro_batches(group: list[Example], context: int) -> Iterator[list[Example]]:
    """Answers of similar length together, at most `_MICRO_TOKENS` padded columns at once."""
    batch: list[Example] = []
    widest = 0
    for example in sorted(group, key=lambda e: (len(e.hidden), len(e.tokens), int(e.tokens[-1]))):
        width = example.anchors + min(context, len(example.hidden))
        if batch and max(widest, width) * (len(batch) + 1) > _MICRO_TOKENS:
            yield batch
            batch, widest = [], 0
        batch.append(example)
        widest = max(widest, width)
    if batch:
        yield batch
