"""From counters of replayed rounds to figures: ratios with intervals, paired differences, predicted speed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from drafts.evaluate import FirstToken, Score, calibration_error

RESAMPLES = 4000
LEAST_FOR_INTERVAL = 5  # prompts: resamples of fewer say next to nothing of others of the kind, and look as if they did
_LEVELS = (2.5, 97.5)

# What the keys of a figure mean; goes into every result, so that a number never travels without its definition.
DEFINITIONS = {
    "rounds": "target steps after the first token of each answer, those without a proposal included",
    "accepted_per_round": "accepted draft tokens / rounds (the target's own token of a round is not counted)",
    "tokens_per_round": "tokens / rounds, the target's own token included; the first token of an answer is not counted",
    "low, high": "95% interval by bootstrap over prompts (resampled prompts, ratio of sums); null below "
    f"{LEAST_FOR_INTERVAL} prompts, and of fewer than about 20 narrower than it ought to be",
    "acceptance_by_position": "share of the tokens at each place of a block that stood, given that all before stood",
    "first_token.share": "share of all positions of the answers (but the first) at which the first token the draft "
    "proposes is the right one; no proposal counts as wrong",
    "first_token.precision": "the same, of the positions at which it proposes",
    "short": "rounds in which the draft could run and proposed fewer tokens than asked for",
    "draft_seconds_per_token": "median over prompts of seconds inside the draft / proposed tokens, catch-up included",
    "predicted_speedup": "plain seconds a token / seconds a token in rounds: measured seconds of a target step by "
    "width, and of the draft, weighted by the rounds that were replayed; other work of a round is not counted",
    "coverage": "share of the answers' tokens that are in the draft's reduced vocabulary",
    "calibration_error": "expected calibration error of the draft's confidence, 10 equal bins, every place tried",
    "difference": "accepted_per_round minus that of the draft it is compared with, on the same resampled prompts; a "
    "row with others in front is compared with that draft with the same in front",
    "front": "drafts that are asked first, in this order, each taken where its level is at least least_level (lookup: "
    "tokens that match; phrases: 2 to 6 by the confidence of the first token); lookup+phrases+X is X behind both",
}


@dataclass(slots=True)
class PromptScores:
    """What one draft did on one prompt (all of its turns): rounds by gamma, and its first token everywhere."""

    rounds: dict[int, Score] = field(default_factory=dict)
    first: FirstToken = field(default_factory=FirstToken)
    covered: tuple[int, int] | None = None  # tokens inside the draft's vocabulary, tokens in all

    def add(self, other: PromptScores) -> None:
        """Take in another turn of the same prompt."""
        for gamma, score in other.rounds.items():
            self.rounds.setdefault(gamma, Score()).add(score)
        self.first.add(other.first)
        if other.covered is not None:
            before = self.covered or (0, 0)
            self.covered = (before[0] + other.covered[0], before[1] + other.covered[1])


class Bootstrap:
    """Resampled prompts of one domain. The same domain, count and seed give the same resamples, so that drafts can be
    compared pairwise."""

    def __init__(self, domain: str, prompts: int, seed: int, resamples: int = RESAMPLES) -> None:
        rng = np.random.default_rng([seed, zlib.crc32(domain.encode())])
        share = np.full(prompts, 1 / prompts)
        self._counts = rng.multinomial(prompts, share, resamples).astype(np.float64)  # how often each prompt is drawn
        self.prompts = prompts

    def ratios(self, above: Sequence[float], below: Sequence[float]) -> npt.NDArray[np.float64]:
        """sum(above) / sum(below) of every resample; NaN where the sum below is 0."""
        top, bottom = self._counts @ np.asarray(above, float), self._counts @ np.asarray(below, float)
        return np.divide(top, bottom, out=np.full(len(top), np.nan), where=bottom > 0)

    def interval(self, values: npt.NDArray[np.float64]) -> tuple[float | None, float | None]:
        """The middle 95% of resampled values; (None, None) if they say nothing, or are of too few prompts."""
        values = values[np.isfinite(values)]
        if self.prompts < LEAST_FOR_INTERVAL or not len(values):
            return None, None
        low, high = np.percentile(values, _LEVELS)
        return float(low), float(high)


Verify = Callable[[int], float]  # seconds of one target step over so many tokens


def figures(scores: Sequence[PromptScores], bootstrap: Bootstrap, verify: Verify | None) -> dict[str, Any]:
    """All figures of one draft in one domain, as JSON values. scores: one a prompt, in the order of the bootstrap."""
    gammas = sorted({gamma for score in scores for gamma in score.rounds})
    by_gamma = {str(gamma): _rounds([s.rounds[gamma] for s in scores], bootstrap, verify) for gamma in gammas}
    first = FirstToken()
    for score in scores:
        first.add(score.first)
    return {
        "prompts": len(scores),
        "by_gamma": by_gamma,
        "first_token": _first(first, [s.first for s in scores], bootstrap),
        "best": _best(by_gamma),
        "coverage": _coverage(scores),
        "calibration_error": _calibration(scores, gammas),
    }


def summary(scores: Sequence[PromptScores]) -> dict[str, Any]:
    """What holds for a draft on all these prompts: seconds a token by gamma, coverage, calibration."""
    gammas = sorted({gamma for score in scores for gamma in score.rounds})
    return {
        "seconds_per_token": {str(gamma): _seconds([s.rounds[gamma] for s in scores]) for gamma in gammas},
        "coverage": _coverage(scores),
        "calibration_error": _calibration(scores, gammas),
    }


def difference(
    scores: Sequence[PromptScores], others: Sequence[PromptScores], gamma: int, bootstrap: Bootstrap
) -> dict[str, Any]:
    """How many more tokens a round are accepted than by the other draft on the same prompts, with its interval."""
    values, resampled = [], []
    for chosen in (scores, others):
        rounds = [score.rounds[gamma] for score in chosen]
        accepted, count = [r.accepted for r in rounds], [r.rounds for r in rounds]
        values.append(_share(sum(accepted), sum(count)))
        resampled.append(bootstrap.ratios(accepted, count))
    low, high = bootstrap.interval(resampled[0] - resampled[1])
    gap = None if None in values else values[0] - values[1]  # type: ignore[operator]
    better = sum(_rate(a.rounds[gamma]) > _rate(b.rounds[gamma]) for a, b in zip(scores, others))
    return {"difference": gap, "low": low, "high": high, "better_on": better, "prompts": len(scores)}


def predicted_speedup(score: Score, seconds_per_token: float, verify: Verify) -> float | None:
    """Plain seconds over seconds in these rounds. seconds_per_token: the draft's, for each token it proposed."""
    spent = sum(count * verify(width) for width, count in score.widths.items()) + score.proposed * seconds_per_token
    return score.emitted * verify(1) / spent if spent > 0 else None


