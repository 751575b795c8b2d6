"""The logits processors, the sampling law, what the draft's `choose` returns, and logprobs."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drafts.base import InvalidLogits
from edgespec.decoding import sampling
from edgespec.decoding.sampling import LogitsPipeline, SamplingParams, draw, token_logprob
from edgespec.errors import ModelError, ParameterError, PromptError
from tests.support.mutants import mutant
from tests.support.sampling_law import reference_law, reference_logits

NAN, INF = float("nan"), float("inf")


def pipeline(params: SamplingParams | None = None, rows: int = 8, **changes: Any) -> LogitsPipeline:
    settings: dict[str, Any] = {"token_count": rows, "eos_ids": (), "prompt": ()}
    return LogitsPipeline(params or SamplingParams(), vocab_rows=rows, **(settings | changes))


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# --- processors -----------------------------------------------------------------------------------------------------


def test_ids_of_other_models_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"logit_bias names token 6.*0 to 5"):
        pipeline(SamplingParams(logit_bias={6: 1.0}), token_count=6)
    with pytest.raises(ParameterError, match="stop_token_ids names token 9"):
        pipeline(SamplingParams(stop_token_ids=(9,)))
    for prompt, bad in (([3, 8], "8"), ([-1], "-1")):
        with pytest.raises(PromptError, match=f"token {bad} "):
            pipeline(SamplingParams(repetition_penalty=1.1), prompt=prompt)


def test_nothing_to_do_costs_nothing() -> None:
    logits = row(*range(8))
    assert pipeline().process(logits, [1, 2]) is logits
    assert pipeline(SamplingParams(temperature=1, top_k=2, top_p=0.5, min_p=0.1)).process(logits) is logits
    waited = pipeline(SamplingParams(min_new_tokens=2), eos_ids=(3,))
    assert waited.process(logits, [1, 1]) is logits


def _pipelines() -> dict[str, tuple[SamplingParams, dict[str, Any]]]:
    return {
        "padding": (SamplingParams(), {"token_count": 6}),
        "bias": (SamplingParams(logit_bias={2: 5.0, 3: -100.0}), {}),
        "repetition": (SamplingParams(repetition_penalty=1.5), {"prompt": (1, 2, 2)}),
        "counts": (SamplingParams(frequency_penalty=0.7, presence_penalty=0.3), {"prompt": (1, 2, 2)}),
        "minimum": (SamplingParams(min_new_tokens=4), {"eos_ids": (5, 7)}),
    }


@pytest.mark.parametrize("name", _pipelines())
def test_each_processor_alone(name: str) -> None:
    params, context = _pipelines()[name]
    logits = row(1, 2, -1, 0, 0.5, 6, 7, 8)
    before = logits.copy()
    p = pipeline(params, **context)
    p.push(4)
    p.push(1)
    out = p.process(logits, [1, 0])
    known = {"prompt": context.get("prompt", ()), "generated": [4, 1, 1, 0], "token_count": context.get("token_count")}
    if name == "minimum":
        assert out is logits
        out = p.process(logits, [0])
        known |= {"generated": [4, 1, 0], "ending": (5, 7)}
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, reference_logits(params, logits, **known), rtol=1e-6)
    assert not np.array_equal(out, logits)
    assert np.array_equal(logits, before)


def test_prompt_counts_for_repetition_only() -> None:
    logits = row(*[1.0] * 8)
    both = pipeline(SamplingParams(repetition_penalty=2, presence_penalty=1), prompt=(3, 3)).process(logits)
    assert both.tolist() == [1, 1, 1, 0.5, 1, 1, 1, 1]


def test_end_tokens_wait_for_the_minimum() -> None:
    params = SamplingParams(min_new_tokens=2, stop_token_ids=(1,))
    p = pipeline(params, eos_ids=(0, 2))
    logits = row(9, 8, 7, 1, 0, 0, 0, 0)
    assert p.argmax(logits) == 3
    assert p.argmax(logits, [3]) == 3
    assert p.argmax(logits, [3, 3]) == 0
    p.push(3)
    assert p.argmax(logits, [3]) == 0
    p.push(3)
    assert p.argmax(logits) == 0
    # ignore_eos: the model's own end tokens end nothing, so nothing has to be held back; other stop ids still do.
    free = pipeline(dataclasses.replace(params, ignore_eos=True), eos_ids=(0, 2))
    assert free.argmax(logits) == 0
    assert free.argmax(row(0, 9, 0, 1, 0, 0, 0, 0)) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_bans_and_forces(temperature: float) -> None:  # B049
    rng = np.random.default_rng(0)
    logits = row(0, 30, 1, 2, 3, 0, 0, 0)
    for bias, expected in ((-100.0, False), (100.0, True)):
        p = pipeline(SamplingParams(temperature=temperature, logit_bias={1: bias}))
        drawn = {draw(p.probabilities(logits), rng) for _ in range(200)}
        assert (drawn == {1}) is expected
        assert (1 in drawn) is expected
        assert (p.draft_choose(rng)(logits, [])[0] == 1) is expected  # the draft sees the same bias


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 9]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.1]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {0: 2.5}, {2: -100.0, 3: 0.1}]),
    min_new_tokens=st.sampled_from([0, 3]),
)
IDS = st.lists(st.integers(0, 5), max_size=4)
LOGITS = st.lists(st.integers(-24, 24).map(lambda x: x / 8), min_size=8, max_size=8)  # with ties


@settings(max_examples=200, deadline=None)
@given(params=PARAMS, logits=LOGITS, prompt=IDS, generated=IDS, split=st.integers(0, 4))
def test_law_equals_the_reference(
    params: SamplingParams, logits: list[float], prompt: list[int], generated: list[int], split: int
) -> None:
    known: dict[str, Any] = {"prompt": prompt, "token_count": 6}
    p = pipeline(params, eos_ids=(4,), **known)
    for token in generated[:split]:
        p.push(token)
    law = p.probabilities(row(*logits), generated[split:])
    expected = reference_law(params, logits, generated=generated, ending=(4,), **known)
    near = reference_law(
        dataclasses.replace(params, top_p=min(1.0, params.top_p * (1 + 1e-5)), min_p=params.min_p * (1 - 1e-5)),
        logits, generated=generated, ending=(4,), **known,
    )  # fmt: skip
    assume(np.allclose(near, expected, atol=1e-4))  # not decided by rounding
    assert law.dtype == np.float64
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(law, expected, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(params=PARAMS, logits=LOGITS, prompt=IDS, generated=st.lists(st.integers(0, 5), max_size=6))
def test_pushed_and_extra_tokens_are_the_same_bits(
    params: SamplingParams, logits: list[float], prompt: list[int], generated: list[int]
) -> None:
    # Plain decoding pushes every token before the next row, a round judges a block at once: B023, B034 need equal bits.
    rows = []
    for split in range(len(generated) + 1):
        p = pipeline(params, prompt=prompt, eos_ids=(4,))
        for token in generated[:split]:
            p.push(token)
        p.process(row(*logits))  # as the round does before the last push: fills whatever is cached
        rows.append(p.process(row(*logits) / np.float32(3), generated[split:]).tobytes())
    assert len(set(rows)) == 1


def test_greedy_law() -> None:
    law = pipeline(SamplingParams(top_k=5, top_p=0.5)).probabilities(row(1, 3, 2, 3, 0, 0, 0, 0))
    assert law.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


# --- top_k, top_p, ties ---------------------------------------------------------------------------------------------


def test_ties_keep_the_lowest_ids() -> None:  # B023c, B031
    logits = row(1, 3, 2, 3, 2, 3, 2, 0)
    assert pipeline().argmax(logits) == 1
    for top_k, kept in {
        1: [1],
        2: [1, 3],
        3: [1, 3, 5],
        4: [1, 2, 3, 5],
        5: [1, 2, 3, 4, 5],
        7: [0, 1, 2, 3, 4, 5, 6],
    }.items():
        p = pipeline(SamplingParams(temperature=1, top_k=top_k))
        assert np.flatnonzero(p.probabilities(logits)).tolist() == kept
        rng = np.random.default_rng(0)
        assert np.flatnonzero(p.draft_choose(rng)(logits, [])[1]).tolist() == kept
    equal = pipeline(SamplingParams(temperature=1, top_p=0.5)).probabilities(row(*[2.0] * 8))
    assert np.flatnonzero(equal).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("top_k", [0, -1, 8, 9, 10**6])  # B056: off, or more than there is
def test_top_k_off(top_k: int) -> None:
    law = pipeline(SamplingParams(temperature=1, top_k=top_k)).probabilities(row(*range(8)))
    assert (law > 0).all()


@pytest.mark.parametrize("top_p, top_k", [(0.9, 0), (0.5, 0), (0.999, 0), (0.9, 40), (1 - 1e-9, 0), (1e-9, 0)])
def test_nucleus_of_a_large_vocabulary(top_p: float, top_k: int) -> None:
    values = np.random.default_rng(3).standard_normal(5000).astype(np.float32).round(2) * 2
    params = SamplingParams(temperature=0.9, top_p=top_p, top_k=top_k)
    law = pipeline(params, rows=5000).probabilities(values)
    np.testing.assert_allclose(law, reference_law(params, values.tolist()), atol=1e-9)


def test_rows_without_mass_on_most_ids() -> None:
    logits = np.full(8, -np.inf, np.float32)
    logits[[2, 5]] = 1.0
    law = pipeline(SamplingParams(temperature=0.5, top_k=4, top_p=0.99, min_p=0.1)).probabilities(logits)
    assert law.tolist() == [0, 0, 0.5, 0, 0, 0.5, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad, word", [(NAN, "NaN"), (INF, "infinite")])
def test_damaged_target_rows(temperature: float, bad: float, word: str) -> None:
    p = pipeline(SamplingParams(temperature=temperature), token_count=6)
    with pytest.raises(ModelError, match=word):
        p.probabilities(row(0, 1, bad, 3, 4, 5, 6, 7))
    with pytest.raises(ModelError, match=word):
        p.argmax(row(0, 1, bad, 3, 4, 5, 6, 7))
    with pytest.raises(ModelError, match="no finite"):
        p.argmax(row(*[-INF] * 6, 1, 1))
    assert p.argmax(row(0, 1, 2, 3, 4, 5, bad, bad)) == 5  # padding rows do not matter


# --- draw -----------------------------------------------------------------------------------------------------------


class Scripted:
    """Stands in for a numpy Generator; returns given numbers."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)


