"""What an engine is built from: drafts, memory, settings, and what is refused."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest

from edgespec import SamplingParams
from edgespec.errors import ConfigError, DraftError, EdgespecError, MemoryBudgetError, ModelError, PromptError
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import GREEDY, QUESTION, SHAPE, load, plain


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


def test_a_draft_counts_against_the_budget_beside_the_target(folder, tmp_path):
    """Invariant 3: a budget with room for the target alone refuses the draft, not the engine."""
    with load(folder, drafts=None, context=256) as engine:
        planned = sum(engine._target.planned.values())
    with load(folder, drafts=[str(folder)], context=256, memory_budget=planned + 1000) as engine:
        assert "are needed" in engine.drafts["target"]
        assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)
    with load(folder, drafts=[str(folder)], context=256, memory_budget=2 * planned) as engine:
        assert engine.drafts["target"] == "active"
    with pytest.raises(MemoryBudgetError):
        load(folder, drafts=None, context=256, memory_budget=planned - 1000)


def test_drafts_get_names_of_their_own(folder, tmp_path):
    names = ("Qwen2.5-0.5B", "auto", "other/Qwen2.5-0.5B")
    paths = [str(write_tiny(tmp_path / name, **SHAPE)) for name in names]
    with load(folder, drafts=["ngram", *paths]) as engine:
        assert list(engine.drafts) == ["ngram", "Qwen2.5-0.5B", "auto-2", "Qwen2.5-0.5B-2"]
        assert set(engine.drafts.values()) == {"active"}


@pytest.mark.parametrize("chosen", ["ngram", "target"])
def test_a_seed_keeps_to_the_chosen_draft_unless_memory_decides_whether_it_is_there(engine, chosen):
    engine.gamma = "auto"
    engine.use_draft(chosen)
    words = {"logit_bias": {7: 100.0}}  # a text that lookup can go on with
    params = SamplingParams(max_new_tokens=24, temperature=0.5, seed=1, ignore_eos=True, **words)
    share = engine.generate(QUESTION, params).stats.draft_share
    assert (share["ngram"] > 0) == (chosen == "ngram")
    assert share["target"] == 0


@pytest.mark.parametrize("context", [4, 12, 64, 70])
def test_short_contexts_start(folder, context, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    with load(folder, context=context, gamma="auto") as engine:
        assert len(engine.generate([5, 6], GREEDY).token_ids) == min(24, context - 2)


def test_costs_are_measured_when_gamma_becomes_auto(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    with load(folder, gamma=4) as engine:
        engine.generate(QUESTION, GREEDY)
        assert not engine._target.costs.covers((9,))
        engine.gamma = "auto"
        engine.generate(QUESTION, GREEDY)
        assert engine._target.costs.covers((1, 2, 3, 4, 6, 9))


def test_closing_an_engine_frees_the_weights_of_kept_conversations(folder):
    engine = load(folder)
    chat = engine.conversation()
    chat.send("hen", GREEDY)
    session = weakref.ref(engine._target.decoder._session)
    engine.close()
    gc.collect()
    assert session() is None


def test_other_wrong_prompts_and_drafts(engine, folder):
    with pytest.raises(PromptError, match="bytes"):
        engine.generate(b"hello")
    with pytest.raises(PromptError, match="raw"):
        engine.generate([{"role": "user", "content": "hi"}], raw=True)
    with load(folder, drafts=folder) as made:
        assert made.drafts == {"target": "active"}
    with load(folder, drafts="off") as made:
        assert made.drafts == {}


def test_a_closed_engine_says_so(folder):
    engine = load(folder)
    engine.close()
    engine.close()
    with pytest.raises(EdgespecError, match="closed"):
        engine.generate("hi")


def test_measured_costs_are_kept_for_the_next_start(folder, home):
    with load(folder, gamma="auto") as engine:
        assert engine._target.costs.covers((1, 2, 3, 4, 6, 9))
        file = engine._target.costs_file
    assert file.exists()
    saved = file.read_text()
    with load(folder, gamma="auto") as engine:
        assert engine._target.costs.to_json()["verify"].keys() == {"1", "2", "3", "4", "6", "9"}
    file.write_text("damaged")
    with load(folder, gamma="auto") as engine:
        assert engine._target.costs.covers((1, 2, 3, 4, 6, 9))
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


def test_too_many_threads_are_said_once(folder, caplog, monkeypatch):
    from edgespec import loading

    monkeypatch.setattr(loading.os, "cpu_count", lambda: 2)
    loading._warn_of_threads.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            load(folder, drafts=["ngram", str(folder)], threads=99, gamma=3).close()
    assert [record.getMessage() for record in caplog.records] == [
        "99 threads on 2 cores would slow each other down; 2 are used"
    ]
