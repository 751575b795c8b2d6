"""Conversations: history, reuse, and answers that end early."""

from __future__ import annotations

import gc
import threading

import pytest

from edgespec import Engine, SamplingParams
from edgespec.errors import ModelError, PromptError
from tests.support.tiny_engine import GREEDY, QUESTION


def cold(engine: Engine, messages, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return engine.generate(messages, params).token_ids


def test_later_turns_equal_cold_sessions_and_reuse_the_earlier_ones(engine):
    """B113, B024, B169: ends by length and by stop string in a block; only a common prefix is reused, and reported."""
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


def test_an_old_answer_cannot_overwrite_the_history(engine):
    chat = engine.conversation()
    old = chat.stream("hen", GREEDY)
    shown = next(old).text
    chat.send("and", GREEDY)
    after = [dict(m) for m in chat.messages]
    assert [m["content"] for m in after if m["role"] == "user"] == ["hen", "and"]
    assert after[1]["content"].startswith(shown)
    old.close()
    assert chat.messages == after
    old = chat.stream("the", GREEDY)
    next(old)
    chat.clear()
    old.close()
    assert chat.messages == []
    stream = chat.stream("x", GREEDY)
    stream.cancel()
    list(stream)
    assert chat.messages == []  # nothing was shown, so there is no turn


def test_two_threads_on_one_conversation_end_each_other_s_answers(engine):
    """B136: no exception, and the next turn is right."""
    chat, errors = engine.conversation(), []

    def work() -> None:
        try:
            for _ in range(2):
                chat.send("x", SamplingParams(max_new_tokens=3, ignore_eos=True))
        except Exception as error:
            errors.append(error)

    for _ in range(5):
        workers = [threading.Thread(target=work, daemon=True) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not any(worker.is_alive() for worker in workers)
        del chat.messages[:-2]
        expected = cold(engine, [*chat.messages, {"role": "user", "content": "x"}])
        assert chat.send("x", GREEDY).token_ids == expected
        chat.clear()
    assert errors == []


def test_a_stream_can_be_closed_from_another_thread(engine):
    stream = engine.stream(QUESTION, SamplingParams(max_new_tokens=200, ignore_eos=True))
    next(stream)
    closer = threading.Thread(target=stream.close)
    closer.start()
    list(stream)
    closer.join(10)
    assert stream.result.finish_reason == "cancelled"
    assert list(stream) == []