def test_draw_is_exact() -> None:
    law = np.array([0.0, 0.125, 0.0, 0.5, 0.25, 0.0, 0.125, 0.0])
    steps = 64
    for scale in (1.0, 3.0, 1e-12):  # any positive sum: residuals are not normalised
        drawn = [draw(law * scale, Scripted(i / steps)) for i in range(steps)]
        assert np.bincount(drawn, minlength=8).tolist() == (law * steps).tolist()
    large = np.zeros(1000)  # several blocks, one of them empty
    large[[3, 255, 256, 600, 601, 999]] = [8, 4, 16, 2, 1, 1]
    for weights in (large, large.astype(np.float32)):
        drawn = [draw(weights, Scripted(i / 32)) for i in range(32)]
        assert np.bincount(drawn, minlength=1000).tolist() == large.tolist()
    for value in (0.0, 0.5, 1 - 2**-53):
        assert law[draw(law, Scripted(value))] > 0
    top = np.nextafter(1.0, 0.0)
    for seed in range(300):  # the largest number of a generator must not fall off the end of a block
        weights = np.random.default_rng(seed).random(700) ** 8
        weights[np.random.default_rng(seed).random(700) < 0.7] = 0
        for value in (top, 0.0, float(weights[:256].sum() / weights.sum()), float(weights[:512].sum() / weights.sum())):
            assert weights[draw(weights, Scripted(value))] > 0


