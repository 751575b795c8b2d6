"""What differs between the kinds of draft: the model that is fitted, how its guesses are judged, its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from drafts.head import FILE_NAME, HeadFile, HeadSpec, HeadWeights, write_head_file
from drafts.train.config import TrainConfig, TrainTarget, read_start
from drafts.train.errors import TrainingError
from drafts.train.fit import Example, FitConfig, HeadFit, micro_batches
from drafts.train.fitting import Ranks
from drafts.train.measure import GAMMA, check_hidden
from drafts.train.module import MATRICES, NORMS, HeadModule, HeadShape
from drafts.train.phrases import PhraseRecipe
from edgespec.errors import DraftError

if TYPE_CHECKING:
    from drafts.base import Draft
    from edgespec.models.base import Decoder

Judged = Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]]

# Learning rates that worked; for a fit from random weights, and for one that goes on from something fitted.
_FRESH, _GOING_ON, _LAYERS = 0.01, 0.004, 0.002


class Product(Protocol):
    """What a training makes, when it is done."""

    dtype: str

    def write(self, folder: Path) -> None:
        """Write the draft's files. Raises OSError."""

    def draft(self, folder: Path, name: str, temperature: float, decoder: Decoder) -> Draft:
        """The draft as the engine loads it."""

    def architecture(self) -> dict[str, int | float]:
        """The numbers for the manifest."""


class Recipe(Product, Protocol):
    """One kind of draft that is fitted: `prepare`, run the fit, then `judged` and `write`."""

    def prepare(self, examples: Sequence[Example], updates: int, where: Ranks) -> HeadFit:
        """The fit to run."""

    def judged(self, held_out: Sequence[Example]) -> Judged:
        """(logits float32 [n, V], whether the best one was accepted) of the fitted draft on held-out answers."""


def recipe_for(target: TrainTarget, config: TrainConfig, start: Path | None) -> Recipe | PhraseRecipe:
    """Checks everything that can be known before an hour of work: TrainingError says what is wrong."""
    if config.kind == "head":
        return HeadRecipe(target, config, start)
    if start is not None:
        raise TrainingError(
            "--from works for head drafts: a standalone draft starts from the target's own layers, phrases from none."
        )
    if config.kind == "phrases":
        return PhraseRecipe(target.weights.spec.vocab_size)
    from drafts.train.standalone_recipe import StandaloneRecipe

    return StandaloneRecipe(target, config)


