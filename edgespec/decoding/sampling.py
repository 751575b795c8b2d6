"""From a row of logits to a distribution or a token: the request's parameters, applied the same way at every position.

The target's rows (judging and plain steps) and the drafts' rows (proposing) go through one `LogitsPipeline`, so that a
bias, a penalty or a forbidden id means the same in both. All numpy; logits are float32, probabilities float64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from drafts.base import Choose, InvalidLogits
from edgespec.decoding.params import SamplingParams
from edgespec.errors import ModelError, ParameterError, PromptError
from edgespec.results import TokenLogprob

__all__ = ["LogitsPipeline", "SamplingParams", "draw", "token_logprob"]

FloatArray = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]

_NO_IDS: _Ids = np.empty(0, np.int64)
_DRAW_BLOCK = 256
_FIRST_NUCLEUS = 256  # candidates for the top_p set that are sorted first: a whole vocabulary takes milliseconds


class LogitsPipeline:
    """The logits processors of one request, and its sampling law.

    Order: ids that are no tokens -> logit_bias -> repetition penalty (prompt and answer) -> frequency and presence
    penalty (answer) -> ids that would end the answer before min_new_tokens; then, for a distribution: temperature ->
    top_k -> top_p -> min_p. Ties go to the lowest id everywhere, so plain, draft and verify paths pick the same token.

    vocab_rows: length of the target's rows. token_count: ids from here on are padding rows, never tokens.
    eos_ids: what ends the answer (with params.stop_token_ids, which are added); forbidden before min_new_tokens.
    prompt: the ids the repetition penalty looks at besides the answer's own.
    Raises ParameterError for biases and stop ids that are not tokens, PromptError for prompt ids that have no row.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_rows: int,
        token_count: int,
        eos_ids: Collection[int],
        prompt: Sequence[int],
    ) -> None:
        self.params = params
        self.vocab_rows = vocab_rows
        self.token_count = min(token_count, vocab_rows)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._generated = 0
        ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
        self._ending = np.array(sorted(i for i in ending if 0 <= i < vocab_rows), np.int64)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._repeats = params.repetition_penalty != 1.0
        self._counted = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        # Per id: does it occur (repetition), how often was it generated (frequency, presence); with the ids concerned.
        self._occurs = np.zeros(vocab_rows if self._repeats else 0, bool)
        self._counts = np.zeros(vocab_rows if self._counted else 0, np.int32)
        self._occurring: _Ids | None = None
        self._counted_ids: _Ids | None = None
        if self._repeats:
            self._occurs[self._prompt_ids(prompt)] = True

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.token_count:
                raise ParameterError(f"{name} names token {token}; this model has tokens 0 to {self.token_count - 1}.")

    def _prompt_ids(self, prompt: Sequence[int]) -> _Ids:
        ids = np.unique(np.asarray(prompt, np.int64))
        if ids.size and (ids[0] < 0 or ids[-1] >= self.vocab_rows):
            bad = ids[0] if ids[0] < 0 else ids[-1]
            raise PromptError(f"Prompt token {bad} does not exist; this model has tokens 0 to {self.token_count - 1}.")
        return ids

    @property
    def greedy(self) -> bool:
        return self.params.greedy

    def push(self, token: int) -> None:
        """Count one committed token of the answer. O(1)."""
        self._generated += 1
        if self._repeats and not self._occurs[token]:
            self._occurs[token] = True
            self._occurring = None
        if self._counted:
            if not self._counts[token]:
                self._counted_ids = None
            self._counts[token] += 1

    def process(self, row: FloatArray, extra: Sequence[int] = ()) -> FloatArray:
        """The float32 row after every processor before temperature; `row` itself where none applies, else a copy.

        extra: tokens that stand before this position but are not pushed yet (accepted or proposed in this round).
        """
        padded = self.token_count < len(row)
        ending = self._ending.size > 0 and self._generated + len(extra) < self.params.min_new_tokens
        if not (padded or ending or self._bias_ids.size or self._repeats or self._counted):
            return row
        out = np.array(row, np.float32)
        if padded:
            out[self.token_count :] = -np.inf
        if self._bias_ids.size:
            out[self._bias_ids] += self._bias
        if self._repeats:
            self._apply_repetition(out, extra)
        if self._counted:
            self._apply_counts(out, extra)
        if ending:
            out[self._ending] = -np.inf
        return out

    def _apply_repetition(self, out: FloatArray, extra: Sequence[int]) -> None:
        if self._occurring is None:
            self._occurring = np.flatnonzero(self._occurs)
        ids = _joined(self._occurring, [t for t in set(extra) if not self._occurs[t]])
        values, penalty = out[ids], np.float32(self.params.repetition_penalty)
        out[ids] = np.where(values > 0, values / penalty, values * penalty)

    def _apply_counts(self, out: FloatArray, extra: Sequence[int]) -> None:
        # One expression over the total counts, whether they were pushed or stand in `extra`: the same float operations
        # in plain and speculative decoding, or near ties would be decided differently.
        if self._counted_ids is None:
            self._counted_ids = np.flatnonzero(self._counts)
        ids, counts = self._counted_ids, self._counts
        if extra:
            ids = _joined(ids, [t for t in set(extra) if not counts[t]])
            counts = counts + np.bincount(np.asarray(extra, np.int64), minlength=self.vocab_rows).astype(np.int32)
        penalties = self.params.frequency_penalty * counts[ids] + self.params.presence_penalty
        out[ids] -= penalties.astype(np.float32)

    def argmax(self, row: FloatArray, extra: Sequence[int] = ()) -> int:
        """The processed row's best token, the lowest id among equals. ModelError for NaN, +inf, nothing finite."""
        return _best(self.process(row, extra), _target_error)

    def argmax_of(self, rows: FloatArray, index: int, extra: Sequence[int] = ()) -> int:
        """`argmax(rows[index], extra)`, without fetching the row from a device that knows its best token."""
        known = getattr(rows, "best", None)
        if known is not None and self.bare_argmax:
            token: int | None = known(index)
            if token is not None and token < self.token_count:
                return token
        return self.argmax(rows[index], extra)

    def probabilities(self, row: FloatArray, extra: Sequence[int] = ()) -> Probabilities:
        """The target's law at this position, float64 [vocab_rows], sums to 1 (greedy: one-hot). Errors as `argmax`."""
        return self._law(self.process(row, extra), _target_error)

    def _law(self, row: FloatArray, error: Callable[[str], Exception]) -> Probabilities:
        best = _best(row, error)
        law = np.zeros(self.vocab_rows, np.float64)
        if self.params.greedy:
            law[best] = 1.0
            return law
        top_k = self.params.top_k
        ids = _top(row, top_k) if 0 < top_k < len(row) else None
        weights = (row if ids is None else row[ids]).astype(np.float64)
        weights -= float(row[best])  # in place: fresh arrays of a vocabulary's size cost more than the arithmetic
        weights *= 1.0 / self.params.temperature
        np.exp(weights, out=weights)
        if self.params.top_p < 1.0:
            inside = _nucleus(weights, self.params.top_p)
            ids, weights = (inside if ids is None else ids[inside]), weights[inside]
        if self.params.min_p > 0.0:
            weights[weights < self.params.min_p] = 0.0  # the best token's weight is exactly 1
        weights *= 1.0 / weights.sum()
        if ids is None:
            return weights
        law[ids] = weights
        return law

    def draft_choose(self, rng: np.random.Generator) -> Choose:
        """How a draft of this request picks its tokens: `choose(row, proposed_so_far) -> (token, q)`.

        The draft's row may be longer or shorter than the target's (padding, reduced vocabularies) and is cut or filled
        with -inf. q is the float32 row that the token was drawn from, None for an argmax. Raises InvalidLogits.
        """
        return _DraftChoose(self, rng)

    @property
    def bare_argmax(self) -> bool:
        """Whether the next token is the raw row's best one among real tokens: greedy, and no processor changes it."""
        return self.params.greedy and self._bare

    @property
    def bare_temperature(self) -> float | None:
        """The temperature, if the law of the next token is the softmax of raw row / temperature over real tokens."""
        params = self.params
        cut = params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < self.token_count
        return None if params.greedy or cut or not self._bare else params.temperature

    @property
    def _bare(self) -> bool:
        ending = self._ending.size > 0 and self._generated < self.params.min_new_tokens
        return not (self._bias_ids.size or self._repeats or self._counted or ending)

    def choose(
        self, row: FloatArray, proposed: Sequence[int], rng: np.random.Generator
    ) -> tuple[int, FloatArray | None]:
        """A draft's token and the law it was drawn from, see `draft_choose`."""
        processed = self.process(self._fit(row), proposed)
        if self.params.greedy:
            return _best(processed, InvalidLogits), None
        q = self._law(processed, InvalidLogits).astype(np.float32)
        return draw(q, rng), q

    def _fit(self, row: FloatArray) -> FloatArray:
        """A draft's row as a row of the target's length; ids the draft does not know become -inf."""
        row = np.asarray(row, np.float32)
        if row.ndim != 1 or not row.size:
            raise InvalidLogits(f"a logits row of shape {row.shape}")
        if len(row) == self.vocab_rows:
            return row
        known = row[: self.token_count]
        fitted = np.full(self.vocab_rows, -np.inf, np.float32)
        fitted[: len(known)] = known
        return fitted