def test_unseeded_generators_and_global_state() -> None:  # B047: nothing here touches global generators
    before = (np.random.get_state()[1].tobytes(), random.getstate())  # noqa: NPY002
    p = pipeline(SamplingParams(temperature=1))
    rng = np.random.default_rng()
    for _ in range(5):
        p.draft_choose(rng)(row(*range(8)), [])
        draw(p.probabilities(row(*range(8))), rng)
    assert before == (np.random.get_state()[1].tobytes(), random.getstate())  # noqa: NPY002


# --- the draft's choose ---------------------------------------------------------------------------------------------


def test_choose_returns_the_row_it_drew_from() -> None:  # B043
    p = pipeline(SamplingParams(temperature=0.7, top_k=4), token_count=7)
    logits = np.random.default_rng(5).standard_normal(8).astype(np.float16)  # a half-precision draft
    for seed in range(50):
        token, q = p.draft_choose(np.random.default_rng(seed))(logits, [])
        assert q is not None
        assert q.dtype == np.float32
        assert q.shape == (8,)
        assert q.sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)
        assert q[token] > 0
        assert token == draw(q.astype(np.float64), np.random.default_rng(seed))
    np.testing.assert_array_equal(q, p.probabilities(logits.astype(np.float32)).astype(np.float32))


def test_choose_greedy() -> None:
    choose = pipeline().draft_choose(np.random.default_rng(0))
    assert choose(row(1, 5, 5, 0, 0, 0, 0, 0), []) == (1, None)


