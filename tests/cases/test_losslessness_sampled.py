"""Sampled text has exactly the target's law, whatever is proposed: chi-squared against the exact enumeration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from drafts import NgramDraft, StandaloneDraft
from edgespec.decoding import round as round_module
from edgespec.decoding.acceptance import Outcome, accept
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.sampling import LogitsPipeline
from tests.support.scripted import ScheduledPlanner, ScriptedDraft, TableDecoder, ToyTokenizer, failing, session

VOCAB = 6
TABLE = np.random.default_rng(0).normal(0, 1.5, (VOCAB, VOCAB))
DRAFT_TABLE = TABLE + np.random.default_rng(1).normal(0, 1.5, (VOCAB, VOCAB))
SAMPLES = 1000
LAWS = {
    "plain law": {"temperature": 0.7},
    "top_k": {"temperature": 0.7, "top_k": 3},
    "top_p and min_p": {"temperature": 1.3, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.7, "frequency_penalty": 0.8, "presence_penalty": 0.5},
    "bias": {"temperature": 1.0, "logit_bias": {2: 1.5, 4: -2.0}},
}


def exact_law(params: dict[str, Any], prompt: list[int], count: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation: the product of the target's processed laws, one token at a time."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer: dict[tuple[int, ...], float] = {}
        for so_far, mass in law.items():
            pipeline = LogitsPipeline(
                SamplingParams(max_new_tokens=count, **params),
                vocab_rows=VOCAB,
                token_count=VOCAB,
                eos_ids=(),
                prompt=prompt,
            )
            for token in so_far:
                pipeline.push(token)
            row = TABLE[(prompt + list(so_far))[-1]].astype(np.float32)
            for token, p in enumerate(pipeline.probabilities(row)):
                if p > 0:
                    longer[(*so_far, token)] = mass * p
        law = longer
    return law


def p_value(params: dict[str, Any], drafts: Callable[[], list[Any]], schedule: list[tuple[str | None, int]]) -> float:
    """Chi-squared test of the first 3 tokens' joint law; classes with little mass are put together."""
    prompt = [1, 3]
    law = exact_law(params, prompt, 3)
    target, tokenizer = TableDecoder(TABLE), ToyTokenizer(VOCAB)
    chat = session(target, drafts(), tokenizer=tokenizer, eos_ids=())
    seen: Counter[tuple[int, ...]] = Counter()
    for number in range(SAMPLES):
        chat.planner = ScheduledPlanner(schedule)
        generation = Generation(chat, prompt, SamplingParams(max_new_tokens=5, seed=number, **params))
        while generation.step():
            pass
        seen[generation.result.token_ids[:3]] += 1
    assert set(seen) <= set(law)
    large = [key for key in law if law[key] * SAMPLES >= 5]
    expected = [law[key] * SAMPLES for key in large]
    observed = [seen[key] for key in large]
    rest = SAMPLES - sum(expected)
    if rest > 1:
        expected.append(rest)
        observed.append(SAMPLES - sum(observed))
    return float(stats.chisquare(observed, np.array(expected) * (sum(observed) / sum(expected))).pvalue)


def model_draft() -> list[Any]:
    return [StandaloneDraft("model", TableDecoder(DRAFT_TABLE), VOCAB)]


def one_hot_draft() -> list[Any]:
    """A draft that always takes its best token (q one-hot), which the target's law may not even hold."""
    return [ScriptedDraft(lambda t, gamma: _best_path(t[-1], gamma), "model")]


def _best_path(token: int, gamma: int) -> list[int]:
    path = []
    for _ in range(gamma):
        token = int(np.argmax(DRAFT_TABLE[token]))
        path.append(token)
    return path


def lookup_draft() -> list[Any]:
    return [NgramDraft(2, 1, name="model")]


# B001, B040
@pytest.mark.parametrize("law", LAWS)
def test_sampled_text_has_the_targets_law(law: str) -> None:
    assert p_value(LAWS[law], model_draft, [("model", 3)]) > 1e-3


@pytest.mark.parametrize("law", ["top_k", "penalties"])
def test_also_where_the_draft_takes_its_best_token(law: str) -> None:
    assert p_value(LAWS[law], one_hot_draft, [("model", 2)]) > 1e-3


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (lookup_draft, [("model", 3)]),
        (model_draft, [("model", 1), (None, 0), ("model", 2)]),
        (lambda: [*model_draft(), failing(RuntimeError("x"))], [("failing", 2), ("model", 2)]),
    ],
)
def test_also_with_lookup_switches_and_failures(
    make: Callable[[], list[Any]], schedule: list[tuple[str | None, int]]
) -> None:
    assert p_value(LAWS["top_k"], make, schedule) > 1e-3


def _raw_q(tokens: Any, rows: Any, logits: Any, pipeline: LogitsPipeline, rng: Any) -> Outcome:
    """The classic fault: the ratio is taken with another distribution than the one that was drawn from."""
    return accept(tokens, [None] * len(tokens), logits, pipeline, rng)


def _always(tokens: Any, rows: Any, logits: Any, pipeline: LogitsPipeline, rng: Any) -> Outcome:
    return Outcome(len(tokens), accept([], [], logits[-1:], pipeline, rng).token, bonus=True)


def _no_residual(tokens: Any, rows: Any, logits: Any, pipeline: LogitsPipeline, rng: Any) -> Outcome:
    """After a rejection the token is drawn from p itself."""
    outcome = accept(tokens, rows, logits, pipeline, rng)
    if outcome.bonus:
        return outcome
    at = outcome.accepted
    return Outcome(at, accept([], [], logits[at : at + 1], pipeline, rng).token, bonus=False)


@pytest.mark.parametrize("sabotage", [_raw_q, _always, _no_residual])
def test_the_test_of_the_law_sees_a_sabotaged_rule(sabotage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "accept", sabotage)
    try:
        assert p_value(LAWS["top_k"], model_draft, [("model", 3)]) < 1e-6
    except AssertionError:
        pass  # a text that has no mass at all was seen
