"""Whatever drafts and whatever the schedule: the text is the target's own (faults.md, Losslessness)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafts import NgramDraft, StandaloneDraft
from edgespec.decoding import round as round_module
from edgespec.decoding.acceptance import Outcome, accept
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.sampling import LogitsPipeline
from edgespec.models.base import Decoder
from predictor import AutoPlanner
from tests.support.engines import ENGINES, load
from tests.support.scripted import (
    DRAFTERS,
    TOKENS,
    ScheduledPlanner,
    ScriptedDraft,
    TableDecoder,
    ToyDecoder,
    ToyTokenizer,
    anti,
    drafter,
    failing,
    mixed,
    oracle,
    plain_greedy,
    run,
    self_draft,
    session,
    short,
)
from tests.support.tiny import write_tiny

LENGTHS = (1, 2, 7, 8, 9, 60)
COUNTS = (0, 1, 2, 7, 40)
GAMMAS = (0, 1, 2, 3, 5, 8)


def prompt_of(length: int) -> list[int]:
    return [2 + (7 * i * i + 3) % (TOKENS - 2) for i in range(length)]


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("gamma", [*GAMMAS, "random"])
def test_the_shared_sweep(kind: str, gamma: int | str) -> None:
    target, reference = ToyDecoder(), ToyDecoder()
    for length in LENGTHS:
        prompt = prompt_of(length)
        plain = plain_greedy(reference, prompt, max(COUNTS))
        for count in COUNTS:
            draft = drafter(kind, target, prompt + plain)
            rng = random.Random(length * 100 + count)
            schedule = (
                [(draft.name, rng.choice(GAMMAS)) for _ in range(50)] if gamma == "random" else [(draft.name, gamma)]
            )
            result = run(session(target, [draft], planner=ScheduledPlanner(schedule)), prompt, max_new_tokens=count)
            assert list(result.token_ids) == plain[:count], (length, count)
            assert result.finish_reason == "length"
            proposed = result.stats.proposed_tokens
            if kind in ("self", "oracle", "short"):
                assert result.stats.accepted_tokens == proposed
            if kind in ("anti", "empty"):
                assert result.stats.accepted_tokens == 0


# B026, B028
@pytest.mark.parametrize("kind", DRAFTERS)
def test_prompts_of_one_token_and_of_one_token_repeated(kind: str) -> None:
    target = ToyDecoder()
    for prompt in [*([i] for i in range(0, TOKENS, 7)), [1, 1, 1], [5] * 9]:
        plain = plain_greedy(ToyDecoder(), prompt, 12)
        for gamma in (1, 4):
            result = run(session(target, [drafter(kind, target, prompt + plain)], gamma), prompt, max_new_tokens=12)
            assert list(result.token_ids) == plain


# B029
def test_twenty_times_on_and_off() -> None:
    target = ToyDecoder()
    prompt = prompt_of(9)
    seen = set()
    for number in range(20):
        chat = session(target, [NgramDraft(), self_draft(target)], number % 2 * 4)
        seen.add(hashlib.sha256(bytes(run(chat, prompt, max_new_tokens=60).token_ids)).hexdigest())
    assert len(seen) == 1


# B034
@pytest.mark.parametrize("gamma", [1, 2, 3, 5, 8, 16])
def test_long_text_for_any_gamma(gamma: int) -> None:
    target = ToyDecoder(max_positions=600)
    prompt = prompt_of(7)
    plain = plain_greedy(ToyDecoder(max_positions=600), prompt, 300)
    for draft in (self_draft(target), mixed(prompt + plain, lambda at: at * at % 7 == 1), NgramDraft(4, 1)):
        assert list(run(session(target, [draft], gamma), prompt, max_new_tokens=300).token_ids) == plain


@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_of_drafts_and_gammas(seed: int) -> None:
    """Switches in every order, failures on the way, an automatic planner: one text."""
    rng = random.Random(seed)
    target = ToyDecoder()
    prompt = prompt_of(rng.randrange(1, 20))
    plain = plain_greedy(ToyDecoder(), prompt, 120)
    text = prompt + plain
    drafts = [
        self_draft(target),
        self_draft(ToyDecoder(seed=5), "stranger"),
        NgramDraft(3, 1),
        oracle(text),
        anti(text),
        short(text),
        mixed(text, lambda at: at % 3 == 0),
        ScriptedDraft(lambda t, gamma: [rng.randrange(-2, TOKENS + 5) for _ in range(rng.randrange(12))], "noise"),
        failing(RuntimeError("now and then")),
    ]
    names = [draft.name for draft in drafts]
    planner: Any = ScheduledPlanner([(rng.choice([*names, None]), rng.randrange(9)) for _ in range(100)])
    for plan in (planner, AutoPlanner()):
        result = run(session(target, drafts, planner=plan), prompt, max_new_tokens=120)
        assert list(result.token_ids) == plain


# B023, B031
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "top_k": 1, "seed": 1}, {"temperature": 1.0, "top_p": 1e-9}]
)
def test_exact_ties_go_to_the_lowest_id_in_every_path(params: dict[str, Any]) -> None:
    table = np.zeros((8, 8))
    table[:, [2, 5, 7]] = 3.0
    table[2, :] = [0, 0, 0, 4, 4, 0, 4, 0]
    target = TableDecoder(table)
    tokenizer = ToyTokenizer(8)
    plain = [2, 3, 2, 3, 2, 3, 2, 3]
    for draft in (self_draft(target, token_count=8), oracle([1, *plain]), NgramDraft(2, 1)):
        result = run(session(target, [draft], 3, tokenizer=tokenizer), [1], max_new_tokens=8, **params)
        assert list(result.token_ids) == plain
        assert result.stats.acceptance_rate > 0.5
    # The other tied tokens are wrong guesses, in the same way.
    other = ScriptedDraft(lambda t, gamma: [5 if t[-1] != 2 else 6] * gamma)
    result = run(session(target, [other], 3, tokenizer=tokenizer), [1], max_new_tokens=8, **params)
    assert list(result.token_ids) == plain
    assert result.stats.accepted_tokens == 0


# B035
@pytest.mark.parametrize("dtype", [np.float16, np.int8])
def test_a_draft_in_another_precision(dtype: Any) -> None:
    target, twin = ToyDecoder(), self_draft(ToyDecoder())
    head = twin.decoder._head  # type: ignore[attr-defined]
    scale = np.float32(1.0 if dtype is np.float16 else np.abs(head).max() / 127)
    twin.decoder._head = (head / scale).astype(dtype).astype(np.float32) * scale  # type: ignore[attr-defined]
    plain = plain_greedy(ToyDecoder(), prompt_of(8), 100)
    result = run(session(target, [twin], 4), prompt_of(8), max_new_tokens=100)
    assert list(result.token_ids) == plain
    assert result.stats.acceptance_rate > 0.5


# B038
def test_nothing_proposed_in_rounds_chosen_at_random() -> None:
    target = ToyDecoder()
    prompt = prompt_of(8)
    plain = plain_greedy(ToyDecoder(), prompt, 80)
    text, rng = prompt + plain, random.Random(3)
    emitted: list[tuple[bool, int]] = []
    draft = ScriptedDraft(lambda t, gamma: [] if quiet[len(t)] else text[len(t) : len(t) + gamma])
    quiet = [rng.random() < 0.5 for _ in range(len(text))]
    generation = Generation(session(target, [draft], 3), prompt, SamplingParams(max_new_tokens=80))
    generation.step()
    more = True
    while more:
        length = len(generation.session.tokens)
        more = generation.step()
        emitted.append((quiet[length], len(generation.session.tokens) - length))
    assert list(generation.result.token_ids) == plain
    assert all(count == 1 for silent, count in emitted if silent)
    assert any(count == 4 for silent, count in emitted if not silent)


# Engines


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def folder(architecture: str, seed: int = 0, **changes: Any) -> Path:
        key = f"{architecture}-{seed}-{sorted(changes.items())}"
        if key not in made:
            made[key] = write_tiny(tmp_path_factory.mktemp("tiny"), architecture, seed=seed, **changes)
        return made[key]

    return folder


def greedy_reference(decoder: Decoder, prompt: Sequence[int], count: int, tokens: int) -> list[int]:
    cache, out, feed = decoder.new_cache(), [], list(prompt)
    for _ in range(count):
        row = np.array(decoder.forward(feed, cache, logits=1).logits[0])
        feed = [int(np.argmax(row[:tokens]))]
        out += feed
    return out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen3", {}), ("mistral", {"sliding_window": 8})],
    ids=["llama", "tied", "qwen3", "window"],
)
def test_b023_b037_engines_in_float32(
    engine: str, architecture: str, changes: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    folder = tiny(architecture, head_dim=16, **changes)
    target, twin = load(folder, engine), load(folder, engine)
    stranger = load(tiny("llama", seed=4, head_dim=16), engine)
    tokenizer = ToyTokenizer(280)
    prompt = [3 + (11 * i) % 270 for i in range(6)]
    plain = greedy_reference(target, prompt, 60, 280)
    text = prompt + plain
    drafts = {
        "self": StandaloneDraft("self", twin, 280),
        "stranger": StandaloneDraft("stranger", stranger, 280),
        "oracle": oracle(text),
        "anti": anti(text, tokens=280),
        "ngram": NgramDraft(3, 1),
    }
    for name, draft in drafts.items():
        for schedule in ([(name, 1)], [(name, 5)], [(name, 4), (None, 0), (name, 2), (None, 0), (None, 0)]):
            planner = ScheduledPlanner(schedule)
            chat = session(target, [draft], planner=planner, tokenizer=tokenizer, eos_ids=())
            result = run(chat, prompt, max_new_tokens=60)
            assert list(result.token_ids) == plain, (name, schedule)
            if name in ("self", "oracle"):
                assert result.stats.acceptance_rate == 1.0
    for decoder in (target, twin, stranger):
        decoder.close()


# Mutations of the greedy path


@pytest.mark.parametrize("fault", ["first guess unjudged", "bonus from the wrong row", "cut one late"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(tokens: Any, rows: Any, logits: Any, pipeline: LogitsPipeline, rng: Any) -> Outcome:
        outcome = accept(tokens, rows, logits, pipeline, rng)
        if fault == "first guess unjudged" and tokens and outcome.accepted == 0:
            return Outcome(1, pipeline.argmax(logits[1]), bonus=False)
        if fault == "bonus from the wrong row" and tokens and outcome.bonus:
            return Outcome(outcome.accepted, pipeline.argmax(logits[-2]), bonus=True)
        if fault == "cut one late" and outcome.accepted < len(tokens):
            return Outcome(outcome.accepted + 1, outcome.token, bonus=False)
        return outcome

    monkeypatch.setattr(round_module, "accept", planted)
    with pytest.raises(AssertionError):
        test_the_shared_sweep("mixed", 3)