def _rounds(scores: Sequence[Score], bootstrap: Bootstrap, verify: Verify | None) -> dict[str, Any]:
    total = Score()
    for score in scores:
        total.add(score)
    accepted, rounds = [s.accepted for s in scores], [s.rounds for s in scores]
    low, high = bootstrap.interval(bootstrap.ratios(accepted, rounds))
    seconds = _seconds(scores)
    return {
        "accepted_per_round": _share(total.accepted, total.rounds),
        "low": low,
        "high": high,
        "tokens_per_round": _share(total.emitted, total.rounds),
        "acceptance_by_position": [_share(hit, tried) for hit, tried in zip(total.hits, total.tries)],
        "tries_by_position": total.tries,
        "rounds": total.rounds,
        "accepted": total.accepted,
        "proposed": total.proposed,
        "asked": total.asked,
        "short": total.short,
        "rounds_by_width": {str(width): count for width, count in sorted(total.widths.items())},
        "draft_seconds_per_token": seconds,
        "predicted_speedup": None if verify is None else predicted_speedup(total, seconds or 0.0, verify),
    }


def _seconds(scores: Sequence[Score]) -> float | None:
    """Of one proposed token: the median over prompts, so that a pause of the machine does not count."""
    step = [score.seconds / score.proposed for score in scores if score.proposed]
    return median(step) if step else None


def _coverage(scores: Sequence[PromptScores]) -> float | None:
    covered = [score.covered for score in scores if score.covered is not None]
    return _share(sum(known for known, _ in covered), sum(total for _, total in covered))


def _calibration(scores: Sequence[PromptScores], gammas: Sequence[int]) -> float | None:
    """Over the longest blocks: they try the most places."""
    return calibration_error(pair for score in scores for gamma in gammas[-1:] for pair in score.rounds[gamma].pairs)


def _first(total: FirstToken, each: Sequence[FirstToken], bootstrap: Bootstrap) -> dict[str, Any]:
    low, high = bootstrap.interval(bootstrap.ratios([f.hits for f in each], [f.positions for f in each]))
    return {
        "share": _share(total.hits, total.positions),
        "low": low,
        "high": high,
        "precision": _share(total.hits, total.asked),
        "positions": total.positions,
        "asked": total.asked,
    }


def _best(by_gamma: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The gamma with the best predicted speed; gamma 0 (1.0, plain decoding) where none is faster."""
    known = {int(g): f["predicted_speedup"] for g, f in by_gamma.items() if f["predicted_speedup"] is not None}
    if not known:
        return None
    gamma = max(known, key=lambda g: (known[g], -g))
    return {"gamma": gamma, "speedup": known[gamma]} if known[gamma] > 1 else {"gamma": 0, "speedup": 1.0}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rate(score: Score) -> float:
    return score.accepted / score.rounds if score.rounds else -math.inf
