"""Engine and conversations on tiny models with the real CPU engine."""

from __future__ import annotations

import gc
import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from edgespec.errors import ConfigError, DraftError, EdgespecError, MemoryBudgetError, ModelError, PromptError
from tests.support.tiny import write_tiny

SHAPE = {"head_dim": 16}
QUESTION = "the hen and the hen and the hen and the"
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(home))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "target", **SHAPE)


def load(folder: Path, **settings) -> Engine:
    settings = {"threads": 1, "weight_format": "float32", **settings}
    return Engine.from_pretrained(str(folder), **settings)


@pytest.fixture(scope="module")
def engine(folder: Path, home: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(home))
        with load(folder, drafts=["ngram", str(folder)], gamma=3) as made:
            yield made


@pytest.fixture(autouse=True)
def _fresh(engine: Engine) -> None:
    engine.use_draft("auto")
    engine.gamma = 3


def plain(engine: Engine, prompt, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    """Greedy answer by a loop of its own: one token per forward, no session, no rounds."""
    decoder = engine._target.decoder
    cache, ids, out = decoder.new_cache(), engine.encode(prompt), []
    logits = decoder.forward(ids, cache, logits=1).logits[0]
    for _ in range(params.max_new_tokens):
        out.append(int(logits[: engine.tokenizer.size].argmax()))
        logits = decoder.forward(out[-1:], cache).logits[0]
    return tuple(out)


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


@pytest.mark.parametrize("prompt", ["", [], None, [[1]], [{"role": "user"}], ["text"], 5, [288], [-1], [1.5]])
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


# Conversations


def cold(engine: Engine, messages, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return engine.generate(messages, params).token_ids


def test_later_turns_equal_cold_sessions_and_reuse_the_earlier_ones(engine):
    """B113, B024: by length, by stop string inside a block, and by cancel; reuse is reported."""
    chat = engine.conversation(system="be brief")
    text = engine.generate(QUESTION, GREEDY).text
    stop = SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(text[9:11],))
    for turn, params in enumerate((GREEDY, stop, GREEDY)):
        history = [{"role": "system", "content": "be brief"}, *chat.messages, {"role": "user", "content": "hen"}]
        expected = cold(engine, history, params)
        result = chat.send("hen", params)
        assert result.token_ids == expected
        assert chat.messages[-1] == {"role": "assistant", "content": result.text}
        if turn:
            assert result.stats.reused_tokens > 10
    assert len(chat.messages) == 6


def test_cancelled_and_abandoned_answers_stay_as_far_as_they_came(engine):
    """B146, invariant 6."""
    chat = engine.conversation()
    stream = chat.stream("hen", GREEDY)
    first = next(stream)
    stream.cancel()
    assert list(stream)[-1].finish_reason == "cancelled"
    assert chat.messages[-1]["content"] == stream.result.text
    assert stream.result.text.startswith(first.text)
    for _ in chat.stream("and", GREEDY):
        break
    gc.collect()
    expected = cold(engine, [*chat.messages, {"role": "user", "content": "the"}])
    assert chat.send("the", GREEDY).token_ids == expected


def test_undo_regenerate_clear_and_edits(engine):
    chat = engine.conversation()
    chat.send("hen", GREEDY)
    before = [dict(m) for m in chat.messages]
    chat.send("and the", GREEDY)
    chat.undo()
    assert chat.messages == before
    again = chat.regenerate(GREEDY)
    list(again)
    assert chat.messages == before
    chat.messages[0]["content"] = "the hen"  # an edited question
    expected = cold(engine, [*chat.messages, {"role": "user", "content": "x"}])
    assert chat.send("x", GREEDY).token_ids == expected
    chat.system = "other"
    expected = cold(engine, [{"role": "system", "content": "other"}, *chat.messages, {"role": "user", "content": "y"}])
    assert chat.send("y", GREEDY).token_ids == expected
    chat.clear()
    assert chat.messages == []
    with pytest.raises(PromptError, match="no question"):
        chat.regenerate()
    chat.undo()  # nothing to undo is no error


def test_an_error_leaves_the_history_as_it_was(engine, monkeypatch):
    chat = engine.conversation()
    chat.send("hen", GREEDY)
    before = [dict(m) for m in chat.messages]
    forward, calls = engine._target.decoder.forward, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise ModelError("it broke")
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine._target.decoder, "forward", failing)
    engine.use_draft("off")
    with pytest.raises(ModelError, match="it broke"):
        chat.send("and", GREEDY)
    assert chat.messages == before
    monkeypatch.undo()
    expected = cold(engine, [*before, {"role": "user", "content": "and"}])
    assert chat.send("and", GREEDY).token_ids == expected


# Threads


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


# Drafts that cannot be used, memory, settings