class _DraftChoose:
    """`Choose` of one request."""

    __slots__ = ("_pipeline", "_rng")

    def __init__(self, pipeline: LogitsPipeline, rng: np.random.Generator) -> None:
        self._pipeline = pipeline
        self._rng = rng

    @property
    def argmax(self) -> bool:
        return self._pipeline.bare_argmax

    @property
    def temperature(self) -> float | None:
        return self._pipeline.bare_temperature

    @property
    def row_length(self) -> int:
        return self._pipeline.vocab_rows

    def uniform(self) -> float:
        return self._rng.random()

    def __call__(self, row: FloatArray, proposed: Sequence[int], /) -> tuple[int, FloatArray | None]:
        return self._pipeline.choose(row, proposed, self._rng)


def draw(law: npt.NDArray[np.floating], rng: np.random.Generator) -> int:
    """One id from `law` (weights >= 0, any positive sum), by one `rng.random()`; never one of weight 0.

    First a block of ids is drawn, then one of the block: summing up a whole vocabulary one by one is slow.
    """
    sums = np.add.reduceat(law, np.arange(0, len(law), _DRAW_BLOCK), dtype=np.float64)
    upto = np.cumsum(sums)
    goal = rng.random() * upto[-1]
    block = _first_above(upto, goal, sums)
    inside = law[block * _DRAW_BLOCK : (block + 1) * _DRAW_BLOCK]
    before = upto[block - 1] if block else 0.0
    return block * _DRAW_BLOCK + _first_above(np.cumsum(inside, dtype=np.float64), max(goal - before, 0.0), inside)