def head_spec(target: TrainTarget, config: TrainConfig) -> HeadSpec:
    """The architecture of a head for this target: one of its own layers in size, 8-bit blocks permitting."""
    spec = target.weights.spec
    width = -(-spec.head_dim // 16) * 16
    try:
        return HeadSpec(
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=width,
            intermediate_size=-(-spec.intermediate_size // 32) * 32,
            vocab_rows=min(config.vocab, target.tokenizer.size, spec.vocab_size),
            window=config.window,
            rms_norm_eps=max(spec.rms_norm_eps, 1e-6),
        )
    except DraftError as error:
        raise TrainingError(
            f"{target.name}: no head fits this target: {error} Train a --kind standalone draft."
        ) from error


class HeadRecipe:
    """A head: one layer over the target's hidden states."""

    dtype = "int8"

    def __init__(self, target: TrainTarget, config: TrainConfig, start: Path | None) -> None:
        self.target, self.config = target, config
        self.spec = head_spec(target, config)
        self._start = None if start is None else starting_weights(start, self.spec, target)
        decoder = target.decoder(16)
        try:
            check_hidden(decoder, target.name)
        finally:
            decoder.close()
        self._fit: HeadFit | None = None
        self._shipped: HeadWeights | None = None

    def prepare(self, examples: Sequence[Example], updates: int, where: Ranks) -> HeadFit:
        config, spec, weights = self.config, self.spec, self.target.weights
        device = torch.device(config.device)
        embedding = torch.from_numpy(weights.read("model.embed_tokens.weight")).to(device)
        tied = weights.spec.tie_embeddings
        head = embedding if tied else torch.from_numpy(weights.read("lm_head.weight")).to(device)
        vocab = reduced_vocabulary(examples, spec.vocab_rows, min(self.target.tokenizer.size, weights.spec.vocab_size))
        shape = HeadShape(**{name: getattr(spec, name) for name in HeadShape.__dataclass_fields__})
        self._fit = HeadFit(
            where.share(examples),
            shape,
            FitConfig(
                updates,
                max(1, config.tokens_per_update // where.world),
                config.learning_rate or (_FRESH if self._start is None else _GOING_ON),
                seed=config.seed,
            ),
            vocab=vocab,
            embedding=embedding,
            head_rows=head[torch.from_numpy(vocab).to(device)],
            start=self._start,
            dtype=getattr(torch, config.dtype),
            reduce_gradients=where.average,
        )
        return self._fit

    @property
    def fitted(self) -> HeadFit:
        if self._fit is None:
            raise RuntimeError("nothing was fitted yet")
        return self._fit

    def shipped(self) -> HeadWeights:
        """The fitted weights in 8-bit blocks."""
        if self._shipped is None:
            fit = self.fitted
            tensors = {n: v.detach().cpu().float().numpy() for n, v in fit.module.state_dict().items()}
            self._shipped = HeadWeights.quantised(self.spec, {**tensors, "vocab": fit.vocab.cpu().numpy()})
        return self._shipped

    @torch.no_grad()
    def judged(self, held_out: Sequence[Example]) -> Judged:
        """Of every anchor's chain of guesses those that a round would have come to: all before them were right."""
        fit = self.fitted
        module = HeadModule(fit.module.shape).to(fit.device)
        module.load_state_dict(to_module(self.shipped()))
        rows_of_head = fit._rows.float()
        for micro in micro_batches(list(held_out), self.spec.window):
            rows, labels, _ = fit.batch(micro, self.spec.window)
            lengths = torch.tensor([e.anchors for e in micro], device=fit.device)
            alive = torch.arange(labels.shape[1], device=fit.device) < lengths[:, None]
            for step, feature in enumerate(module.unroll(rows, min(GAMMA, labels.shape[1]))):
                anchors = labels.shape[1] - step
                exists = torch.arange(anchors, device=fit.device) + step < lengths[:, None]
                reached = alive[:, :anchors] & exists
                logits = F.linear(feature[reached], rows_of_head)
                right = logits.argmax(-1) == labels[:, step:][reached]
                yield logits.cpu().numpy(), right.cpu().numpy()
                alive = torch.zeros_like(reached).masked_scatter_(reached, right)

    def write(self, folder: Path) -> None:
        write_head_file(folder / FILE_NAME, self.shipped())

    def draft(self, folder: Path, name: str, temperature: float, decoder: Decoder) -> Draft:
        from drafts.head import HeadDraft

        weights = HeadFile.read(folder / FILE_NAME, self.spec)
        return HeadDraft(name, self.spec, weights, decoder, temperature=temperature)

    def architecture(self) -> dict[str, int | float]:
        return self.spec.to_mapping()


def reduced_vocabulary(examples: Sequence[Example], size: int, token_count: int) -> npt.NDArray[np.int64]:
    """Ids int64 [size], ascending: the most frequent tokens of the answers, then low ids (a BPE's frequent pieces)."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[example.answer_start :].tolist())
    ordered = [
        token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if token < token_count
    ]
    chosen = dict.fromkeys(ordered[:size])
    for token in range(token_count):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return np.array(sorted(chosen), np.int64)


def starting_weights(folder: Path, spec: HeadSpec, target: TrainTarget) -> dict[str, Tensor]:
    """The weights of the head in `folder` as float32. TrainingError unless it was made for this target and shape."""
    manifest = read_start(folder)
    if manifest.kind != "head":
        raise TrainingError(f"--from {folder}: is a {manifest.kind} draft; a head can only go on from a head.")
    if not manifest.target.is_for(target.weights.fingerprint(), target.weights.model_fingerprint()):
        raise TrainingError(f"--from {folder}: was made for another target ({manifest.target.name}).")
    try:
        manifest.verify(folder)
        found = HeadSpec.from_mapping(manifest.architecture)
        weights = HeadFile.read(folder / FILE_NAME, found)
    except DraftError as error:
        raise TrainingError(f"--from {folder}: {error}") from error
    if found.matrices != spec.matrices:
        raise TrainingError(f"--from {folder}: has other sizes ({found.key}) than this head ({spec.key}).")
    return to_module(weights)


def to_module(weights: HeadWeights) -> dict[str, Tensor]:
    """Weights of a file as `HeadModule` takes them."""
    matrices = {name: torch.from_numpy(weights.matrices[name].dequantised()) for name in MATRICES}
    vectors: dict[str, Any] = {name: torch.from_numpy(weights.vectors[name].copy()) for name in NORMS}
    return matrices | vectors
