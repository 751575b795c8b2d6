"""Answers of the engine on a tiny model with the real CPU engine."""

from __future__ import annotations

import threading
import time

import pytest

from edgespec import SamplingParams
from edgespec.errors import PromptError
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import GREEDY, QUESTION, SHAPE, load, plain


@pytest.mark.parametrize("draft", ["auto", "off", "ngram", "target"])
@pytest.mark.parametrize("gamma", [0, 1, 4, "auto"])
def test_every_draft_and_gamma_gives_the_plain_text(engine, draft, gamma):
    engine.use_draft(draft)
    engine.gamma = gamma
    result = engine.generate(QUESTION, GREEDY)
    assert result.token_ids == plain(engine, QUESTION)
    assert result.finish_reason == "length"
    assert result.stats.new_tokens == 24
    if draft == "off" or gamma == 0:
        assert result.stats.proposed_tokens == 0
        assert set(result.drafts) == {None}
        assert result.stats.rounds == 23


def test_the_target_as_its_own_draft_is_always_right(engine):
    """Self: acceptance exactly 100%, also through settings that change, plain stretches and later turns (B007)."""
    chat = engine.conversation()
    for gamma, draft in ((4, "target"), (0, "target"), (4, "ngram"), (2, "target"), (4, "off"), (5, "target")):
        engine.gamma = gamma
        engine.use_draft(draft)
        stats = chat.send("x", SamplingParams(max_new_tokens=16, ignore_eos=True)).stats
        del chat.messages[:-2]  # the context is short; an edited history is part of the test
        if draft == "target" and gamma:
            assert stats.acceptance_rate == 1.0
            assert stats.mean_tokens_per_round > gamma - 1


def test_stream_equals_generate(engine):
    stream = engine.stream(QUESTION, GREEDY)
    deltas = list(stream)
    result = engine.generate(QUESTION, GREEDY)
    assert "".join(d.text for d in deltas) == result.text == stream.result.text
    assert tuple(i for d in deltas for i in d.token_ids) == result.token_ids
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert sum(d.accepted for d in deltas) == sum(name is not None for name in result.drafts)
    assert result.stats.peak_memory_bytes > 10_000_000


def test_prompt_forms_agree(engine):
    """B073, B164: text, messages and ids reach the model as the same ids; raw text has no template around it."""
    ids = engine.encode("hi")
    assert ids == engine.encode([{"role": "user", "content": "hi"}])
    assert engine.generate("hi", GREEDY).token_ids == engine.generate(ids, GREEDY).token_ids
    assert engine.encode("hi", raw=True) == engine.tokenizer.encode("hi")
    assert engine.generate("hi", GREEDY, raw=True).prompt_tokens == 2


@pytest.mark.parametrize("prompt", ["", [], None, [1, [1]], [{"role": "user"}], [1, "text"], 5, [288], [-1], [1.5]])
def test_bad_prompts_are_refused_and_the_engine_goes_on(engine, prompt):
    """B094, B170: an error before any model work."""
    with pytest.raises(PromptError):
        engine.generate(prompt, GREEDY)
    assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)


def test_a_prompt_that_fills_the_context_names_the_numbers(engine):
    with pytest.raises(PromptError, match=r"300 tokens.*256"):
        engine.generate([5] * 300, GREEDY)
    result = engine.generate([5] * 250, GREEDY)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 6)


def test_a_model_without_template_takes_text_but_no_messages(tmp_path):
    with load(write_tiny(tmp_path / "base", chat_template=None, **SHAPE)) as engine:
        assert engine.generate("hen", GREEDY).prompt_tokens == len(engine.tokenizer.encode("hen"))
        with pytest.raises(PromptError, match="no chat template"):
            engine.generate([{"role": "user", "content": "hi"}])


def test_callbacks_that_raise_end_the_answer(engine):
    def broken(_delta) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.generate(QUESTION, GREEDY, on_delta=broken)
    assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)


def test_many_threads_share_one_engine(engine):
    """B134, B136, B142: each text is its own plain one; a cancelled neighbour disturbs nobody."""
    prompts = [QUESTION, "hen", "and the", "or in an"]
    expected = [plain(engine, prompt) for prompt in prompts]
    got: dict[int, tuple[int, ...]] = {}

    def work(index: int) -> None:
        if index == 4:
            stream = engine.stream(QUESTION, GREEDY)
            next(stream)
            stream.cancel()
            list(stream)
        else:
            got[index] = engine.generate(prompts[index % 4], GREEDY).token_ids

    workers = [threading.Thread(target=work, args=(i,)) for i in range(9)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert {i: expected[i % 4] for i in range(9) if i != 4} == got


def test_an_idle_engine_costs_no_processor_time(folder):
    """B140, B151: after an abandoned answer the worker threads sleep."""
    with load(folder, threads=2) as engine:
        for _ in engine.stream(QUESTION, GREEDY):
            break
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.4)
        assert time.process_time() - before < 0.1


def test_stops_at_any_place_of_a_long_block(engine):
    """B080, B037: gamma 16 and only right guesses; a stop of two characters anywhere, block position 0 among them."""
    engine.use_draft("target")
    engine.gamma = 16
    whole = engine.generate(QUESTION, GREEDY)
    assert whole.stats.mean_tokens_per_round > 8
    assert whole.stats.acceptance_rate == 1.0
    for start in range(len(whole.text) - 1):
        params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(whole.text[start : start + 2],))
        engine.gamma = 16
        drafted = engine.generate(QUESTION, params)
        engine.gamma = 0
        alone = engine.generate(QUESTION, params)
        assert (drafted.text, drafted.token_ids) == (alone.text, alone.token_ids)
        assert drafted.finish_reason == alone.finish_reason == "stop"
