"""Fitting a ranker: a small network, by the binomial likelihood of first tokens that were right.

Parts of the input are dropped at random, together with their flags, so that one network serves before the prompt was
read (its text alone), at a text's start, and with or without anything seen of the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from predictor.features import FloatArray, Layout
from predictor.train.samples import GROUPS, BoolArray, Corpus, Samples, Watch, places

_WHOLE, _START = 0.5, 0.1  # shares of samples with all parts, and with nothing but the prompt's text
_DROPPED = 0.35  # chance of each part to be missing in the others
_SPREAD_FLOOR = 0.03  # of a number: what hardly varies is not blown up


@dataclass(frozen=True, slots=True)
class FitConfig:
    """units: of the hidden layers. epochs: most passes over the samples; patience: passes without a better held-out
    loss until the fit ends. dropout: of inputs and units. domain: weight of telling the texts' domains.
    """

    units: tuple[int, ...] = (32,)
    epochs: int = 60
    patience: int = 15
    batch: int = 256
    learning_rate: float = 5e-4
    weight_decay: float = 0.1
    dropout: float = 0.3
    domain: float = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """layers: (W, b) of the network on features as they come. losses: held-out bits a token after each pass."""

    layers: list[tuple[FloatArray, FloatArray]]
    losses: list[float]
    best: int


def fit(
    corpus: Corpus,
    training: Sequence[Samples],
    stopping: Sequence[Samples],
    config: FitConfig,
    *,
    groups: Sequence[str] = tuple(GROUPS),
    progress: Callable[[str], None] | None = None,
) -> Fitted:
    """Fit to `training`, and keep the state that is best on `stopping`. The same seed gives the same ranker.

    groups: the parts of the input that it may see at all.
    """
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    layout = corpus.layout
    allowed = places(layout, groups)
    data = _Data(training, layout, allowed)
    held_out = _Data(stopping, layout, allowed)
    scaling = Scaling.of(data.features, layout)
    rates = (data.hits.sum(axis=0) + 1) / (data.counts.sum() + 2)
    network = _network(layout.size, len(corpus.drafts), config, rates)
    hidden, last = network[:-1], network[-1]
    # Which domain a text is of is told beside the rates: what that needs holds for other texts, where rates alone would
    # be learned by heart. The layer for it is not part of the ranker.
    domains = sorted({text.domain for text in training})
    of = torch.tensor([domains.index(text.domain) for text in training for _ in text.counts])
    telling = nn.Linear(config.units[-1], len(domains))
    weights = [*network.parameters(), *telling.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=config.weight_decay)
    check = held_out.batch(np.arange(len(held_out.hits)), np.random.default_rng(config.seed + 1))
    losses: list[float] = []
    best, state = 0, {name: value.clone() for name, value in network.state_dict().items()}
    for epoch in range(config.epochs):
        network.train()
        data.look_again(rng)
        order = rng.permutation(len(data.hits))
        for begin in range(0, len(order), config.batch):
            rows = order[begin : begin + config.batch]
            features, hits, counts = data.batch(rows, rng)
            units = hidden(scaling(features))
            loss = _loss(last(units), hits, counts)
            loss += config.domain * nn.functional.cross_entropy(telling(units), of[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            losses.append(float(_loss(network(scaling(check[0])), *check[1:])) / np.log(2))
        if progress is not None:
            progress(f"pass {epoch + 1}: {losses[-1]:.4f} bits a token on texts held out")
        if losses[-1] <= min(losses):
            best, state = epoch, {name: value.clone() for name, value in network.state_dict().items()}
        elif epoch - best >= config.patience:
            break
    network.load_state_dict(state)
    return Fitted(_folded(network, scaling, allowed), losses, best)


class _Data:
    """Samples under each other, and what a live run may have seen of the drafts at each."""

    def __init__(self, texts: Sequence[Samples], layout: Layout, allowed: BoolArray) -> None:
        self._layout = layout
        self._watch = Watch(texts) if allowed[layout.parts["rates"]].any() else None
        self.features = np.concatenate([text.features for text in texts]) * allowed
        self.hits = np.concatenate([text.hits for text in texts])
        self.counts = np.concatenate([text.counts for text in texts])
        self._groups = np.array([places(layout, (name,)) for name in GROUPS], np.float32)
        self.look_again(np.random.default_rng(0))

    def look_again(self, rng: np.random.Generator) -> None:
        """Draw anew at which positions drafts were looked at."""
        if self._watch is not None:
            rates, known = self._layout.parts["rates"], self._layout.parts["known"]
            self.features[:, rates], self.features[:, known] = self._watch.look(rng)

    def batch(self, rows: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Features with parts dropped, hits, counts."""
        kind = rng.random((len(rows), 1))
        kept = rng.random((len(rows), len(GROUPS))) >= _DROPPED
        kept |= kind < _WHOLE
        kept[(kind[:, 0] >= _WHOLE) & (kind[:, 0] < _WHOLE + _START)] = [name == "text_prompt" for name in GROUPS]
        features = self.features[rows] * (kept.astype(np.float32) @ self._groups)
        return torch.from_numpy(features), torch.from_numpy(self.hits[rows]), torch.from_numpy(self.counts[rows])