@pytest.mark.parametrize("damage", ["missing", "truncated", "vocabulary", "architecture"])
def test_a_draft_that_cannot_be_used_is_named_once_and_generation_goes_on(folder, tmp_path, caplog, damage):
    """B018, B012, B124: the right text, one warning with name and cause, status "failed", 0 drafted."""
    path = tmp_path / "broken"
    if damage == "truncated":
        write_tiny(path, **SHAPE)
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[:-100])
    elif damage == "vocabulary":
        write_tiny(path, **SHAPE)
        text = (path / "tokenizer.json").read_text()
        (path / "tokenizer.json").write_text(text.replace('"w270"', '"other"'))
    elif damage == "architecture":
        write_tiny(path, **SHAPE)
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text.replace('"llama"', '"mamba"').replace("LlamaFor", "MambaFor"))
    with caplog.at_level(logging.WARNING), load(folder, drafts=["ngram", str(path)], gamma=3) as engine:
        result = engine.generate(QUESTION, GREEDY)
        assert result.token_ids == plain(engine, QUESTION)
        assert engine.drafts["ngram"] == "active"
        assert engine.drafts["broken"].startswith("failed: ")
        assert result.stats.draft_share["broken"] == 0
        with pytest.raises(DraftError, match="broken"):
            engine.use_draft("broken")
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "broken" in warnings[0]


def test_a_draft_with_a_shorter_context_steps_aside(folder, tmp_path, caplog):
    """B011, B085: the conversation outgrows the draft; the text goes on, with one log line."""
    draft = write_tiny(tmp_path / "short", max_position_embeddings=48, **SHAPE)
    with caplog.at_level(logging.WARNING), load(folder, drafts=[str(draft)], gamma=3) as engine:
        for prompt in ([7] * 40, [7] * 48, [7] * 49, [7] * 100):
            result = engine.generate(prompt, GREEDY)
            assert result.token_ids == plain(engine, prompt)


def test_padded_vocabularies_differ_in_size_only(folder, tmp_path):
    """B013: more or fewer rows than the target; padding rows are never proposed nor emitted."""
    for size in (280, 320):
        draft = write_tiny(tmp_path / f"rows{size}", vocab_size=size, **SHAPE)
        with load(folder, drafts=[str(draft)], gamma=3) as engine:
            result = engine.generate(
                QUESTION, SamplingParams(max_new_tokens=40, temperature=2.0, seed=1, ignore_eos=True)
            )
            assert max(result.token_ids) < 280
            assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)


def test_unknown_names_are_refused(engine):
    with pytest.raises(DraftError, match="no draft 'nobody'"):
        engine.use_draft("nobody")
    for bad in (-1, 65, "many", 1.5, True):
        with pytest.raises(ConfigError):
            engine.gamma = bad
    assert engine.gamma == 3


def test_what_does_not_fit_is_refused_with_the_numbers(folder):
    """B128, invariant 3: before any weight is read."""
    with pytest.raises(MemoryBudgetError, match=r"are needed .*target.*the memory budget is 1\.0 MiB"):
        load(folder, memory_budget="1MiB")
    with pytest.raises(ModelError, match="1000 is more than the 256 positions"):
        load(folder, context=1000)


def test_a_small_budget_shortens_the_context_unless_one_was_asked_for(tmp_path):
    long = write_tiny(tmp_path / "long", max_position_embeddings=1 << 20, **SHAPE)
    with load(long, memory_budget="162MiB") as engine:
        assert 512 <= engine.context < 8192
    with load(long) as engine:
        assert engine.context == 8192
    with pytest.raises(MemoryBudgetError, match="KV cache"):
        load(long, memory_budget="162MiB", context=1 << 20)


def test_a_closed_engine_says_so(folder):
    engine = load(folder)
    engine.close()
    engine.close()
    with pytest.raises(EdgespecError, match="closed"):
        engine.generate("hi")


def test_measured_costs_are_kept_for_the_next_start(folder, home):
    with load(folder, gamma="auto") as engine:
        assert engine._target.costs.measured
        file = engine._target.costs_file
    assert file.exists()
    saved = file.read_text()
    with load(folder, gamma="auto") as engine:
        assert engine._target.costs.to_json()["verify"].keys() == {"1", "2", "3", "4", "6", "9"}
    file.write_text("damaged")
    with load(folder, gamma="auto") as engine:
        assert engine._target.costs.measured
    assert saved


def test_sampling_is_reproducible_by_seed_and_only_by_seed(engine):
    """B044, B047."""
    params = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    engine.gamma = "auto"
    texts = {engine.generate(QUESTION, SamplingParams(**params, seed=s)).token_ids for s in range(20)}
    assert len(texts) > 15
    once, twice = (engine.generate(QUESTION, SamplingParams(**params, seed=3)).token_ids for _ in range(2))
    assert once == twice
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    unseeded = {engine.generate(QUESTION, SamplingParams(**params)).token_ids for _ in range(8)}
    assert len(unseeded) > 4
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def test_logprobs_are_the_target_s_own(engine):
    """B059, B061: one entry a token, from raw logits, the same with and without drafts."""
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=3)
    engine.use_draft("off")
    alone = engine.generate(QUESTION, params)
    engine.use_draft("auto")
    drafted = engine.generate(QUESTION, params)
    assert alone.logprobs is not None
    assert drafted.logprobs is not None
    assert [t.token_id for t in drafted.logprobs] == list(drafted.token_ids)
    for one, other in zip(alone.logprobs, drafted.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert other.top[0][0] == other.token_id  # greedy: the chosen one leads
        assert other.margin >= 0
