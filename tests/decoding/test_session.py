"""Session: prompts, reuse of the KV, prefill in chunks, cuts, and the health of drafts."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from drafts import NgramDraft
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import DraftStatus
from edgespec.errors import DraftError, EdgespecError, ModelError, PromptError
from tests.support.scripted import (
    TOKENS,
    ScriptedDraft,
    ToyCache,
    ToyDecoder,
    ToyTokenizer,
    plain_greedy,
    run,
    self_draft,
    session,
)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "no tokens"),
        ([5, -1], "-1"),
        ([5, TOKENS], f"{TOKENS}"),
        ([5, 10**12], f"{10**12}"),
        ([5, 2.5], "float"),
        (["a"], "str"),
        ([3] * 256, "256"),
        ([3] * 300, "300"),
    ],
)
def test_prompts_that_cannot_be_are_refused_before_any_work(prompt: list[Any], says: str) -> None:
    target = ToyDecoder()
    chat = session(target)
    before = run(chat, [4, 5, 6], max_new_tokens=3)
    calls = len(target.calls)
    with pytest.raises(PromptError, match=says):
        Generation(chat, prompt, SamplingParams())
    assert len(target.calls) == calls
    assert run(chat, [4, 5, 6], max_new_tokens=3).token_ids == before.token_ids


def test_ids_of_any_integer_type_are_taken() -> None:
    target = ToyDecoder()
    assert run(session(target), np.array([4, 5], np.int64), max_new_tokens=2).token_ids == tuple(
        plain_greedy(ToyDecoder(), [4, 5], 2)
    )


def test_a_tighter_context_counts() -> None:
    chat = session(context=20)
    with pytest.raises(PromptError, match="20"):
        Generation(chat, [3] * 20, SamplingParams())
    result = run(chat, [3] * 12, max_new_tokens=100)
    assert len(result.token_ids) == 8
    assert result.finish_reason == "length"
    assert session(context=1000).context == 256


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
@pytest.mark.parametrize("length", [1, 200, 254, 255])
def test_the_answer_ends_where_the_context_ends(gamma: int, length: int) -> None:
    target = ToyDecoder()
    prompt = [3 + i % 50 for i in range(length)]
    expected = plain_greedy(ToyDecoder(max_positions=400), prompt, 256 - length)
    chat = session(target, [self_draft(target)], gamma)
    result = run(chat, prompt, max_new_tokens=1000)
    assert result.token_ids == tuple(expected)
    assert result.finish_reason == "length"


def test_only_what_differs_is_prefilled_and_the_last_token_always() -> None:
    target = ToyDecoder()
    chat = session(target)
    first = run(chat, [4, 5, 6, 7], max_new_tokens=4)
    assert first.stats.reused_tokens == 0
    history = [4, 5, 6, 7, *first.token_ids]
    for prompt, reused in [
        ([*history, 9, 9], 7),  # the last token of an answer has no KV yet
        ([4, 5, 6, 8], 3),
        ([4, 5, 6, 8], 3),
        ([4, 5], 1),
        ([9, 9], 0),
    ]:
        target.calls.clear()
        result = run(chat, prompt, max_new_tokens=2)
        assert result.stats.reused_tokens == reused
        assert target.calls[0] == prompt[reused:]
        assert result.token_ids == tuple(plain_greedy(ToyDecoder(), prompt, 2))
        assert result.stats.prompt_tokens == len(prompt)


def test_prefill_in_chunks_equals_prefill_in_one() -> None:
    target = ToyDecoder()
    prompt = [3 + i % 40 for i in range(100)]
    expected = plain_greedy(ToyDecoder(), prompt, 5)
    for chunk in (1, 7, 99, 100, 101):
        target.calls.clear()
        assert run(session(target, chunk=chunk), prompt, max_new_tokens=5).token_ids == tuple(expected)
        sizes = [len(call) for call in target.calls[: -(-100 // chunk)]]
        assert sum(sizes) == 100
        assert max(sizes) <= chunk


def test_a_cancelled_prefill_stops_after_its_chunk_and_its_work_is_kept() -> None:
    target = ToyDecoder()
    chat = session(target, chunk=10)
    prompt = [3 + i % 40 for i in range(95)]
    generation = Generation(chat, prompt, SamplingParams(max_new_tokens=4))
    target.after = lambda: generation.cancel() if len(target.calls) == 3 else None
    deltas = list(generation.deltas())
    assert len(target.calls) == 3
    assert [(d.text, d.token_ids, d.finish_reason) for d in deltas] == [("", (), "cancelled")]
    assert generation.stats.prefill_tokens_per_second == 0.0
    target.after = lambda: None
    again = run(chat, prompt, max_new_tokens=4)
    assert again.stats.reused_tokens == 30
    assert again.token_ids == tuple(plain_greedy(ToyDecoder(), prompt, 4))


def test_drafts_forget_before_the_conversation_changes() -> None:
    target, order = ToyDecoder(), []
    draft = ScriptedDraft(lambda t, gamma: [2] * gamma)
    chat = session(target, [draft])
    run(chat, [4, 5, 6], max_new_tokens=5)
    draft.crop = lambda length: order.append((length, list(chat.tokens)))  # type: ignore[method-assign]
    before = list(chat.tokens)
    chat.truncate(2)
    assert order == [(2, before)]
    assert chat.tokens == before[:2]
    assert chat.valid == 2


def test_a_cache_that_cannot_roll_back_is_an_error_not_another_text(monkeypatch: pytest.MonkeyPatch) -> None:  # B106
    target = ToyDecoder()
    chat = session(target, [ScriptedDraft(lambda t, gamma: [2] * gamma)])
    monkeypatch.setattr(ToyCache, "crop", lambda self, length: 0)
    with pytest.raises(ModelError, match="positions after a crop"):
        run(chat, [4, 5, 6], max_new_tokens=9)


def test_closing_releases_everything_and_the_session_can_start_again() -> None:
    target = ToyDecoder()
    chat = session(target, [self_draft(target), NgramDraft()])
    first = run(chat, [4, 5, 6], max_new_tokens=9)
    assert chat.nbytes > 0
    chat.close()
    assert (chat.nbytes, chat.tokens, chat.valid) == (0, [], 0)
    second = run(chat, [4, 5, 6], max_new_tokens=9)
    assert second.token_ids == first.token_ids
    assert second.stats.reused_tokens == 0


def test_a_new_request_ends_the_one_before() -> None:
    chat = session()
    old = Generation(chat, [4, 5, 6], SamplingParams(max_new_tokens=50))
    old.step()
    old.step()
    new = run(chat, [9, 8, 7], max_new_tokens=5)
    assert not old.step()
    assert old.result.finish_reason == "cancelled"
    assert chat.tokens == [9, 8, 7, *new.token_ids]


def test_end_tokens_are_the_tokenizers_and_the_models_unless_given() -> None:  # B088
    target = ToyDecoder()
    target.spec = type(target.spec)(
        **{f: getattr(target.spec, f) for f in target.spec.__slots__} | {"eos_token_ids": (7,)}
    )
    assert session(target, tokenizer=ToyTokenizer(eos_ids=[1, 9])).eos_ids == {1, 7, 9}
    assert session(target, eos_ids=[3]).eos_ids == {3}


def test_padding_rows_are_no_tokens() -> None:
    assert session(ToyDecoder(64), tokenizer=ToyTokenizer(60)).token_count == 60
    assert session(ToyDecoder(50), tokenizer=ToyTokenizer(60)).token_count == 50


class TestDraftStatus:
    def status(self) -> DraftStatus:
        return DraftStatus(ScriptedDraft(lambda t, gamma: [], "mine"))

    def test_three_failures_in_a_row_give_it_up_with_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        status = self.status()
        for _ in range(2):
            status.failed(RuntimeError("boom"))
        status.worked()
        for _ in range(2):
            status.failed(RuntimeError("boom"))
        assert status.active
        assert str(status) == "active"
        status.failed(RuntimeError("boom"))
        assert not status.active
        assert str(status) == "failed: RuntimeError: boom"
        assert [r.levelno for r in caplog.records] == [logging.WARNING]
        assert "mine" in caplog.text
        assert "boom" in caplog.text

    @pytest.mark.parametrize(
        "error",
        [
            DraftError("wrong"),
            ModelError("cut off"),
            MemoryError(),
            OSError("disk gone"),
            type("OutOfMemoryError", (RuntimeError,), {})("CUDA"),
        ],
    )
    def test_what_cannot_get_better_gives_it_up_at_once(self, error: Exception) -> None:
        status = self.status()
        status.failed(error)
        assert not status.active
        assert (str(error) if isinstance(error, EdgespecError) else type(error).__name__) in str(status)

    def test_free_means_lookup(self) -> None:
        assert DraftStatus(NgramDraft()).free
        assert not self.status().free
