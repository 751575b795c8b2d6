"""With a head the text is the target's own: token by token when greedy, in law when sampled (invariant 1)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from drafts import head as head_module
from drafts import head_session
from drafts.base import Choose, Proposal
from drafts.head import HeadDraft
from drafts.head_session import HeadSession
from drafts.states import HiddenStates
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.sampling import LogitsPipeline
from edgespec.decoding.session import Session
from edgespec.models.base import Decoder
from edgespec.models.tokenizer import load_tokenizer
from predictor.planner import FixedPlanner, Plan
from tests.support.engines import load
from tests.support.mutants import mutant
from tests.support.scripted import PROMPT, ScheduledPlanner, ToyDecoder, ToyTokenizer, plain_greedy, run, session
from tests.support.tiny import write_tiny
from tests.support.tiny_head import fitted_head, random_head, tiny_spec

TURNS = [[5, 6, 7, 8], [5, 6, 7, 8, 40, 41], [5, 6, 7, 30, 31, 32], [9, 8], [5, 6]]


def plain(target: Decoder, tokens: int, prompt: Sequence[int], count: int) -> list[int]:
    """One token a forward, by a loop of its own."""
    cache, out, feed = target.new_cache(), [], list(prompt)
    for _ in range(count):
        row = np.array(target.forward(feed, cache, logits=1).logits[0][:tokens])
        feed = [int(row.argmax())]
        out += feed
    return out


# Greedy, on real engines


@pytest.fixture(scope="module", params=[("cpu", "float32"), ("cpu", "exact"), ("torch", "float32")], ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    engine, weight_format = request.param
    path = write_tiny(tmp_path_factory.mktemp("model"), head_dim=16)
    return load(path, engine, weight_format), load_tokenizer(path)


@pytest.mark.parametrize("gamma", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["random", "fitted"])
def test_greedy_text_is_the_targets_for_any_head_and_gamma(model: tuple[Decoder, Any], kind: str, gamma: int) -> None:
    target, tokenizer = model
    text = TURNS[0] + plain(target, tokenizer.size, TURNS[0], 60)
    weights = random_head(seed=gamma) if kind == "random" else fitted_head(target, [text])
    head = HeadDraft("head", tiny_spec(), weights, target, threads=1)
    chat = Session(target, tokenizer, [head], planner=FixedPlanner("head", gamma), eos_ids=())
    accepted = 0
    for turn in TURNS:
        result = run(chat, turn, max_new_tokens=40, ignore_eos=True)
        assert list(result.token_ids) == plain(target, tokenizer.size, turn, 40)
        accepted += result.stats.accepted_tokens
        assert result.stats.fallback_share == 0
    assert chat.statuses["head"].active
    assert accepted > 10 or kind == "random"


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {11: 6.0, 40: -8.0}},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.8, "presence_penalty": 0.4},
        {"min_new_tokens": 12, "stop_token_ids": [13, 20]},
    ],
)
def test_whatever_changes_the_targets_choice_changes_the_drafts_too(params: dict[str, Any]) -> None:
    target = ToyDecoder(hidden=32)
    head = toy_head(target)
    bare = session(target, [], 0)
    chat = session(target, [head], 4)
    results = [run(s, PROMPT, max_new_tokens=50, **params) for s in (bare, chat)]
    assert results[0].token_ids == results[1].token_ids
    assert results[1].stats.accepted_tokens > 0


@pytest.mark.parametrize("floor", [0.05, 0.3, 0.6, 1.0])
def test_any_floor_gives_the_same_text(floor: float) -> None:
    target = ToyDecoder(hidden=32)
    planner = ScheduledPlanner([])
    planner.plan = lambda candidates, limit: Plan("head", 5, floor)  # type: ignore[method-assign]
    chat = session(target, [toy_head(target)], planner=planner)
    result = run(chat, PROMPT, max_new_tokens=80)
    assert list(result.token_ids) == plain_greedy(target, PROMPT, 80)
    lengths = {observation.drafted for observation in planner.seen}
    assert len(lengths) > 1 or floor == 1.0


def toy_head(target: ToyDecoder, temperature: float = 1.0) -> HeadDraft:
    spec = tiny_spec(vocab_rows=48, window=12)
    prompts = np.random.default_rng(0).integers(2, 60, (12, 4)).tolist()
    texts = [prompt + plain_greedy(target, prompt, 60) for prompt in prompts]
    return HeadDraft("head", spec, fitted_head(target, texts, spec), target, temperature=temperature, threads=1)


def test_guesses_are_those_of_a_head_that_saw_only_this_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over turns, reuse, cuts, plain rounds and rounds of others: as if the text had been read from its start."""
    target = ToyDecoder(hidden=32)
    head, seen = toy_head(target), []
    propose = HeadSession.propose

    def compared(self: HeadSession, tokens: Sequence[int], gamma: int, choose: Choose, **more: Any) -> Proposal:
        proposal = propose(self, tokens, gamma, choose, **more)
        states = HiddenStates(32, 500)
        states.write(0, target.hidden_states(tokens)[:-1])
        fresh = propose(HeadSession(head, states), tokens, gamma, choose, **more)
        seen.append(len(proposal))
        assert proposal.tokens == fresh.tokens
        assert proposal.confidences == pytest.approx(fresh.confidences, abs=0.02)
        return proposal

    monkeypatch.setattr(HeadSession, "propose", compared)
    chat = session(target, [head], planner=ScheduledPlanner([("head", 3), (None, 0), (None, 0), ("head", 5)]))
    for turn in (*TURNS, [*TURNS[1], *range(2, 40)]):
        for count in (30, 7):
            assert list(run(chat, turn, max_new_tokens=count).token_ids) == plain_greedy(target, turn, count)
    assert not chat.statuses["head"]._told
    assert len(seen) > 50


