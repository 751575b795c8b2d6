"""The acceptance rule. Sampling is tested by exact enumeration: every path of a round with its probability."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from edgespec.decoding import acceptance, sampling
from edgespec.decoding.acceptance import Outcome, accept
from edgespec.decoding.sampling import LogitsPipeline, SamplingParams
from edgespec.errors import ModelError
from tests.support.mutants import mutant
from tests.support.sampling_law import reference_law

# --- enumeration ----------------------------------------------------------------------------------------------------


class Chance:
    """Stands in for the generator and for `draw`: not random, but walking through every path, with its weight."""

    def __init__(self) -> None:
        self._path: list[int] = []
        self._open: list[list[int]] = []  # per decision on the path: options not tried yet
        self._at = 0
        self.weight = 1.0

    def paths(self, run: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
        while True:
            self._at, self.weight = 0, 1.0
            result = run()
            yield self.weight, result
            while self._open and not self._open[-1]:
                self._open.pop()
                self._path.pop()
            if not self._open:
                return
            self._path[-1] = self._open[-1].pop()

    def decide(self, law: Sequence[float]) -> int:
        law = np.asarray(law, np.float64)
        law = law / law.sum()
        if self._at == len(self._path):
            options = [int(i) for i in np.flatnonzero(law)]
            self._path.append(options.pop())
            self._open.append(options)
        choice = self._path[self._at]
        self._at += 1
        self.weight *= law[choice]
        return choice

    def draw(self, law: Sequence[float], _rng: Chance) -> int:
        return self.decide(law)

    def random(self) -> Coin:
        return Coin(self, 1.0)


class Coin:
    """A uniform number times `scale`, only ever compared with a threshold."""

    def __init__(self, chance: Chance, scale: float) -> None:
        self._chance = chance
        self._scale = scale

    def __mul__(self, factor: float) -> Coin:
        return Coin(self._chance, self._scale * float(factor))

    def __lt__(self, threshold: float) -> bool:
        below = 1.0 if threshold >= self._scale else float(threshold) / self._scale
        return self._chance.decide([below, 1 - below]) == 0


ROWS, TOKENS = 8, 6
PROMPT = [3, 3, 5]


def table(seed: int, spread: float = 1.5) -> np.ndarray:
    """Logits of the next token by the last one, so that every row is another; ids from TOKENS on would often win."""
    values = (np.random.default_rng(seed).standard_normal((ROWS, ROWS)) * spread).astype(np.float32)
    values[:, TOKENS:] += 3
    return values


TARGET = table(1)
GUESS = TARGET + table(2) * np.float32(0.6)  # near enough that whole blocks are accepted, far enough that not all are


class Draft:
    """Guesses with its own table and, if given, its own parameters or row length."""

    def __init__(self, logits: np.ndarray, params: SamplingParams | None = None, rows: int = ROWS) -> None:
        self.logits = logits[:, :rows]
        self.params = params
        self.raw_rows = False

    def propose(self, chance: Chance, target: LogitsPipeline, last: int, gamma: int) -> tuple[list[int], list[Any]]:
        own = target if self.params is None else make_pipeline(self.params, ())
        choose = own.draft_choose(chance)  # type: ignore[arg-type]
        tokens: list[int] = []
        rows: list[Any] = []
        for _ in range(gamma):
            logits = self.logits[([last] + tokens)[-1]]
            token, q = choose(logits, tokens)
            if self.raw_rows and q is not None:  # the planted fault "q = raw": not what the token was drawn from
                q = np.zeros(ROWS, np.float32)
                q[: len(logits)] = np.exp(logits) / np.exp(logits).sum()
            tokens.append(token)
            rows.append(q)
        return tokens, rows


def make_pipeline(params: SamplingParams, generated: Sequence[int]) -> LogitsPipeline:
    pipeline = LogitsPipeline(params, vocab_rows=ROWS, token_count=TOKENS, eos_ids=(2,), prompt=PROMPT)
    for token in generated:
        pipeline.push(token)
    return pipeline


def law_of_output(params: SamplingParams, draft: Draft, gamma: int, length: int) -> dict[tuple[int, ...], float]:
    """The exact law of the first `length` tokens that rounds of `gamma` guesses produce."""

    @functools.cache
    def continued(prefix: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        if len(prefix) >= length:
            return {prefix[:length]: 1.0}
        chance = Chance()
        total: dict[tuple[int, ...], float] = defaultdict(float)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acceptance, "draw", chance.draw)
            patch.setattr(sampling, "draw", chance.draw)
            for weight, block in chance.paths(lambda: one_round(chance, prefix)):
                total[(prefix + block)[:length]] += weight
        result: dict[tuple[int, ...], float] = defaultdict(float)
        for reached, weight in total.items():
            for output, share in continued(reached).items():
                result[output] += weight * share
        return result

    def one_round(chance: Chance, prefix: tuple[int, ...]) -> tuple[int, ...]:
        pipeline = make_pipeline(params, prefix)
        last = (PROMPT + list(prefix))[-1]
        tokens, rows = draft.propose(chance, pipeline, last, gamma)
        logits = np.stack([TARGET[t] for t in [last, *tokens]])
        outcome = acceptance.accept(tokens, rows, logits, pipeline, chance)  # type: ignore[arg-type]
        outcomes[outcome.accepted] += chance.weight
        return (*tokens[: outcome.accepted], outcome.token)

    outcomes.clear()
    return continued(())


outcomes: dict[int, float] = defaultdict(float)  # weights of accepted counts, of the last `law_of_output`


@functools.cache
def law_of_target(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The law of the first `length` tokens of plain sampling, from the independent reference."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for prefix, weight in laws.items():
            row = TARGET[(PROMPT + list(prefix))[-1]].tolist()
            law = reference_law(params, row, prompt=PROMPT, generated=prefix, token_count=TOKENS, ending=(2,))
            longer |= {(*prefix, token): weight * share for token, share in enumerate(law) if share > 0}
        laws = longer
    return laws


def distance(params: SamplingParams, draft: Draft, gamma: int, length: int) -> float:
    """Total variation distance between what comes out and the target's law."""
    ours, expected = law_of_output(params, draft, gamma, length), law_of_target(params, length)
    assert math.isclose(sum(ours.values()), 1.0, abs_tol=1e-9)
    return sum(abs(ours.get(k, 0.0) - expected.get(k, 0.0)) for k in ours.keys() | expected.keys()) / 2


