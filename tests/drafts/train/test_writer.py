"""The batched writer against the engines: the same greedy text and states, and samples of the right law."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from drafts.recording import record
from drafts.train.config import TrainTarget
from drafts.train.writer import BatchWriter, Request, Written
from tests.drafts.train.support import text, tiny_target

LIMIT = 12


def writer(target: TrainTarget, **settings) -> BatchWriter:
    values = {"eos_ids": target.eos_ids, "token_count": target.tokenizer.size, "batch": 5, "positions": 128}
    return BatchWriter(target.weights, **{**values, "dtype": torch.float32, **settings})


def answers(made: BatchWriter, requests: list[Request]) -> dict[str, Written]:
    found = {written.request.key: written for written in made.write(requests)}
    assert set(found) == {request.key for request in requests}
    return found


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 5}),
    ],
)
def test_greedy_answers_and_states_are_the_engines(tmp_path: Path, architecture: str, changes: dict) -> None:
    target = tiny_target(tmp_path, architecture, **changes)
    window = 8
    requests = [Request(str(n), target.encode(text(n)[: 5 + 3 * n]), LIMIT - n % 3) for n in range(12)]
    found = answers(writer(target, window=window), requests)
    decoder = target.decoder(128)
    for request in requests:
        expected = record(decoder, request.prompt, request.max_new_tokens, token_count=280)
        written = found[request.key]
        assert tuple(written.answer) == expected.answer
        start = max(0, len(request.prompt) - window)
        assert written.hidden.dtype == np.float16
        assert expected.hidden is not None
        np.testing.assert_allclose(written.hidden, expected.hidden[start:], atol=2e-3, rtol=1e-3)


def test_states_before_rounding_are_the_engines_within_a_ten_thousandth(tmp_path: Path, monkeypatch) -> None:
    target = tiny_target(tmp_path)
    made = writer(target, window=64)
    monkeypatch.setattr(torch, "float16", torch.float32)  # keep what would be rounded
    request = Request("x", target.encode(text(3)), LIMIT)
    written = answers(made, [request])["x"]
    expected = record(target.decoder(128), request.prompt, LIMIT, token_count=280)
    assert written.hidden.dtype == np.float32
    np.testing.assert_allclose(written.hidden, expected.hidden, atol=1e-4)


def test_end_tokens_end_answers_and_padding_rows_are_never_written(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    request = Request("x", target.encode(text(1)), LIMIT)
    plain = answers(writer(target), [request])["x"].answer
    assert len(plain) == LIMIT
    end = plain[4]
    cut = answers(writer(target, eos_ids=[end]), [request])["x"]
    assert cut.answer == plain[: plain.index(end) + 1]
    few = answers(writer(target, token_count=40), [request])["x"]
    assert max(few.answer) < 40


def test_samples_follow_the_targets_law_and_seeds_repeat_them(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, scale=0.15)
    count, few, temperature = 1500, 12, 0.7
    prompt = target.encode(text(2))
    made = writer(target, token_count=few, batch=256)
    requests = [Request(f"s{n}", prompt, 2, temperature, seed=7) for n in range(count)]
    found = answers(made, requests)
    first = np.bincount([written.answer[0] for written in found.values()], minlength=few)
    decoder = target.decoder(64)
    cache = decoder.new_cache()
    logits = decoder.forward(prompt, cache, logits=1).logits[0, :few].astype(np.float64) / temperature
    law = np.exp(logits - logits.max())
    law /= law.sum()
    assert stats.chisquare(first, count * law).pvalue > 0.001
    wrong = np.exp((logits - logits.max()) * temperature)  # the law at temperature 1 must be told apart
    assert stats.chisquare(first, count * wrong / wrong.sum()).pvalue < 0.001
    best = int(law.argmax())  # and the second token, given the first
    second = np.bincount([w.answer[1] for w in found.values() if w.answer[0] == best], minlength=few)
    logits = decoder.forward([best], cache, logits=1).logits[0, :few].astype(np.float64) / temperature
    law = np.exp(logits - logits.max())
    assert stats.chisquare(second, second.sum() * law / law.sum()).pvalue > 0.001
    again = answers(made, requests[:40])
    assert all(again[key].answer == found[key].answer for key in again)


def test_prompts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    with pytest.raises(ValueError, match="do not fit"):
        list(writer(target, positions=16).write([Request("x", [1] * 10, 7)]))