def test_hidden_states_that_become_nan_give_the_head_up_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    target = ToyDecoder(hidden=32)
    head = toy_head(target)
    chat = session(target, [head], 3)
    write = HiddenStates.write
    try:
        HiddenStates.write = lambda self, start, rows: write(self, start, rows * np.float32(np.nan))  # type: ignore[method-assign]
        result = run(chat, PROMPT, max_new_tokens=30)
    finally:
        HiddenStates.write = write  # type: ignore[method-assign]
    assert list(result.token_ids) == plain_greedy(target, PROMPT, 30)
    assert "InvalidLogits" in str(chat.statuses["head"])
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


# Sampled

VOCAB, SAMPLES = 6, 800
LAW = {"temperature": 0.8}


def exact_law(
    target: ToyDecoder, prompt: list[int], count: int, params: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `count` tokens, from one forward over each."""
    law: dict[tuple[int, ...], float] = {}
    for tail in itertools.product(range(VOCAB), repeat=count):
        logits = target.forward([*prompt, *tail], target.new_cache()).logits[len(prompt) - 1 :]
        pipeline = LogitsPipeline(
            SamplingParams(max_new_tokens=count, **params),
            vocab_rows=VOCAB,
            token_count=VOCAB,
            eos_ids=(),
            prompt=prompt,
        )
        chance = 1.0
        for token, row in zip(tail, logits):
            chance *= float(pipeline.probabilities(row)[token])
            pipeline.push(token)
        if chance > 0:
            law[tail] = chance
    return law


def confident_head(target: ToyDecoder) -> HeadDraft:
    """Sure of itself, and unable to propose token 0."""
    spec = tiny_spec(vocab_rows=VOCAB - 1, window=12)
    return HeadDraft("head", spec, random_head(spec, range(1, VOCAB), 2, 0.08), target, temperature=1.5, threads=1)


def p_value(plans: Sequence[Plan], params: dict[str, Any]) -> tuple[float, Counter[int]]:
    """Chi-squared test of the joint law of the first 3 tokens, and how long the blocks were."""
    target, prompt = ToyDecoder(VOCAB, hidden=32, sharpness=0.25), [1, 3, 2]
    law = exact_law(target, prompt, 3, params)
    chat = session(target, [confident_head(target)], tokenizer=ToyTokenizer(VOCAB), eos_ids=())
    seen: Counter[tuple[int, ...]] = Counter()
    blocks: Counter[int] = Counter()
    for number in range(SAMPLES):
        turns, planner = itertools.cycle(plans), ScheduledPlanner([])
        planner.plan = lambda candidates, limit, turns=turns: next(turns)  # type: ignore[method-assign]
        chat.planner = planner
        generation = Generation(chat, prompt, SamplingParams(max_new_tokens=4, seed=number, **params))
        while generation.step():
            pass
        seen[generation.result.token_ids[:3]] += 1
        blocks.update(observation.drafted for observation in planner.seen)
    assert set(seen) <= set(law)
    large = [key for key in law if law[key] * SAMPLES >= 5]
    expected, observed = [law[key] * SAMPLES for key in large], [seen[key] for key in large]
    expected.append(SAMPLES - sum(expected))
    observed.append(SAMPLES - sum(observed))
    return float(stats.chisquare(observed, expected).pvalue), blocks


@pytest.mark.parametrize(
    ("params", "floor"),
    [(LAW, 0.0), (LAW, 0.3), ({"temperature": 1.2, "top_k": 4}, 0.5)],
    ids=["plain", "early", "top_k"],
)
def test_sampled_text_has_the_targets_law_also_where_blocks_end_early(params: dict[str, Any], floor: float) -> None:
    p, blocks = p_value([Plan("head", 3, floor)], params)
    assert p > 1e-3
    assert len(blocks) > (1 if floor else 0)


_APPEND = "            proposal.tokens.append(token)\n"
SABOTAGE = {
    "an unlikely token ends the block": (
        _APPEND,
        "            if row is not None and row[token] < 0.3:\n                break\n" + _APPEND,
    ),
    "the draft's best token is said to be drawn": (
        "            token, row = (own, None) if argmax else choose(steps.row(), proposal.tokens)\n",
        "            token, row = own, choose(steps.row(), proposal.tokens)[1]\n",
    ),
}


@pytest.mark.parametrize("fault", SABOTAGE)
def test_the_test_of_the_law_sees_a_sabotaged_head(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled = mutant(head_session, *SABOTAGE[fault])
    monkeypatch.setattr(head_module, "HeadSession", spoiled.HeadSession)
    assert p_value([Plan("head", 3, 0.3)], LAW)[0] < 1e-6