WARM = SamplingParams(temperature=0.7, top_k=3)
PENALTIES = SamplingParams(
    temperature=0.9, top_k=4, repetition_penalty=1.6, frequency_penalty=0.9, presence_penalty=0.5, min_new_tokens=2
)
CASES: dict[str, tuple[SamplingParams, Draft]] = {  # B001
    "same parameters": (WARM, Draft(GUESS)),
    "other temperature": (WARM, Draft(GUESS, SamplingParams(temperature=1.8, top_k=3))),
    "greedy draft": (WARM, Draft(GUESS, SamplingParams())),  # B040: q is one-hot
    "narrower draft": (WARM, Draft(GUESS, SamplingParams(temperature=0.7, top_k=2))),
    "wider draft": (WARM, Draft(GUESS, SamplingParams(temperature=1.3))),
    "no mass where the target has": (SamplingParams(temperature=1.0), Draft(GUESS, rows=3)),
    "the target's equal": (WARM, Draft(TARGET)),
    "penalties within the block": (PENALTIES, Draft(GUESS)),
    "nucleus": (SamplingParams(temperature=1.2, top_p=0.8), Draft(GUESS)),
    "min_p and bias": (SamplingParams(temperature=1.0, min_p=0.2, logit_bias={1: 1.5, 4: -1.0}), Draft(GUESS)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gamma, length", [(0, 2), (1, 2), (2, 3)])
def test_law_of_the_output(name: str, gamma: int, length: int) -> None:
    params, draft = CASES[name]
    assert distance(params, draft, gamma, length) < 1e-6
    shares = [outcomes[n] / sum(outcomes.values()) for n in range(gamma + 1)]
    if name == "the target's equal":
        assert shares[-1] > 1 - 1e-6
    else:  # each way a block can end was tested
        assert min(shares) > (0.02 if draft.logits.shape[1] == ROWS else 0.001)


def test_law_of_the_output_in_longer_blocks() -> None:
    assert distance(*CASES["same parameters"], gamma=3, length=3) < 1e-6


FAULTS = {
    "the residual is not subtracted": ("np.maximum(p - np.divide(row, total, dtype=np.float64), 0.0)", "p.copy()"),
    "the bonus comes from the wrong row": ("last = logits[len(tokens)]", "last = logits[max(0, len(tokens) - 1)]"),
    "everything is accepted": ("/ total) < p[token]:", "/ total) < 2.0:"),
    "a guess without q is always accepted": ("if rng.random() < p[token]:", "if rng.random() < 2.0:"),
    "a rejected guess without q comes back": ("residual[token] = 0.0", "pass"),
    "accepted with p, not p / q": ("* (row[token] / total) < p", "* 1.0 < p"),
    "accepted if p >= q": ("if rng.random() * (row[token] / total) < p[token]", "if row[token] <= p[token]"),
    "the block's own tokens are not counted": ("tokens[:i], pipeline", "(), pipeline"),
    "the bonus ignores the block": ("pipeline.probabilities(last, tokens)", "pipeline.probabilities(last)"),
}
SHOWN_BY = {
    "the block's own tokens are not counted": "penalties within the block",
    "the bonus ignores the block": "penalties within the block",
    "a guess without q is always accepted": "greedy draft",
    "a rejected guess without q comes back": "greedy draft",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutant(acceptance, *FAULTS[fault])
    monkeypatch.setattr(acceptance, "accept", broken.accept)
    # The copy has its own reference to `draw`, which the enumeration replaces in the real module only.
    monkeypatch.setattr(broken, "draw", lambda law, rng: acceptance.draw(law, rng))
    assert distance(*CASES[SHOWN_BY.get(fault, "same parameters")], gamma=2, length=3) > 1e-2


def test_a_raw_row_is_seen() -> None:
    """q must be what the token was drawn from, not the draft's softmax before temperature and top_k."""
    params, draft = CASES["same parameters"]
    faulty = Draft(draft.logits)
    faulty.raw_rows = True
    assert distance(params, faulty, gamma=2, length=3) > 1e-2


# --- single decisions -----------------------------------------------------------------------------------------------


def greedy_pipeline(**changes: Any) -> LogitsPipeline:
    return LogitsPipeline(SamplingParams(**changes), vocab_rows=4, token_count=4, eos_ids=(), prompt=())


def one_hot_rows(*tokens: int) -> np.ndarray:
    return np.eye(4, dtype=np.float32)[list(tokens)]


@pytest.mark.parametrize(
    "tokens, outcome",
    [
        ([], Outcome(0, 1, True)),
        ([1], Outcome(1, 2, True)),
        ([1, 2], Outcome(2, 3, True)),
        ([1, 2, 3], Outcome(3, 0, True)),
        ([0, 2, 3], Outcome(0, 1, False)),
        ([1, 0, 3], Outcome(1, 2, False)),
        ([1, 2, 0], Outcome(2, 3, False)),
        ([-1], Outcome(0, 1, False)),  # B014: fillers and ids without a row
        ([99], Outcome(0, 1, False)),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 0.01])  # B041; 0.01 is sampling, but as good as greedy here
def test_peaked_rows(tokens: list[int], outcome: Outcome, temperature: float) -> None:
    logits = one_hot_rows(1, 2, 3, 0)[: len(tokens) + 1]
    rng = np.random.default_rng(0)
    for row in (None, np.full(4, 0.25, np.float32)):
        assert accept(tokens, [row] * len(tokens), logits, greedy_pipeline(temperature=temperature), rng) == outcome


def test_greedy_ties_go_to_the_lowest_id() -> None:  # B023c, B031
    flat = np.zeros((3, 4), np.float32)
    rng = np.random.default_rng(0)
    assert accept([0, 0], [None] * 2, flat, greedy_pipeline(), rng) == Outcome(2, 0, True)
    assert accept([0, 1], [None] * 2, flat, greedy_pipeline(), rng) == Outcome(1, 0, False)


def test_greedy_penalties_change_within_the_block() -> None:
    flat = np.zeros((4, 4), np.float32)
    p = greedy_pipeline(presence_penalty=1.0)
    rng = np.random.default_rng(0)
    assert accept([0, 1, 2], [None] * 3, flat, p, rng) == Outcome(3, 3, True)
    assert accept([0, 0, 2], [None] * 3, flat, p, rng) == Outcome(1, 1, False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_behind_a_rejection_are_not_looked_at(temperature: float) -> None:
    logits = one_hot_rows(1, 2, 3, 0) * 1000
    logits[2:] = np.nan
    p = greedy_pipeline(temperature=temperature)
    rng = np.random.default_rng(0)
    assert accept([1, 3, 3], [None] * 3, logits, p, rng) == Outcome(1, 2, False)
    with pytest.raises(ModelError, match="NaN"):
        accept([1, 2, 3], [None] * 3, logits, p, rng)


@pytest.mark.parametrize(
    "row",
    [
        np.array([0.5, 0.0, 0.5, 0.0], np.float32),  # cannot have produced token 1
        np.array([0.5, np.nan, 0.5, 0.0], np.float32),
        np.array([np.nan, 0.5, 0.5, 0.0], np.float32),
        np.array([-0.5, 0.5, 1.0, 0.0], np.float32),
        np.array([np.inf, 0.5, 0.5, 0.0], np.float32),
        np.array([0.5, 0.5], np.float32),
        np.array([[0.5, 0.5, 0.0, 0.0]], np.float32),
    ],
)
def test_impossible_draft_rows_keep_the_law(row: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft can only cost speed, also one that lies about q: the guess is judged as a one-hot one."""
    chance = Chance()
    monkeypatch.setattr(acceptance, "draw", chance.draw)
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]] * 2, np.float32))
    pipeline = greedy_pipeline(temperature=1.0)
    law = np.zeros(4)
    for weight, outcome in chance.paths(lambda: accept([1], [row], logits, pipeline, chance)):  # type: ignore[arg-type]
        law[1 if outcome.accepted else outcome.token] += weight * (1 if outcome.accepted == 0 or outcome.bonus else 0)
    np.testing.assert_allclose(law, [0.1, 0.2, 0.3, 0.4], atol=1e-7)


def test_equal_laws_are_always_accepted() -> None:
    """A draft with the target's weights: rounding of q to float32 must not cost acceptance."""
    rng = np.random.default_rng(0)
    p = LogitsPipeline(SamplingParams(temperature=1.0), vocab_rows=500, token_count=500, eos_ids=(), prompt=())
    choose = p.draft_choose(rng)
    for _ in range(200):
        logits = rng.standard_normal((2, 500)).astype(np.float32)
        token, q = choose(logits[0], [])
        assert accept([token], [q], logits, p, rng).accepted == 1


def test_seeds() -> None:  # B044
    p = LogitsPipeline(SamplingParams(temperature=1.0), vocab_rows=ROWS, token_count=TOKENS, eos_ids=(), prompt=())

    def text(seed: int) -> tuple[int, ...]:
        rng = np.random.default_rng(seed)
        choose = p.draft_choose(rng)
        tokens: list[int] = []
        while len(tokens) < 12:
            token, q = choose(TARGET[(tokens or [0])[-1]] / 2, [])
            outcome = accept([token], [q], TARGET[[(tokens or [0])[-1], token]], p, rng)
            tokens += [token][: outcome.accepted] + [outcome.token]
        return tuple(tokens)

    assert len({text(seed) for seed in range(50)}) > 30
    assert len({text(7) for _ in range(5)}) == 1


@pytest.mark.parametrize("tokens, rows, height", [([1], [None], 1), ([1], [None], 3), ([1], [], 2), ([], [None], 1)])
def test_wrong_shapes_are_errors(tokens: list[int], rows: list[Any], height: int) -> None:
    with pytest.raises(ValueError, match="logits of shape"):
        accept(tokens, rows, np.zeros((height, 4), np.float32), greedy_pipeline(), np.random.default_rng(0))