def _first_above(cumulative: Probabilities, goal: float, weights: npt.NDArray[np.floating]) -> int:
    place = int(np.searchsorted(cumulative, goal, side="right"))
    return place if place < len(weights) else int(np.flatnonzero(weights)[-1])  # only if rounding reached the very end


def token_logprob(row: FloatArray, token: int, top: int) -> TokenLogprob:
    """What `row` (raw float32 logits of the target, real tokens only) says about `token`, and its `top` best tokens."""
    best = _best(row, _target_error)
    shifted = row.astype(np.float64) - float(row[best])
    log_total = float(np.log(np.exp(shifted).sum()))
    ids = _top(row, min(top, len(row)))
    ids = ids[np.argsort(-row[ids], kind="stable")]
    margin = float("inf")
    if len(row) > 1:
        second, first = np.partition(row, len(row) - 2)[-2:]
        margin = float(first) - float(second)
    return TokenLogprob(
        token_id=token,
        logprob=float(shifted[token]) - log_total,
        top=tuple((int(i), float(shifted[i]) - log_total) for i in ids),
        margin=margin,
    )


def _target_error(what: str) -> ModelError:
    return ModelError(f"The target produced {what}; its weights or its weight format are damaged or unsuitable.")


def _best(row: FloatArray, error: Callable[[str], Exception]) -> int:
    """Lowest id of the largest value; raises `error(description)` if the row cannot be used."""
    best = int(np.argmax(row))  # the first NaN, if there is one
    value = row[best]
    if np.isfinite(value):
        return best
    raise error("NaN logits" if np.isnan(value) else "infinite logits" if value > 0 else "no finite logit")


def _joined(ids: _Ids, more: list[int]) -> _Ids:
    return np.concatenate((ids, np.asarray(more, np.int64))) if more else ids


def _top(values: npt.NDArray[np.floating], count: int) -> _Ids:
    """Ids of exactly the `count` largest values, ascending; among equal values the lowest ids stay."""
    if count <= 0:
        return _NO_IDS
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    level = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, level)))


def _nucleus(weights: Probabilities, top_p: float) -> _Ids:
    """Positions of the fewest largest weights whose share reaches `top_p`, largest first."""
    goal, size = top_p * weights.sum(), _FIRST_NUCLEUS
    while True:
        ids = _top(weights, min(size, len(weights)))
        order = ids[np.argsort(-weights[ids], kind="stable")]
        reached = np.cumsum(weights[order]) >= goal
        if reached[-1]:
            return order[: int(np.argmax(reached)) + 1]
        if size >= len(weights):
            return order  # rounding only
        size *= 8
