"""The head draft: its guesses are the architecture's, whatever the conversation went through."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafts.base import FloatArray
from drafts.head import HeadDraft
from tests.support.engines import ENGINES, load
from tests.support.head_reference import HeadReference
from tests.support.head_talk import BEST, SPEC, TOKENS, Talk, make
from tests.support.tiny import write_tiny
from tests.support.tiny_head import random_head, tiny_spec

# What it proposes


@pytest.mark.parametrize("window", [1, 5, 8, 24])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("float_products")
def test_any_history_of_rounds_absences_and_cuts_gives_the_architectures_guesses(window: int, seed: int) -> None:
    rng = random.Random(100 * window + seed)
    _draft, talk = make(tiny_spec(window=window, vocab_rows=64))
    talk.say(rng.randrange(2, 40))
    for _ in range(100):
        gamma = rng.randrange(1, 5)
        assert talk.error(talk.session.propose(talk.tokens, gamma, BEST), talk.expected(gamma)) < 1e-4
        kind = rng.random()
        if kind < 0.1:
            talk.cut(rng.randrange(max(2, len(talk.tokens) - 12), len(talk.tokens) + 1))
        elif kind < 0.15:
            talk.say(rng.randrange(60, 120))  # an absence, longer than the window and the slack of the buffers
        elif kind < 0.9:
            talk.say(rng.randrange(1, 6))
        if talk.states.begin >= len(talk.tokens) - 1:  # cut into what had been dropped
            assert talk.session.level(talk.tokens) == 0
            talk.say(3)


@pytest.mark.usefixtures("float_products")
def test_a_cut_far_into_the_past_leaves_a_shorter_context() -> None:
    _, talk = make()
    for _ in range(60):
        talk.say(5)
        talk.session.propose(talk.tokens, 2, BEST)
    talk.cut(talk.states.begin + 4)
    assert len(talk.states) == 3 < SPEC.window
    assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-4


@pytest.mark.usefixtures("float_products")
def test_rows_that_nobody_read_are_not_missed() -> None:
    _, talk = make()
    talk.say(6)
    talk.session.propose(talk.tokens, 2, BEST)
    talk.say(4, seen=False)
    assert talk.session.level(talk.tokens) == 0
    assert talk.session.propose(talk.tokens, 3, BEST).tokens == []
    talk.say(2)
    assert talk.states.begin > 6
    assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-4


@pytest.mark.usefixtures("float_products")
def test_far_positions() -> None:
    """Beyond the first rotary table."""
    _, talk = make()
    talk.tokens = [5] * 5000
    talk.hidden[4999] = np.ones(32, np.float32)
    for _ in range(3):
        talk.say(3)
        assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.usefixtures("float_products")
def test_the_targets_own_states_and_tables_on_both_engines(tmp_path: Path, engine: str, tied: bool) -> None:
    target = load(write_tiny(tmp_path, head_dim=16, tie_word_embeddings=tied), engine)
    spec = tiny_spec(window=8)
    weights = random_head(spec, seed=4)
    talk = Talk(HeadDraft("tiny", spec, weights, target, threads=1), target, weights)
    tokens = random.Random(5).choices(range(280), k=30)
    hidden = np.array(target.forward(tokens, target.new_cache(), logits=0, hidden=True).hidden)
    talk.tokens, talk.hidden = tokens, dict(enumerate(hidden))
    talk.states.write(0, hidden[:-1])
    assert talk.error(talk.session.propose(tokens, 4, BEST), talk.expected(4)) < 1e-4


@pytest.mark.parametrize("shape", [(2, 1, 16), (4, 4, 16), (2, 2, 48), (6, 2, 16)])
@pytest.mark.usefixtures("float_products")
def test_other_numbers_of_heads(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, width = shape
    spec = tiny_spec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width, intermediate_size=96, rope_theta=500.0, window=6
    )
    _, talk = make(spec)
    for _ in range(4):
        talk.say(5)
        assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-4


def test_with_rounded_activations_guesses_differ_in_near_ties_only() -> None:
    _, talk = make()
    errors, same = [], []
    for _ in range(50):
        talk.say(3)
        proposal = talk.session.propose(talk.tokens, 3, BEST)
        for token, confidence, step in zip(
            proposal.tokens, proposal.confidences, talk.expected(3, proposal.tokens), strict=True
        ):
            errors.append(abs(confidence - step.confidence))
            same.append(token == talk.vocab[step.place])
            assert same[-1] or step.margin < 0.1 * np.ptp(step.logits)
    assert np.mean(errors) < 0.05
    assert np.mean(same) > 0.9


SABOTAGE: dict[str, Callable[[HeadReference], None]] = {
    "a window that is too long": lambda r: setattr(r, "spec", replace(r.spec, window=9)),
    "a window that is too short": lambda r: setattr(r, "spec", replace(r.spec, window=7)),
    "other rotary frequencies": lambda r: setattr(r, "spec", replace(r.spec, rope_theta=9000.0)),
    "another epsilon": lambda r: setattr(r, "spec", replace(r.spec, rms_norm_eps=0.1)),
    "another temperature": lambda r: setattr(r, "temperature", 1.31),
    "norms the wrong way round": lambda r: setattr(
        r, "vectors", {**r.vectors, "embed_norm": r.vectors["hidden_norm"], "hidden_norm": r.vectors["embed_norm"]}
    ),
}


@pytest.mark.parametrize("fault", SABOTAGE)
@pytest.mark.usefixtures("float_products")
def test_the_comparison_can_fail(fault: str) -> None:
    _, talk = make()
    talk.say(20)
    proposal = talk.session.propose(talk.tokens, 3, BEST)
    assert talk.error(proposal, talk.expected(3)) < 1e-4
    SABOTAGE[fault](talk.reference)
    window = 8 + (fault == "a window that is too long")
    hidden = np.array([talk.hidden[position] for position in range(19 - window, 19)])
    assert talk.error(proposal, talk.reference.propose(talk.tokens, hidden, 19 - window, 3)) > 2e-4


# Confidence


@pytest.mark.usefixtures("float_products")
def test_temperature_changes_confidences_and_no_token() -> None:
    (_, cool), (_, warm) = make(temperature=0.5), make(temperature=3.0)
    for talk in (cool, warm):
        talk.say(10)
    first, second = (talk.session.propose(talk.tokens, 4, BEST) for talk in (cool, warm))
    assert first.tokens == second.tokens
    assert all(a > b for a, b in zip(first.confidences, second.confidences))


@pytest.mark.usefixtures("float_products")
def test_the_block_ends_before_the_product_of_confidences_falls_below_the_floor() -> None:
    _, talk = make(temperature=0.3)
    lengths = set()
    for _ in range(30):
        talk.say(2)
        whole = talk.session.propose(talk.tokens, 5, BEST)
        for floor in (0.0, 0.01, 0.1, 0.3, 0.9):
            reached = np.cumprod(whole.confidences)
            if np.abs(reached - floor).min() < 2e-3:
                continue  # the last bits would decide
            kept = int((reached >= floor).sum())
            cut = talk.session.propose(talk.tokens, 5, BEST, floor=floor)
            assert cut.tokens == whole.tokens[:kept]
            assert cut.confidences == pytest.approx(whole.confidences[:kept], abs=1e-3)
            lengths.add(kept)
    assert len(lengths) > 3


def test_asking_again_changes_nothing() -> None:
    _, talk = make()
    talk.say(12)
    first = talk.session.propose(talk.tokens, 4, BEST)
    again = talk.session.propose(talk.tokens, 4, BEST)
    assert again.tokens == first.tokens
    assert again.confidences == pytest.approx(first.confidences, abs=1e-3)  # one row is computed by another kernel
    assert talk.session.propose(talk.tokens, 2, BEST).tokens == first.tokens[:2]


# Where a request picks the token


@pytest.mark.usefixtures("float_products")
def test_rows_are_handed_over_and_what_was_picked_is_followed() -> None:
    _, talk = make()
    rng = random.Random(0)
    for _ in range(20):
        talk.say(3)
        seen: list[FloatArray] = []

        def choose(row: FloatArray, proposed: Sequence[int], seen: list[FloatArray] = seen) -> tuple[int, Any]:
            assert len(proposed) == len(seen)
            seen.append(row.copy())
            return rng.randrange(TOKENS), row.copy()  # also tokens that it cannot propose itself

        proposal = talk.session.propose(talk.tokens, 4, choose)  # type: ignore[arg-type]
        steps = talk.expected(4, proposal.tokens)
        for row, step, confidence in zip(seen, steps, proposal.confidences, strict=True):
            assert row.shape == (TOKENS,)
            assert np.abs(row[talk.vocab] - step.logits).max() < 1e-3
            assert np.isneginf(np.delete(row, talk.vocab)).all()
            assert confidence == pytest.approx(step.confidence, abs=1e-4)


def test_a_floor_looks_at_the_law_and_not_at_the_token_that_was_picked() -> None:
    _, talk = make(temperature=0.3)
    talk.say(12)
    whole = talk.session.propose(talk.tokens, 1, BEST)
    for token in range(0, TOKENS, 7):
        proposal = talk.session.propose(
            talk.tokens, 1, lambda row, proposed, token=token: (token, None), floor=whole.confidences[0] * 0.999
        )
        assert proposal.tokens == [token]
        assert proposal.confidences == pytest.approx(whole.confidences, abs=1e-3)
