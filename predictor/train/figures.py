"""How good a ranking is: the right draft first, among the first two, and what is lost where it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.features import FloatArray, Layout
from predictor.train.samples import PROMPT, RECENTLY, BoolArray, Corpus, Samples, Watch, places

LEAST_AHEAD = 8  # positions that a sample must have ahead to be judged
_BINS = 10

DEFINITIONS = {
    "best": "the draft with the most right first tokens over the next 16 positions of the text; several may share it",
    "top1": "share of samples in which the draft ranked first is a best one",
    "top2": "share of samples in which a best one is among the first two",
    "top1_within_noise": "as top-1, but a draft is right too if it is behind the best by at most "
    "the square root of the number of positions at which exactly one of the two is right: one standard error",
    "top2_within_noise": "as top-1 with noise allowed, for the better of the first two",
    "tokens": "accepted tokens of a block of the draft ranked first, mean over the next 16 positions",
    "regret": "share of the tokens of the best draft (by tokens, at each sample) that is lost by the one ranked first",
    "calibration_error": "mean distance of expected and seen rates over 10 equal bins of the expected, all drafts",
    "bits": "negative log-likelihood of a first token in bits, all drafts",
}

Rates = Callable[[FloatArray], FloatArray]  # features [n, size] -> [n, drafts]


def judged(texts: Sequence[Samples], horizon: int) -> list[tuple[Samples, npt.NDArray[np.int64]]]:
    """Texts with the places of their samples that have enough ahead."""
    least = min(LEAST_AHEAD, horizon)
    found = [(text, np.flatnonzero(text.counts >= least)) for text in texts]
    return [(text, rows) for text, rows in found if len(rows)]


class Judge:
    """The truth about samples, and figures of rankings of them."""

    def __init__(self, corpus: Corpus, texts: Sequence[Samples]) -> None:
        self._chosen = judged(texts, corpus.horizon)
        if not self._chosen:
            raise ValueError("no text is long enough to be judged")
        self.domains = np.concatenate([[text.domain] * len(rows) for text, rows in self._chosen])
        self.texts = len(self._chosen)
        self.hits = np.concatenate([text.hits[rows] for text, rows in self._chosen])
        self.counts = np.concatenate([text.counts[rows] for text, rows in self._chosen])
        self.tokens = np.concatenate([text.tokens[rows] for text, rows in self._chosen])
        self._differ = np.concatenate([_disagreements(text, rows, corpus.horizon) for text, rows in self._chosen])
        self.features = np.concatenate([text.features[rows] for text, rows in self._chosen])
        looks = [Watch([text]).look(np.random.default_rng(int(text.key, 16))) for text, _ in self._chosen]
        self.seen_rates, self.seen_known = (
            np.concatenate([look[part][rows] for look, (_, rows) in zip(looks, self._chosen)]) for part in (0, 1)
        )
        self.full = np.concatenate([_before(text, corpus.horizon)[rows] for text, rows in self._chosen])

    def figures(self, scores: FloatArray, *, rates: bool = True, domain: str | None = None) -> dict[str, float]:
        """Figures of one ranking. scores: [n, drafts], higher is ranked before. rates: whether they are chances."""
        of = np.ones(len(scores), bool) if domain is None else self.domains == domain
        scores, hits, tokens, differ = scores[of], self.hits[of], self.tokens[of], self._differ[of]
        row = np.arange(len(scores))
        order = np.argsort(-scores, axis=1, kind="stable")
        first, second = order[:, 0], order[:, min(1, order.shape[1] - 1)]
        best, most = hits.argmax(axis=1), hits.max(axis=1)
        noise = np.sqrt(differ[row, best])

        def right(chosen: npt.NDArray[np.int64], within_noise: bool) -> BoolArray:
            slack = noise[row, chosen] if within_noise else 0.0
            return np.asarray(hits[row, chosen] >= most - slack - 1e-6)

        found = {
            "samples": float(len(scores)),
            "top1": float(right(first, False).mean()),
            "top2": float((right(first, False) | right(second, False)).mean()),
            "top1_within_noise": float(right(first, True).mean()),
            "top2_within_noise": float((right(first, True) | right(second, True)).mean()),
            "tokens": float(tokens[row, first].mean()),
            "regret": float(1 - tokens[row, first].sum() / max(tokens.max(axis=1).sum(), 1e-9)),
        }
        if rates:
            counts = self.counts[of]
            found["calibration_error"] = _calibration(scores, hits, counts)
            found["bits"] = _bits(scores, hits, counts)
        return found


def evaluate(corpus: Corpus, texts: Sequence[Samples], rates: Rates) -> dict[str, Any]:
    """All figures of a ranker on `texts`: by domain, with parts of its input missing, and of simpler rankings."""
    judge, layout = Judge(corpus, texts), corpus.layout
    inputs = _inputs(judge, layout)
    answers = {name: rates(features) for name, features in inputs.items()}
    whole = answers["all"]
    return {
        "definitions": DEFINITIONS,
        "texts": judge.texts,
        "drafts": [draft.name for draft in corpus.drafts],
        "all": judge.figures(whole),
        "by_domain": {str(d): judge.figures(whole, domain=str(d)) for d in np.unique(judge.domains)},
        "inputs": {name: judge.figures(answer) for name, answer in answers.items()},
        "others": {name: judge.figures(scores, rates=False) for name, scores in _others(judge, corpus).items()},
        "expected_and_seen": {
            draft.name: [float(whole[:, i].mean()), float(judge.hits[:, i].sum() / judge.counts.sum())]
            for i, draft in enumerate(corpus.drafts)
        },
    }


def _inputs(judge: Judge, layout: Layout) -> Mapping[str, FloatArray]:
    """The same samples with all of the input, and with parts of it."""
    both = {*PROMPT, *RECENTLY}
    found: dict[str, FloatArray] = {}
    for name, groups in (
        ("prompt text", ("text_prompt",)),
        ("prompt", PROMPT),
        ("recent", RECENTLY),
        ("prompt and recent", tuple(both)),
        ("all", (*both, "acceptance")),
    ):
        features = judge.features * places(layout, groups)
        if "acceptance" in groups:
            features[:, layout.parts["rates"]] = judge.seen_rates
            features[:, layout.parts["known"]] = judge.seen_known
        found[name] = features.astype(np.float32)
    return found


def _others(judge: Judge, corpus: Corpus) -> Mapping[str, FloatArray]:
    """Rankings that need no ranker. `hindsight` ones know what nobody knows when it matters."""
    shape, drafts = judge.hits.shape, [draft.name for draft in corpus.drafts]
    mean = judge.hits.sum(axis=0) / judge.counts.sum()
    found = {"best single draft (hindsight)": np.broadcast_to(mean, shape)}
    if "general" in drafts:
        general = mean.copy()
        general[drafts.index("general")] = 2
        found["general"] = np.broadcast_to(general, shape)
    own = np.broadcast_to(mean, shape).copy()
    for place, domain in enumerate(corpus.domains):
        own[judge.domains == domain, place] += 1
    found["the domain's own draft (by label)"] = own
    by_domain = np.empty(shape)
    for domain in np.unique(judge.domains):
        of = judge.domains == domain
        by_domain[of] = judge.hits[of].sum(axis=0)
    found["best of each domain (hindsight)"] = by_domain
    found["most right over the last 16 (all drafts watched)"] = judge.full + 1e-3 * mean
    return {name: scores.astype(np.float32) for name, scores in found.items()}


def _before(text: Samples, horizon: int) -> FloatArray:
    """Right first tokens over the positions before each sample, [n, drafts]."""
    total = np.concatenate([np.zeros((len(text.firsts), 1)), text.firsts.cumsum(axis=1)], axis=1)
    return (total[:, text.column] - total[:, np.maximum(text.column - horizon, 0)]).T.astype(np.float32)


def _disagreements(text: Samples, rows: npt.NDArray[np.int64], horizon: int) -> FloatArray:
    """[n, drafts, drafts]: at how many of the positions ahead exactly one of two drafts is right."""
    found = []
    for column in text.column[rows]:
        ahead = text.firsts[:, column : column + horizon]
        found.append((ahead[:, None] != ahead[None]).sum(axis=-1))
    return np.array(found, np.float32)


def _calibration(rates: FloatArray, hits: FloatArray, counts: FloatArray) -> float:
    flat, weight = rates.ravel().astype(np.float64), np.repeat(counts, rates.shape[1]).astype(np.float64)
    place = np.minimum((flat * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(place, flat * weight - hits.ravel(), _BINS)
    return float(np.abs(gaps).sum() / weight.sum())


def _bits(rates: FloatArray, hits: FloatArray, counts: FloatArray) -> float:
    p = np.clip(rates.astype(np.float64), 1e-6, 1 - 1e-6)
    each = hits * np.log2(p) + (counts[:, None] - hits) * np.log2(1 - p)
    return float(-each.sum() / (counts.sum() * rates.shape[1]))