def test_choose_applies_parameters_at_its_position() -> None:
    p = pipeline(SamplingParams(presence_penalty=2, min_new_tokens=2), eos_ids=(0,))
    choose = p.draft_choose(np.random.default_rng(0))
    logits = row(9, 5, 4, 1, 0, 0, 0, 0)
    assert choose(logits, [])[0] == 1
    assert choose(logits, [1])[0] == 2
    assert choose(logits, [1, 2])[0] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_rows_of_other_lengths(temperature: float) -> None:  # B013, B062
    p = pipeline(SamplingParams(temperature=temperature), rows=8, token_count=6)
    choose = p.draft_choose(np.random.default_rng(0))
    for logits in (
        row(0, 1, 2),  # a reduced vocabulary
        row(0, 1, 2, 3, 3, 3, 99, 99),  # padding rows that would win
        row(0, 1, 2, 3, 3, 3, 99, 99, 99, 99, NAN),  # more rows than the target has
        row(0, 1, 2, 3, 3, 3),
    ):
        for _ in range(30):
            token, q = choose(logits, [])
            assert 0 <= token < min(6, len(logits))
            if q is not None:
                assert q.shape == (8,)
                np.testing.assert_allclose(
                    q, reference_law(p.params, [*logits[:6], *[-INF] * (8 - len(logits[:6]))]), atol=1e-6
                )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [4, 8, 12])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_damaged_draft_rows(temperature: float, length: int, bad: float) -> None:  # B052
    choose = pipeline(SamplingParams(temperature=temperature)).draft_choose(np.random.default_rng(0))
    logits = np.full(length, bad if bad == -INF else 0.0, np.float32)
    logits[2] = bad
    with pytest.raises(InvalidLogits):
        choose(logits, [])
    with pytest.raises(InvalidLogits):
        choose(np.zeros((1, 8), np.float32), [])
    with pytest.raises(InvalidLogits):
        choose(np.zeros(0, np.float32), [])


def test_draft_row_with_nothing_left() -> None:
    """All a reduced head knows is the end token, which is not allowed yet: no guess, no crash."""
    choose = pipeline(SamplingParams(min_new_tokens=1), eos_ids=(0,)).draft_choose(np.random.default_rng(0))
    with pytest.raises(InvalidLogits):
        choose(row(5), [])


# --- logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 1, 3, 8, 50])
def test_token_logprob(top: int) -> None:  # B059, B061
    logits = row(1, 3, -2, 3, 0.5, -INF, 100, 2)
    total = 100 + math.log(sum(math.exp(x - 100) for x in logits))
    entry = token_logprob(logits, 3, top)
    assert entry.token_id == 3
    assert entry.logprob == pytest.approx(3 - total)
    assert entry.margin == 97
    order = sorted(range(8), key=lambda i: (-logits[i], i))[:top]
    assert [i for i, _ in entry.top] == order
    assert [p for _, p in entry.top] == pytest.approx([logits[i] - total for i in order])
    assert token_logprob(row(1, 1, 0), 0, 1).margin == 0  # a tie
    with pytest.raises(ModelError, match="NaN"):
        token_logprob(row(1, NAN), 0, 0)


# --- do these tests notice? -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new, check",
    [
        ("[: count - len(above)]", "[::-1][: count - len(above)]", test_ties_keep_the_lowest_ids),
        ('side="right"', 'side="left"', test_draw_is_exact),
        ("return order[: int(np.argmax(reached)) + 1]", "return order[: int(np.argmax(reached)) + 2]", "nucleus"),
        (
            "self._generated + len(extra) < self",
            "self._generated + len(extra) <= self",
            test_end_tokens_wait_for_the_minimum,
        ),
        ("out = np.array(row, np.float32)", "out = row", "each"),
        ("counts = counts + np.bincount", "counts = np.bincount", "each"),
    ],
)
def test_planted_faults(monkeypatch: pytest.MonkeyPatch, old: str, new: str, check: Any) -> None:
    broken = mutant(sampling, old, new)
    monkeypatch.setitem(globals(), "LogitsPipeline", broken.LogitsPipeline)
    monkeypatch.setitem(globals(), "draw", broken.draw)
    if check == "nucleus":
        check = lambda: test_nucleus_of_a_large_vocabulary(0.5, 0)  # noqa: E731
    elif check == "each":
        check = lambda: [test_each_processor_alone(name) for name in _pipelines()]  # noqa: E731
    with pytest.raises(AssertionError):
        check()