class Scaling:
    """Numbers around 0 and of like size: (x - mean * flag) / spread, where a missing part (flag 0) stays 0.

    It is linear in the features, flags being some of them, so that it fits into the first layer. Only what has a flag
    is centred.
    """

    def __init__(self, mean: FloatArray, spread: FloatArray, flag: npt.NDArray[np.int64]) -> None:
        """flag: int [size], the place of each number's flag; where there is none, mean is 0."""
        self.mean, self.spread, self.flag = mean, spread, flag
        self._tensors = torch.from_numpy(mean), torch.from_numpy(spread), torch.from_numpy(flag)

    @classmethod
    def of(cls, features: FloatArray, layout: Layout) -> Scaling:
        """By the mean and spread of each number where it is there."""
        mean, flag = np.zeros(layout.size, np.float32), np.zeros(layout.size, np.int64)
        spread = np.maximum(features.std(axis=0, dtype=np.float64), _SPREAD_FLOOR).astype(np.float32)
        for part, scalar in (("hidden_recent", "hidden_recent?"), ("hidden_prompt", "hidden_prompt?")):
            where, place = layout.parts[part], layout.scalar(scalar)
            rows = features[features[:, place] > 0][:, where]
            if len(rows):
                mean[where], spread[where] = rows.mean(axis=0), np.maximum(rows.std(axis=0), _SPREAD_FLOOR)
            flag[where] = place
        rates, known = layout.parts["rates"], layout.parts["known"]
        count = np.maximum(features[:, known].sum(axis=0), 1)
        mean[rates] = features[:, rates].sum(axis=0) / count
        flag[rates] = np.arange(known.start, known.stop)
        spread[rates], spread[known] = 0.1, 0.5  # few numbers that tell much
        return cls(mean, spread, flag)

    def __call__(self, features: Tensor) -> Tensor:
        mean, spread, flag = self._tensors
        return (features - mean * features[:, flag]) / spread

    def fold(self, weight: FloatArray) -> FloatArray:
        """The matrix that does to features as they come what `weight` does to scaled ones."""
        scaled = (weight / self.spread).astype(np.float64)
        folded = scaled.copy()
        for place in np.flatnonzero(self.mean):
            folded[:, self.flag[place]] -= scaled[:, place] * self.mean[place]
        return folded.astype(np.float32)


def _network(inputs: int, outputs: int, config: FitConfig, rates: FloatArray) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Dropout(config.dropout)]
    width = inputs
    for units in config.units:
        layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(config.dropout)]
        width = units
    last = nn.Linear(width, outputs)
    with torch.no_grad():  # begin with what holds on average
        last.weight.mul_(0.1)
        last.bias.copy_(torch.from_numpy(np.log(rates / (1 - rates)).astype(np.float32)))
    return nn.Sequential(*layers, last)


def _loss(logits: Tensor, hits: Tensor, counts: Tensor) -> Tensor:
    """Mean negative log-likelihood of one first token, in nats: binomial, without its constant."""
    counts = counts[:, None].expand_as(hits)
    each = hits * nn.functional.softplus(-logits) + (counts - hits) * nn.functional.softplus(logits)
    return each.sum() / counts.sum()


def _folded(network: nn.Sequential, scaling: Scaling, allowed: BoolArray) -> list[tuple[FloatArray, FloatArray]]:
    """The layers, with the scaling of the input inside the first one."""
    layers = [
        (module.weight.detach().numpy().copy(), module.bias.detach().numpy().copy())
        for module in network
        if isinstance(module, nn.Linear)
    ]
    layers[0] = (scaling.fold(layers[0][0]) * allowed.astype(np.float32), layers[0][1])
    return layers
